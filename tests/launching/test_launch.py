"""Plans: what a call launched is repeated with other addresses, through the driver or, where that may not be, Triton."""

import ctypes
import gc
import struct
import threading
import weakref

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
from dmattn_ops.launching import driver, launch, plan, plans, tensor_maps
from dmattn_ops.ops import schemas
from tests.support.launch_stand_ins import SIGNATURE, Compiled, Driver, Kernel

STREAM = 0x5EED0


@pytest.fixture
def libcuda(monkeypatch):
    if driver._library() is None:
        pytest.skip("the C++ library is not built: Triton launches")
    fake = Driver([8, 8, 4, 8, 4, 8, 8])
    monkeypatch.setattr(driver, "driver", lambda: fake.functions)
    monkeypatch.setattr(plan, "allocate", lambda *layout: torch.empty_strided(*layout[:2], dtype=layout[2]))
    monkeypatch.setattr(plan, "_current_device", lambda: 0)
    monkeypatch.setattr(plan, "raw_stream", lambda device: STREAM)
    monkeypatch.setattr(launch, "JITFunction", Kernel)
    monkeypatch.setattr(launch, "_compiled", {})
    return fake


def aligned(*shape, dtype=torch.float32):
    tensor = torch.zeros(*shape, dtype=dtype)
    assert tensor.data_ptr() % plan.ALIGNMENT == 0
    return tensor


def record(function, *tensors):
    """Return the plan of a launcher that makes no output."""
    with launch.recording(tensors) as made:
        function(*tensors)
    return made.plan((), 0)


def scale_into(kernel):
    def launcher(x, y):
        launch.launch(kernel, (3, 2), x, y[4:], 7, 1 << 40, 1, scale=0.5, W=64, num_warps=4)

    return launcher


def test_a_plan_launches_the_same_with_other_addresses(libcuda):
    kernel = Kernel(Compiled(SIGNATURE))
    x, y = aligned(8), aligned(8)
    made = record(scale_into(kernel), x, y)
    ((grid, named),) = kernel.calls
    assert named.pop("x") is x
    assert named.pop("y").data_ptr() == y.data_ptr() + 16
    assert (grid, named) == (
        (3, 2),
        {"size": 7, "step": 1 << 40, "one": 1, "scale": 0.5, "W": 64, "num_warps": 4, **launch.OPTIONS},
    )
    for _ in range(3):
        x, y = aligned(8), aligned(8)
        assert made.run((x, y)) == ((), [x.data_ptr(), y.data_ptr()])
        function, fields, values = libcuda.launches.pop()
        assert function == 0xF00
        assert fields == (3, 2, 1, 128, 1, 1, 4096, STREAM, 0, 0)
        assert struct.unpack("=QQiqfQQ", b"".join(values)) == (x.data_ptr(), y.data_ptr() + 16, 7, 1 << 40, 0.5, 0, 0)
    assert len(kernel.calls) == 1
    assert kernel.compiled.launches == []


def test_a_launch_that_overlaps_the_one_before_says_so_to_the_driver(libcuda):
    compiled = Compiled(SIGNATURE)
    compiled.metadata.launch_pdl = True
    x = aligned(8)
    made = record(scale_into(Kernel(compiled)), x, aligned(8))
    attributes = []
    libcuda.on_launch = lambda fields: attributes.append(ctypes.string_at(fields[-2], 72))
    assert made.run((x, aligned(8))) is not None
    (_, fields, _) = libcuda.launches.pop()
    assert fields[-1] == 1
    serialization = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert attributes == [struct.pack("=iiii56x", serialization, 0, 1, 0)]
    assert compiled.launches == []


def test_a_kernel_is_looked_up_by_what_it_is_specialized_on(libcuda):
    kernel = Kernel(Compiled(SIGNATURE))

    def call(x, size=7, step=5, scale=0.5, width=64, warps=4):
        launch.launch(kernel, (1,), x, x, size, step, 1, scale, W=width, num_warps=warps)
        return len(kernel.calls)

    x = aligned(9)
    assert call(x) == 1
    assert call(x, size=9, step=13, scale=0.25) == 1  # like the first
    assert kernel.compiled.launches == [((1, 1, 1), (x, x, 9, 13, 1, 0.25, 64), None)]
    assert call(x[1:]) == 2
    assert call(x.half()) == 3
    assert call(x, size=1) == 4
    assert call(x, size=32) == 5
    assert call(x, step=1 << 31) == 5 + 1
    assert call(x, width=32) == 7
    assert call(x, warps=8) == 8
    assert call(x) == 8


@pytest.mark.parametrize("reason", ["sizes", "driver", "error", "cluster", "scratch", "hook"])
def test_what_the_driver_may_not_launch_goes_through_triton(libcuda, monkeypatch, reason):
    compiled = Compiled(SIGNATURE)
    if reason == "sizes":
        libcuda.sizes = [8, 8, 8, 8, 4, 8, 8]
    elif reason == "driver":
        monkeypatch.setattr(driver, "driver", lambda: None)
    elif reason == "cluster":
        compiled.packed_metadata = (4, 2, 4096)
    elif reason == "scratch":
        compiled.metadata.global_scratch_size = 16
    made = record(scale_into(Kernel(compiled)), aligned(8), aligned(8))
    libcuda.status = 1 if reason == "error" else 0
    if reason == "hook":
        monkeypatch.setattr(plan, "_hooked", lambda: True)
    x, y = aligned(8), aligned(8)
    assert made.run((x, y)) is not None
    assert libcuda.launches == []
    expected = (x.data_ptr(), y.data_ptr() + 16, 7, 1 << 40, 1, 0.5, 64)
    assert compiled.launches == [((3, 2, 1), expected, STREAM)]


def test_launch_hooks_are_seen(monkeypatch):
    from triton import knobs

    assert not plan._hooked()
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", print)
    assert plan._hooked()


def test_tensors_that_a_plan_cannot_find_again_make_none(libcuda):
    kernel = Kernel(Compiled(SIGNATURE))
    assert record(lambda x, y: scale_into(kernel)(x + 1, y), aligned(8), aligned(8)) is None
    assert record(lambda x, y: scale_into(kernel)(x[1:], y), aligned(8), aligned(8)) is None
    whole = aligned(16)
    assert record(lambda x, y: scale_into(kernel)(whole[4:], y), whole[:8], whole[8:]) is None

    def of_a_view(x, y):
        launch.computed(torch.Tensor.zero_, x[:4])
        scale_into(kernel)(x, y)

    def changing(x, y):
        x.zero_()
        scale_into(kernel)(x, y)

    assert record(of_a_view, aligned(8), aligned(8)) is None
    assert record(changing, aligned(8), aligned(8)) is None
    assert record(lambda x, y: None, aligned(8), aligned(8)) is None


def test_an_address_that_is_not_aligned_is_not_launched_with(libcuda):
    made = record(scale_into(Kernel(Compiled(SIGNATURE))), aligned(8), aligned(8))
    assert made.run((aligned(9)[1:], aligned(8))) is None
    assert libcuda.launches == []


def test_a_plan_launches_on_the_current_stream_with_the_addresses_of_the_call(libcuda, monkeypatch):
    made = record(scale_into(Kernel(Compiled(SIGNATURE))), aligned(8), aligned(8))
    pairs = [(aligned(8), aligned(8)) for _ in range(3)]
    for stream in (1, 2, 1):
        monkeypatch.setattr(plan, "raw_stream", lambda device, stream=stream: stream)
        for x, y in (*pairs, *pairs):
            made.run((x, y))
            _, fields, values = libcuda.launches.pop()
            assert fields == (3, 2, 1, 128, 1, 1, 4096, stream, 0, 0)
            assert struct.unpack("=QQ", values[0] + values[1]) == (x.data_ptr(), y.data_ptr() + 16)


def test_what_is_computed_between_launches_is_computed_there(libcuda, monkeypatch):
    kernel, done = Kernel(Compiled(SIGNATURE)), []

    def filled(tensor):
        done.append(len(libcuda.launches))
        return tensor.fill_(len(done))

    def launcher(x, y):
        room = launch.workspace(x, 8)
        scale_into(kernel)(x, room)
        total = launch.computed(torch.Tensor.clone, launch.computed(filled, y))
        scale_into(kernel)(total, y)
        launch.computed(filled, y)

    made = record(launcher, aligned(8), aligned(8))
    launched = [stage.launch for stage in made.stages]
    assert [len(stage.makes) for stage in made.stages] == [1, 2, 1] and [one is None for one in launched] == [0, 0, 1]
    done.clear()
    x, y = aligned(8), aligned(8)
    made.run((x, y))
    assert done == [1, 2]
    assert y.eq(2).all()
    (read, _), (_, written) = addresses(libcuda)
    assert (read, written) == (x.data_ptr(), y.data_ptr() + 16)


def test_what_is_computed_is_computed_at_each_call(libcuda):
    kernel = Kernel(Compiled(SIGNATURE))

    def launcher(x, y):
        launch.computed(torch.Tensor.fill_, y, 3.0)
        room = launch.workspace(x, 4, 2)
        launch.launch(kernel, (1,), launch.computed(torch.Tensor.contiguous, x), room, 1, 1, 1, 1.0, 1)

    made = record(launcher, aligned(8).expand(2, 8), aligned(8))
    x, y = aligned(8).expand(2, 8), aligned(8)
    assert made.run((x, y)) is not None
    assert y.eq(3).all()
    ((_, _, values),) = libcuda.launches
    copy, room = struct.unpack("=QQ", values[0] + values[1])
    assert 0 not in (copy, room)
    assert copy != x.data_ptr()


def test_a_tensor_map_is_encoded_once_for_an_address(libcuda, monkeypatch):
    signature = {"rows": "tensordesc<bf16[1, 64, 1, 64],x>", "out": "*fp32"}
    compiled = Compiled(signature, [{"block_size": [1, 64, 1, 64], "swizzle": 3}])
    libcuda.sizes = [128, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8, 8]

    def launcher(rows, out):
        launch.launch(Kernel(compiled), (1,), tensor_maps.rows_map(rows, 64, 64), out)

    inputs = [aligned(2, 96, 4, 64, dtype=torch.bfloat16) for _ in range(3)]
    out = aligned(1)
    made = record(launcher, inputs[0], out)
    for rows in (*inputs, *inputs):
        assert made.run((rows, out)) is not None
        _, _, values = libcuda.launches.pop()
        assert struct.unpack("=Q", values[0][:8]) == (rows.data_ptr(),)
        assert struct.unpack("=4i4q", b"".join(values[1:9])) == (2, 96, 4, 64, 96 * 256, 256, 64, 1)
    assert [address for address, *_ in libcuda.encoded] == [rows.data_ptr() for rows in inputs]
    assert libcuda.encoded[0][1:] == ([64, 4, 96, 2], [128, 512, 96 * 512], [64, 1, 64, 1], 3)
    for _ in range(300):
        rows = aligned(2, 96, 4, 64, dtype=torch.bfloat16)
        assert made.run((rows, out)) is not None
        assert struct.unpack("=Q", libcuda.launches.pop()[2][0][:8]) == (rows.data_ptr(),)


def test_a_plan_keeps_no_tensor_alive(libcuda):
    def launcher(x, y):
        room = launch.workspace(x, 8)
        kept.extend(weakref.ref(tensor) for tensor in (x, y, room))
        scale_into(kernel)(x, room)

    kept, kernel = [], Kernel(Compiled(SIGNATURE))
    made = record(launcher, aligned(8), aligned(8))
    kernel.calls.clear()
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3
    assert made.run((aligned(8), aligned(8))) is not None


def test_threads_do_not_mix_their_addresses(libcuda):
    made = record(scale_into(Kernel(Compiled(SIGNATURE))), aligned(8), aligned(8))
    pairs = [(aligned(8), aligned(8)) for _ in range(4)]
    threads = [threading.Thread(target=lambda pair=pair: [made.run(pair) for _ in range(200)]) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launched = {struct.unpack("=QQ", values[0] + values[1]) for _, _, values in libcuda.launches}
    assert len(libcuda.launches) == 800
    assert launched == {(x.data_ptr(), y.data_ptr() + 16) for x, y in pairs}


def test_a_key_holds_all_that_a_plan_depends_on(monkeypatch):
    def key(*tensors, numbers=(0,)):
        return plans.key("forward", tensors, numbers)

    x = torch.zeros(2, 4, 8)
    keys = {
        key(x), key(x, None), key(x, x), key(x[:1]), key(x.transpose(0, 1)), key(x.half()), key(x, numbers=(1,)),
        key(x.as_strided((2, 4, 8), (0, 8, 1))),
    }  # fmt: skip
    monkeypatch.setenv("DMATTN_ARCH", "8.6")
    keys.add(key(x))
    assert len(keys) == 9
    assert key(x) == key(torch.ones(2, 4, 8))


@pytest.fixture
def doubling(libcuda, monkeypatch):
    """An operator `double_forward(x, y, factor) -> out, lse, lse_tail`, and how often it was computed in full."""
    monkeypatch.setattr(plans, "may_repeat", lambda tensor: True)
    monkeypatch.setattr(plans, "enter_thread", lambda: None)
    monkeypatch.setattr(plan, "_current_device", lambda: -1)  # what a CPU tensor says
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(plans, "_seen", {})
    kernel, computed = Kernel(Compiled(SIGNATURE)), []

    def double_forward(x, y, factor):
        computed.append("forward")
        out, lse, lse_tail = torch.empty_like(x), torch.empty_like(y), torch.empty_like(y)
        launch.launch(kernel, (1,), x, y, 1, 1, 1, factor, 1)
        launch.launch(kernel, (1,), out, lse, 1, 1, 1, factor, 1)
        return out, lse, lse_tail

    def double_backward(grad_out, grad_lse, x, out, lse, lse_tail, y, factor, needs_dbias, needs_dsink):
        computed.append("backward")
        dx, dbias = torch.empty_like(x), torch.empty(0)
        launch.launch(kernel, (1,), grad_out, dx, 1, 1, 1, factor, 1)
        return dx, dbias

    def planned(function, tensors):
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        return plans.planned(
            function, schemas.Signature(names, tensors, (), schemas.place_of_needs(names[tensors:]), (), None)
        )

    return computed, planned(double_forward, 2), planned(double_backward, 7)


def addresses(libcuda):
    return [struct.unpack("=QQ", values[0] + values[1]) for _, _, values in libcuda.launches]


def test_a_second_call_of_a_signature_repeats_the_first(doubling, libcuda):
    computed, forward, _ = doubling
    x = aligned(8)
    for _ in range(2):  # the first one may remain alone: nothing is kept of it
        assert forward(x, x, 0.5)[1] is None
    assert len(computed) == 2
    x, y = aligned(8), aligned(8)
    (out, lse, tail), origin = forward(x, y, 0.5)  # the first one had the same tensor twice
    assert addresses(libcuda) == [(x.data_ptr(), y.data_ptr()), (out.data_ptr(), lse.data_ptr())]
    assert out.shape == lse.shape == tail.shape == (8,)
    assert origin.addresses == [tensor.data_ptr() for tensor in (x, y, out, lse, tail)]
    forward(x, y, 0.25)
    forward(aligned(16), aligned(16), 0.5)
    assert len(computed) == 4
    (out, lse, tail), origin = forward(aligned(9)[1:], y, 0.5)  # no plan for this alignment
    assert (out.shape, lse.shape, origin, len(computed)) == ((8,), (8,), None, 5)


def test_a_backward_is_found_through_its_forward(doubling, libcuda, monkeypatch):
    computed, forward, backward = doubling
    x, y, grad_out = aligned(8), aligned(8), aligned(8)
    for _ in range(2):
        forward(x, y, 0.5)
    (out, lse, tail), origin = forward(x, y, 0.5)
    saved = (x, y, out, lse, tail)
    rest, none = ("double_backward", 1, grad_out, None), (False, False)
    assert origin.backward(*rest, saved, none) is None  # not computed yet
    for _ in range(2):
        backward(grad_out, None, x, out, lse, tail, y, 0.5, False, False)
    libcuda.launches.clear()
    dx, dbias = origin.backward(*rest, saved, none)
    assert addresses(libcuda) == [(grad_out.data_ptr(), dx.data_ptr())] and dbias is None
    assert list(origin.plan.backwards.values()) == [plans._plans[key] for key in plans._plans if key[0] == rest[0]]
    assert origin.backward(*rest, (x.clone(), y, out, lse, tail), none) is None  # a hook brought it back elsewhere
    assert origin.backward(*rest, saved, (True, False)) is None
    monkeypatch.setenv("DMATTN_ARCH", "8.6")
    assert origin.backward(*rest, saved, none) is None
    monkeypatch.delenv("DMATTN_ARCH")
    monkeypatch.setenv("FLASH_DMATTN_PROFILE_BACKWARD", "1")
    assert origin.backward(*rest, saved, none) is None
    computed.clear()
    assert backward(grad_out, None, x, out, lse, tail, y, 0.5, *none)[1] is None
    assert computed == ["backward"]  # each tells its choice


def test_plans_are_bounded(doubling, monkeypatch):
    _, forward, _ = doubling
    monkeypatch.setattr(plans, "MAX_PLANS", 3)
    monkeypatch.setattr(plans, "MAX_SEEN", 4)
    for size in range(1, 9):
        for _ in range(2):
            forward(aligned(4 * size), aligned(4), 0.5)
        assert len(plans._plans) <= 3 and len(plans._seen) <= 4
