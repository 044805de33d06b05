"""Kernels of traced calls are compiled beforehand: under the names that launches look for, and never at the price of a call."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

pytest.importorskip("triton.experimental.gluon")
from dmattn_ops.api import compiler
from dmattn_ops.choice import arch
from dmattn_ops.dispatch import traced
from dmattn_ops.launching import ahead, launch
from dmattn_ops.meta import fakes
from tests.support import traced_calls
from tests.support.traced_calls import Sizes

ROOT = Path(__file__).parents[2]
TRAINING = Sizes(1, 4096, 2, 2, 64, 256)
SMALL = Sizes(1, 256, 2, 2, 64, 64)


def small_step(device):
    traced_calls.attention_step(SMALL, device)


FORKING = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def run_script(script, cache, **variables):
    """Run a script in a process of its own that looks into Triton's cache `cache`; return what it says in its last line."""
    named = {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "DMATTN_COMPILE_AHEAD": "1"}
    environment = {**os.environ, **named, **variables}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


SAME_KEYS = """
import json, sys
from triton import knobs
from dmattn_ops.launching import ahead
from tests.support import traced_calls
ahead.workers = lambda: 2
sizes, sm = traced_calls.Sizes(*{sizes}), {sm}
step = lambda device: traced_calls.attention_step(sizes, device)
traced_calls.trace(step, sm)
traced_calls.wait_until_compiled()
helper = ahead._helper.process.pid
ahead.end()
found = []
knobs.compilation.listener = lambda *, metadata, cache_hit, **_: found.append((metadata["name"], cache_hit))
launched = traced_calls.launch(step, sm)
print(json.dumps([launched, found, helper]))
"""


@FORKING
@pytest.mark.parametrize("sm", [80, 90])
def test_launches_find_every_kernel_in_the_cache_that_was_compiled_beforehand(sm, tmp_path):
    launched, found, _ = run_script(SAME_KEYS.format(sizes=tuple(TRAINING), sm=sm), tmp_path)
    assert {"plan_epochs", "gather_kernel", "forward_kernel", "backward_kernel", "sum_kernel"} <= set(launched)
    assert {name for name, _ in found} == set(launched)
    assert [name for name, hit in found if not hit] == []
    entries = list(tmp_path.rglob("*.cubin"))
    assert len(entries) == len(found)  # nothing else was compiled
    [mark] = {path.name[:7] for path in tmp_path.iterdir() if path.is_file()}
    assert mark == "dmattn-"
    assert len(list(tmp_path.glob("dmattn-*"))) == 3  # of the three calls


@pytest.fixture
def submitted(monkeypatch, tmp_path):
    """The calls that are given to the helper, which is not started."""
    calls = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DMATTN_COMPILE_AHEAD", "1")
    monkeypatch.setattr(ahead, "submit", lambda call: calls.append(call) or True)
    monkeypatch.setattr(traced, "_seen", set())
    return calls


def test_each_call_is_described_once_with_all_that_decides_about_its_kernels(submitted):
    traced_calls.trace(small_step, 90)
    traced_calls.trace(small_step, 90)
    assert [call.name for call in submitted] == ["key_lifetimes", "forward", "backward"]
    forward = submitted[1]
    assert forward.arch == arch.KNOWN[90] and forward.cache == os.environ["TRITON_CACHE_DIR"]
    assert forward.tensors[0] == ((1, 256, 2, 64), (32768, 128, 64, 1), 0, torch.bfloat16)
    assert forward.tensors[2][1] == (256 * 3 * 2 * 64, 3 * 2 * 64, 64, 1)
    assert len({call.mark for call in submitted}) == 3


def test_nothing_is_compiled_again_that_is_marked_in_the_cache(submitted, monkeypatch, tmp_path):
    traced_calls.trace(small_step, 90)
    for call in submitted[:2]:
        (tmp_path / call.mark).touch()
    monkeypatch.setattr(traced, "_seen", set())
    submitted.clear()
    traced_calls.trace(small_step, 90)
    assert [call.name for call in submitted] == ["backward"]
    monkeypatch.setattr(traced, "_seen", set())
    monkeypatch.setenv("TRITON_DEBUG", "1")  # which Triton keeps apart
    submitted.clear()
    traced_calls.trace(small_step, 90)
    assert len(submitted) == 3


@pytest.mark.parametrize("why", ["variable", "daemon", "interpreter", "checks", "old GPU"])
def test_nothing_is_compiled_beforehand_where_that_cannot_be_or_is_not_wanted(submitted, monkeypatch, why):
    if why == "variable":
        monkeypatch.delenv("DMATTN_COMPILE_AHEAD")
    elif why == "daemon":
        monkeypatch.setattr(traced.multiprocessing.current_process(), "_config", {"daemon": True})
    elif why == "interpreter":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    elif why == "checks":
        monkeypatch.setenv("DMATTN_CHECK", "1")
    traced_calls.trace(small_step, 75 if why == "old GPU" else 90)
    assert submitted == []


def test_fake_tensors_outside_of_a_compiler_are_not_those_of_a_graph(submitted):
    """Such as those with which DTensor asks for shapes."""
    with traced_calls.on_gpu(90), FakeTensorMode():
        small_step("cuda")
    assert submitted == []


@pytest.mark.parametrize("own", ["", "inductor"])
def test_kernels_stay_in_the_folder_in_which_they_are(submitted, monkeypatch, tmp_path, own):
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    if own:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / own))
    else:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    traced_calls.trace(small_step, 90)
    expected = str(tmp_path / own / "triton" / "0") if own else str(tmp_path / ".triton" / "cache")
    assert {call.cache for call in submitted} == {expected} == {triton_cache_dir(0)}


def test_a_folder_that_cannot_be_made_is_left_to_inductor(submitted, monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(traced.environment, "_said", set())
    with pytest.warns(UserWarning, match="compiles no kernels ahead: NotADirectoryError"):
        traced_calls.trace(small_step, 90)
    assert submitted == [] and "TRITON_CACHE_DIR" not in os.environ


def test_sizes_that_the_tracer_does_not_know_are_left_to_the_launch(submitted):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with traced_calls.on_gpu(90), mode:
        scores = torch.empty(1, 2, 64, device="cuda")
        traced.note("key_lifetimes", (scores, None, mode.shape_env.create_unbacked_symint()))
        assert submitted == []
        traced.note("key_lifetimes", (scores, None, 8))
    assert len(submitted) == 1


def test_what_goes_wrong_costs_a_warning_and_no_call(submitted, monkeypatch):
    def fail(on):
        raise RuntimeError("no driver")

    monkeypatch.setattr(traced.environment, "_said", set())
    with traced_calls.on_gpu(90) as patch, pytest.warns(UserWarning, match="compiles no kernels ahead: RuntimeError"):
        patch.setattr(arch, "physical", fail)
        with FakeTensorMode(shape_env=ShapeEnv()):
            traced_calls.attention_step(SMALL, "cuda")
    assert submitted == []


def test_a_compiler_tells_of_every_operator_of_the_forward_and_of_the_backward(monkeypatch):
    from dmattn_ops import dynamic_mask, flash_dmattn_func

    told = []
    monkeypatch.setattr(
        fakes,
        "when_traced",
        [lambda name, given: told.append((name, traced._are_of_a_compiler(t for t in given if torch.is_tensor(t))))],
    )

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(query, scores):
        return flash_dmattn_func(query, query, query, dynamic_mask(scores, 8), scores.unsqueeze(2)).sum()

    torch._dynamo.reset()
    attend(torch.randn(1, 40, 2, 16, requires_grad=True), torch.randn(1, 2, 40, requires_grad=True)).backward()
    assert {name for name, _ in told} == {"key_lifetimes", "forward", "backward"}
    assert all(compiles for _, compiles in told)


def test_a_launch_asks_for_its_kernel_before_it_compiles_it_and_never_again(monkeypatch):
    from tests.support.launch_stand_ins import SIGNATURE, Compiled, Kernel

    asked = []
    monkeypatch.setattr(launch, "JITFunction", Kernel)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(ahead, "wait_for", asked.append)
    kernel = Kernel(Compiled(SIGNATURE))
    x = torch.zeros(8)
    for _ in range(2):
        launch.launch(kernel, (3, 2), x, x, 7, 1 << 40, 1, scale=0.5, W=64, num_warps=4)
    assert asked == [kernel.__name__]


def test_a_rank_takes_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ahead.workers() == 12
    for ranks, share in (("4", 3), ("8", 1), ("many", 12), ("0", 12)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert ahead.workers() == share
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(100)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert ahead.workers() == ahead.MOST_WORKERS
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert not ahead.submit(None)  # with one core there is nothing to win


@pytest.mark.parametrize("program", ["", None, "/opt/app/server"])
def test_a_program_that_is_no_python_is_not_started_again(program, monkeypatch):
    monkeypatch.setattr(ahead, "workers", lambda: 2)
    monkeypatch.setattr(sys, "executable", program)
    monkeypatch.setattr(ahead, "Helper", None)
    assert not ahead.submit(None)


def test_a_helper_that_failed_is_not_started_again_and_one_that_had_nothing_to_do_is(monkeypatch):
    class Ended:
        alive, started = False, []

        def __init__(self, status=0):
            self.process = SimpleNamespace(poll=lambda: status)
            self.started.append(status)

        def send(self, call):
            pass

    monkeypatch.setattr(ahead, "workers", lambda: 2)
    monkeypatch.setattr(ahead, "Helper", Ended)
    monkeypatch.setattr(ahead, "_helper", Ended(1))
    assert not ahead.submit(None) and Ended.started == [1]
    monkeypatch.setattr(ahead, "_helper", Ended(0))
    assert ahead.submit(None) and Ended.started == [1, 0, 0]


def test_calls_are_not_recorded_a_second_time(monkeypatch):
    monkeypatch.setenv("DMATTN_RECORD", "shapes")
    monkeypatch.setenv("FLASH_DMATTN_PROFILE_BACKWARD", "1")
    monkeypatch.setenv("DMATTN_ARCH", "8.6")
    kept = ahead.surroundings()
    assert not {"DMATTN_RECORD", "FLASH_DMATTN_PROFILE_BACKWARD"} & set(kept)
    assert kept["DMATTN_ARCH"] == "8.6"


# The process that compiles


@pytest.fixture
def server(tmp_path):
    """A server of two kernels at a time, and what it says."""
    own, its = os.pipe()
    made = compiler.Server(0, its, 2)
    yield made, own
    os.close(own)
    os.close(its)


def work_off(server, own):
    """Let a server compile what it has to do; return the most forks at a time, and the news."""
    most, until = 0, time.monotonic() + 60
    while (server.todo or server.forks) and time.monotonic() < until:
        server.step()
        most = max(most, len(server.forks))
        time.sleep(0.01)
    server.step()
    return most, [json.loads(line) for line in os.read(own, 1 << 16).splitlines()]


@FORKING
def test_other_children_are_left_to_those_who_started_them(server, tmp_path):
    made, own = server
    other = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody asked how
    made.todo.append(compiler.Kernel("kernel", 0, lambda: time.sleep(0.1), str(tmp_path)))
    _, news = work_off(made, own)
    assert {"kernel": "kernel", "more": -1} in news and not made.failed
    assert other.wait() == 3


@FORKING
@pytest.mark.parametrize("fails", ["", "raises", "dies"])
def test_no_more_kernels_are_compiled_at_a_time_than_asked_and_a_cache_is_marked_when_all_are_in_it(
    server, tmp_path, fails
):
    made, own = server

    def build(index):
        time.sleep(0.1)
        if index == 2 and fails == "raises":
            raise RuntimeError("ptxas")
        if index == 2 and fails == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / f"kernel{index}").write_text(os.environ["TRITON_CACHE_DIR"])

    for index in range(5):
        made.todo.append(compiler.Kernel(f"kernel{index}", index, lambda index=index: build(index), str(tmp_path)))
    made.marks.append(tmp_path / "mark")
    most, news = work_off(made, own)
    assert most == 2
    assert sorted(said["kernel"] for said in news if said.get("more") == -1) == [f"kernel{index}" for index in range(5)]
    left = [index for index in range(5) if not (fails and index == 2)]
    assert [index for index in range(5) if (tmp_path / f"kernel{index}").exists()] == left
    assert (tmp_path / "mark").exists() == (not fails)


def test_a_call_that_no_launcher_takes_is_answered_and_not_marked(server, tmp_path, monkeypatch):
    made, own = server
    monkeypatch.setattr(compiler, "kernels_of", lambda call: 1 / 0)
    made.take_up(ahead.Described("forward", (), (), arch.KNOWN[90], "", str(tmp_path), "mark"))
    most, news = work_off(made, own)
    assert most == 0 and news == [{"calls": 1}]
    assert not (tmp_path / "mark").exists()


# The process that launches


LEFT = """
import json, os, signal, sys, time
from dmattn_ops.launching import ahead
from tests.support import traced_calls
ahead.workers = lambda: 2
traced_calls.trace(lambda device: traced_calls.attention_step(traced_calls.Sizes(1, 256, 2, 2, 64, 64), device), 90)
process = ahead._helper.process
{then}
print(json.dumps(process.pid), flush=True)
{end}
"""


def alive(pid):
    """Return whether a process runs: one that has ended and that nobody has asked for yet does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@FORKING
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("end", ["", "os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_process_outlives_the_one_that_launches(end, tmp_path):
    then = "time.sleep(4)"  # it compiles
    variables = {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "DMATTN_COMPILE_AHEAD": "1"}
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", LEFT.format(then=then, end=end)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, env=environment)
    helper = int(done.stdout.splitlines()[-1])
    until = time.monotonic() + 30
    while (left := of_session(helper)) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []


def of_session(session):
    """Return the processes of a session that run: the helper, its forks, and what these have started."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in pids if session_of(pid) == session and alive(pid)]


def session_of(pid):
    """Return the session of a process; -1 where it has ended."""
    try:
        return os.getsid(pid)
    except OSError:
        return -1


@FORKING
def test_a_helper_that_is_killed_is_waited_for_no_longer(tmp_path):
    then = "time.sleep(1); assert ahead._helper.calls; process.kill(); ahead.wait_for('forward_kernel')"
    end = "assert not ahead._helper.alive; assert ahead._helper.process.wait(10) is not None"
    run_script(LEFT.format(then=then, end=end), tmp_path)


@FORKING
def test_a_forked_process_leaves_the_helper_alone_and_waits_for_nothing(tmp_path):
    then = """
if (child := os.fork()) == 0:
    ahead.wait_for("forward_kernel")
    os._exit(0 if ahead._helper is None else 1)
assert os.waitpid(child, 0)[1] == 0
assert ahead._helper.alive and process.poll() is None
"""
    run_script(LEFT.format(then=then, end=""), tmp_path)
