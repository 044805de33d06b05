"""What `explain` and the profile line say is what the launchers get: for random calls, on every architecture, without a GPU."""

import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

import dmattn_ops
from dmattn_ops import environment
from dmattn_ops.choice import arch, config, resources
from dmattn_ops.dispatch import run as dispatch
from dmattn_ops.testing.check import _keywords, _prepared
from dmattn_ops.testing.inputs import make_inputs, make_varlen_inputs
from dmattn_ops.testing.problem import draw

pytest.importorskip("triton")
BLOCKS = 8  # seeds of one test
CHOICE = re.compile(r"Choice=(\S+)")


@pytest.fixture
def launched(monkeypatch):
    """A function that dispatches calls on the CPU as an architecture would, launches nothing, and returns what launchers get."""
    found, offered, load = {}, dispatch.offered, dispatch._launcher

    def launcher(name):
        where = "packed " if name == dispatch.PACKED else ""

        def forward(call, result, given, *run):
            found[f"{where}forward"] = (name, given)

        def backward(call, saved, grads, given, *run):
            found[f"{where}backward"] = (name, given)

        return SimpleNamespace(**{**vars(load(name)), "forward": forward, "backward": backward})

    def on(sm):
        found.clear()
        here = arch.KNOWN[sm]
        monkeypatch.setattr(
            dispatch, "offered", lambda direction, call, on=None, *rest: offered(direction, call, here, *rest)
        )
        monkeypatch.setattr(dispatch, "architecture_of", lambda call: here)
        return found

    monkeypatch.setattr(dispatch, "_launcher", launcher)
    return on


def as_drawn(seed):
    """A random problem as arguments of a call; those that no GPU takes are drawn as others."""
    problem = draw(seed)
    problem = replace(
        problem, dtype="bfloat16" if problem.dtype == "float64" else problem.dtype, compiled=False, nan_bias=False
    )
    return replace(problem, softmax_scale=0.0) if seed % 5 == 0 else problem


def has_aligned_gradients(problem):
    """Whether the gradient of out begins where `explain` assumes: it is not told of it."""
    return problem.seed % 2 == 0


def answers(problem):
    """What explain says of a problem's call, as a function, the call, and whether there is nothing to launch."""
    varlen = problem.variant == "varlen"
    inputs = make_varlen_inputs(problem, "cpu") if varlen else make_inputs(problem, "cpu")
    keywords = {**_keywords(problem), "sink": inputs.sink}
    tensors = [inputs.query, inputs.key, inputs.value]
    if varlen:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        keywords |= dict(zip(names, (*inputs.offsets, problem.seqlen_q, problem.seqlen_k), strict=True))
        mask, function = inputs.mask, dmattn_ops.flash_dmattn_varlen_func
    else:
        mask, function = _prepared(problem, inputs, keywords), dmattn_ops.flash_dmattn_func
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    bias = None if inputs.bias is None else inputs.bias.detach().requires_grad_()

    def call():
        out = function(*leaves, mask=mask, bias=bias, **keywords)[0]
        shifted = torch.ones(*out.shape[:-1], out.shape[-1] + 1, dtype=out.dtype)[..., 1:]
        out.backward(torch.ones_like(out) if has_aligned_gradients(problem) else shifted)

    def explained(on):
        return dmattn_ops.explain(*tensors, mask, inputs.bias, **keywords, arch=on)

    return explained, call, any(tensor.numel() == 0 for tensor in tensors)


@pytest.mark.parametrize("block", range(12))
@pytest.mark.parametrize("sm", [80, 86, 90, 100, 120])
def test_launchers_get_what_explain_and_the_profile_line_say(sm, block, launched, monkeypatch, capfd):
    compared = 0
    monkeypatch.setenv(environment.PROFILE, "1")
    for seed in range(block * BLOCKS, (block + 1) * BLOCKS):
        problem = as_drawn(seed)
        explained, call, is_empty = answers(problem)
        told = explained(f"{sm // 10}.{sm % 10}")
        found = launched(sm)
        capfd.readouterr()
        call()
        line = CHOICE.findall(capfd.readouterr().err)
        if is_empty:
            assert not found and not line, problem
            continue
        for direction, kernels in (("forward", dispatch._FORWARD), ("backward", dispatch._BACKWARD)):
            said = getattr(told, direction)
            packed = found.get(f"packed {direction}")
            if packed is not None:
                assert said.packing.packing == packed[1], problem
                continue
            assert direction in found, problem
            name, given = found[direction]
            assert kernels[said.kernel] == name, problem
            if direction == "backward":
                assert len(line) == 1 and f"_{given.block_m}x{given.block_n}" in line[0], problem
                if not has_aligned_gradients(problem):
                    continue
                assert line == [said.choice], problem
            assert said.configuration == dict(resources.settings(given)), problem
            compared += 1
    assert compared > 0


def test_a_configuration_is_shown_whole():
    for row in (*config.FORWARD, *config.BACKWARD):
        shown = dict(resources.settings(row.config))
        assert set(shown) <= set(asdict(row.config)) and "block_m" in shown
