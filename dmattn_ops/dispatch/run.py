"""Which kernels run: by device, then by architecture and problem. Outputs arrive allocated.

Kernels are imported at their first call, so that `import dmattn_ops` loads neither Triton nor a compiler. Empty problems
end here: no kernel sees a tensor without elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from dmattn_ops import environment
from dmattn_ops.call import Call, Demand, Gradients, Mask, Result, Saved
from dmattn_ops.choice import arch, choose, config, epochs, resolve, tuning
from dmattn_ops.choice.arch import Arch
from dmattn_ops.choice.choose import Choice
from dmattn_ops.dispatch import entries, sinks
from dmattn_ops.launching.recording import computed, do_not_repeat
from dmattn_ops.masks.kept import Stored, Token

_FORWARD = {
    "decode": "dmattn_ops.kernels.decode.launch",
    "ampere": "dmattn_ops.kernels.ampere.forward.launch",
    "hopper": "dmattn_ops.kernels.hopper.forward.launch",
    "portable": "dmattn_ops.kernels.portable.forward",
    "native": "dmattn_ops.kernels.native",
    "reference": "dmattn_ops.kernels.reference",
}
_BACKWARD = {
    "ampere": "dmattn_ops.kernels.ampere.backward.launch",
    "hopper": "dmattn_ops.kernels.hopper.backward.launch",
    "hopper256": "dmattn_ops.kernels.hopper.backward_256.launch",
    "portable": "dmattn_ops.kernels.portable.backward",
    "native": "dmattn_ops.kernels.native",
    "reference": "dmattn_ops.kernels.reference",
}
PACKED = "dmattn_ops.kernels.epochs.attention"
CHOSEN = "dmattn_ops.kernels.chosen.launch"
LARGEST_MASS_DIM = 256  # of the Triton kernels of masses
GPU_KERNELS = ("decode", "hopper", "hopper256", "ampere", "portable")  # fastest first


@cache
def cpu_kernels() -> str:
    """Return the name of the CPU's kernels: "native" where the library was built, else "reference", with one warning."""
    from dmattn_ops.kernels import native

    if native.available():
        return "native"
    environment.warn(f"dmattn_ops runs on plain torch operations here, slowly: {native.reason()}")
    return "reference"


def offered(direction: str, call: Call, on: Arch | None = None, tuned: bool = True) -> Choice:
    """Return the row that a launch uses, with all the configurations that it offers, or the one of the user's cache."""
    rows, kernels = (config.FORWARD, _FORWARD) if direction == "forward" else (config.BACKWARD, _BACKWARD)
    physical = arch.physical(call.query.device) if call.query.is_cuda else None

    def refusals(kernel: str) -> list[str]:
        reason = _reason_against(kernels[kernel], physical)
        if reason:
            return [reason]
        launcher = _launcher(kernels[kernel])
        if call.kind not in launcher.TAKES.masks:
            return [f"takes masks of the kinds {', '.join(launcher.TAKES.masks)}, not {call.kind}"]
        return launcher.refusals(call) if hasattr(launcher, "refusals") else []

    if not call.query.is_cuda and on is None:
        kernel = cpu_kernels()
        if reasons := refusals(kernel):
            raise NotImplementedError(f"no kernel takes this call: {kernel}: {'; '.join(reasons)}")
        return Choice(None, config.CPU[kernel], ())
    choice = choose.choose(rows, on or arch.current(call.query.device), call.demand, refusals)
    if choice.row.kernel == "reference":
        _warn_legacy(choice.arch, call.demand.width, call.demand.itemsize)
    if call.options.batch_invariant or not (
        tuned and call.query.is_cuda and choice.arch is not None and tuning.entries()
    ):
        return choice
    place = tuning.place(call.query.device, choice.arch)
    masked = call.mask.row_tiles is not None
    return tuning.tuned(choice, direction, call.demand, masked, call.options.deterministic, place)


def missing_kernels(on: Arch) -> dict[str, str]:
    """Return the kernels that do not run on a GPU, each with the reason."""
    found = {}
    for kernel in GPU_KERNELS:
        by_direction = (_reason_against(kernels[kernel], on) for kernels in (_FORWARD, _BACKWARD) if kernel in kernels)
        found[kernel] = next(filter(None, by_direction), "")
    return {kernel: reason for kernel, reason in found.items() if reason}


def kernels_on(on: Arch) -> tuple[str, ...]:
    """Return the kernels that have configurations for a GPU and run on it."""
    made_for, missing = arch.nearest(on.sm).sm, missing_kernels(on)
    rows = {row.kernel for row in (*config.FORWARD, *config.BACKWARD) if row.sm == made_for}
    return tuple(kernel for kernel in GPU_KERNELS if kernel in rows and kernel not in missing)


def _reason_against(module: str, on: Arch | None) -> str:
    """Return why the kernels of a launcher do not run on a GPU, or are not there at all; empty where they do and are."""
    try:
        takes = _launcher(module).TAKES
    except (ImportError, AttributeError) as error:  # Gluon is experimental: another Triton may lack names
        return f"needs another Triton: {error}"
    if on is None or takes.oldest <= on.sm <= takes.newest:
        return ""
    oldest = f"SM {takes.oldest // 10}.{takes.oldest % 10}"
    return f"runs on {oldest} only" if takes.oldest == takes.newest else f"needs {oldest} or newer"


@cache
def _warn_legacy(on: Arch, width: int, itemsize: int) -> None:
    environment.warn(
        f"dmattn_ops has no kernels for {on} and head dimension {width} in {8 * itemsize} bits: plain torch operations"
        " run there, slowly"
    )


def forward_choice(call: Call, result: Result, on: Arch | None = None, tuned: bool = True) -> Choice:
    """Return the row that a forward launch uses, with the configuration that it runs, on the call's own architecture or as `on`.

    With `tuned`, a configuration from the user's cache takes the place of the row's own where there is one.
    """
    choice = offered("forward", call, on, tuned)
    return _with_config(choice, resolve.forward_config(choice.row.config, call, result))


def backward_choice(call: Call, saved: Saved, grads: Gradients, on: Arch | None = None, tuned: bool = True) -> Choice:
    """Return the row that a backward launch uses, with the configuration that it runs, on the call's own architecture or as `on`.

    With `tuned`, a configuration from the user's cache takes the place of the row's own where there is one.
    """
    choice = offered("backward", call, on, tuned)
    return _with_config(choice, resolve.backward_config(choice.row.config, call, saved, grads))


def _with_config(choice: Choice, made: config.Config) -> Choice:
    if made is choice.row.config:
        return choice
    return choice._replace(row=replace(choice.row, config=made))


def packing_of(
    direction: str, call: Call, on: Arch | None = None, needs_max: bool = False, tuned: bool = True
) -> tuple[epochs.Packing | None, list[str]]:
    """Return the packing of a call's keys, or None and the reasons; no reasons where its mask keeps nothing by key.

    With `tuned`, the length of an epoch comes from the user's cache where it has one for such calls.
    """
    if call.mask.kind != "intervals" or call.mask.row_tiles is not None:
        return None, []
    reasons = reasons_against_packing(call, on, needs_max)
    if reasons:
        return None, reasons
    sizes = epochs.sizes_of(call)
    length, evidence = epochs.epoch_by_sizes(sizes), ""
    tuned = tuned and not call.options.batch_invariant
    if tuned and on is not None and call.query.is_cuda and tuning.entries():
        place = tuning.place(call.query.device, on)
        length, evidence = tuning.tuned_epoch(direction, call, sizes, length, place)
    made = epochs.packing_for(call, length)
    if made is None:
        return None, [evidence or "at this length and with this many kept keys, packing would cost more than it saves"]
    return made._replace(evidence=evidence), []


def reasons_against_packing(call: Call, on: Arch | None, needs_max: bool = False) -> list[str]:
    """Return why the keys of a call with intervals cannot be packed, whether or not that would pay; empty where they can."""
    if not call.query.is_cuda and on is None:
        if cpu_kernels() == "reference":
            return ["plain torch operations compute every pair: the C++ kernels were not built"]
        return ["the CPU kernels gather the keys that each epoch of queries sees, where that pays"]
    reasons = epochs.reasons_against(call)
    if needs_max:
        reasons.append("the largest score of each row is asked for")
    if on is not None and on.sm < config.OLDEST_TRITON:
        reasons.append(f"there are no kernels for {on}")
    return reasons


def reasons_against_lists(direction: str, call: Call, on: Arch | None = None) -> list[str]:
    """Return why the kernels that gather chosen blocks do not take a call, or are slower; empty where they run.

    The call is dispatched on its own architecture (or the one that `DMATTN_ARCH` names), or as `on`.
    """
    device = call.query.device
    if not call.query.is_cuda and on is None:
        return ["a CPU computes them as bits"]
    on = on or arch.current(device)
    reason = _reason_against(CHOSEN, on) or _reason_against(CHOSEN, arch.physical(device) if call.query.is_cuda else on)
    return [reason] if reason else _launcher(CHOSEN).refusals(call, direction, on)


def with_lists_or_bits(call: Call, direction: str) -> Call:
    """Return a call of chosen blocks as it is, or with bits in their place where kernels of bits run it."""
    if call.query.numel() == 0 or call.key.numel() == 0 or not reasons_against_lists(direction, call):
        return call
    do_not_repeat()  # what is below calls an operator
    return with_bits(call)


def with_bits(call: Call) -> Call:
    """Return a call of chosen blocks with bits in their place."""
    assert call.chosen is not None
    (indices, block), mask, options = call.chosen, call.mask, call.options
    limits = options.band_lo, options.band_hi
    packed = torch.ops.dmattn.pack_selection(
        indices, mask.q_segments, mask.k_segments, block, call.key.shape[1], *limits
    )
    return call._replace(mask=Mask(*packed), chosen=None)


def first_packed(call: Call, packed: epochs.Packing) -> Call:
    """Return the call on packed keys that kernels get for the heads of the first pass."""
    return _launcher(PACKED).first_pass(call, packed)


def with_start(call: Call) -> Call:
    """Return a call whose intervals have a start."""
    mask = call.mask
    if mask.end is None or mask.start is not None:
        return call
    return call._replace(mask=mask._replace(start=computed(torch.zeros_like, mask.end)))


def forward(call: Call, result: Result) -> None:
    """Write out, lse, lse_tail and, where it is asked for, row_max."""
    if call.query.numel() == 0 or call.key.numel() == 0:
        result.out.zero_()
        result.lse_tail.zero_()
        for statistic in (result.lse, result.row_max):
            if statistic is not None:
                statistic.fill_(-math.inf)
        return
    if call.chosen is not None:
        _launcher(CHOSEN).forward(call, result)
        return
    tuning.record(call)
    run_forward(call, result, packing_of("forward", call, architecture_of(call), result.row_max is not None)[0])


def run_forward(call: Call, result: Result, packed: epochs.Packing | None) -> None:
    """Write the outputs of a call, its keys packed as they are said to be."""
    if packed is None:
        if _one_by_one(call):
            entries.forward(call, result, _run_forward)
        else:
            _run_forward(call, result)
        return
    _launcher(PACKED).forward(call._replace(sink=None), result, packed, _run_forward)
    sinks.take_share(call.sink, result)


def _run_forward(call: Call, result: Result) -> None:
    choice = forward_choice(call, result)
    launcher = _launcher(_FORWARD[choice.row.kernel])
    launcher.forward(call if launcher.TAKES.starts else with_start(call), result, choice.row.config)
    if not launcher.TAKES.sinks:
        sinks.take_share(call.sink, result)


def backward(call: Call, saved: Saved, grads: Gradients) -> None:
    """Write dq, dk, dv and, where they are given, dbias and dsink."""
    if call.query.numel() == 0 or call.key.numel() == 0:
        for gradient in (grads.dq, grads.dk, grads.dv, grads.dbias, grads.dsink):
            if gradient is not None:
                gradient.zero_()
        return
    if call.chosen is not None:
        if grads.grad_lse is not None:
            call, saved, grads = sinks.without_sink(call, saved, grads)
        _launcher(CHOSEN).backward(call, saved, grads)
        return
    tuning.record(call)
    run_backward(call, saved, grads, packing_of("backward", call, architecture_of(call))[0])


def run_backward(call: Call, saved: Saved, grads: Gradients, packed: epochs.Packing | None) -> None:
    """Write the gradients of a call, its keys packed as they are said to be."""
    run = _telling_once(call.sizes) if environment.profiles_backward() else _run_backward
    if packed is not None:
        call, saved, grads = sinks.without_sink(call, saved, grads)
        _launcher(PACKED).backward(call, saved, grads, packed, run)
    elif _one_by_one(call):
        entries.backward(with_start(call), saved, grads, run)
    else:
        run(with_start(call), saved, grads)


def _one_by_one(call: Call) -> bool:
    """Return whether kernels get one batch entry at a time: how those of a CPU divide their work depends on all of it."""
    return call.options.batch_invariant and not call.query.is_cuda


def _telling_once(demand: Demand) -> Callable[[Call, Saved, Gradients], None]:
    """Return a function that runs a backward and prints its profile line once, even where packed keys take several passes."""
    left = [demand]

    def run(call: Call, saved: Saved, grads: Gradients) -> None:
        _run_backward(call, saved, grads, left.pop() if left else None)

    return run


def _run_backward(call: Call, saved: Saved, grads: Gradients, told_of: Demand | None = None) -> None:
    choice = backward_choice(call, saved, grads)
    if told_of is not None:
        environment.tell(profile_line(choice, told_of))
    launcher = _launcher(_BACKWARD[choice.row.kernel])
    if grads.grad_lse is not None or not launcher.TAKES.sinks:
        call, saved, grads = sinks.without_sink(call, saved, grads)
    launcher.backward(call, saved, grads, choice.row.config)


def architecture_of(call: Call) -> Arch | None:
    """Return the architecture that a call is dispatched for; None is the CPU."""
    return arch.current(call.query.device) if call.query.is_cuda else None


def profile_line(choice: Choice, demand: Demand) -> str:
    """Return the line that tells a backward launch's choice."""
    return (
        f"FLASH_DMATTN_PROFILE: HeadDim={demand.dim}, Arch={choice.arch or 'CPU'}, SeqQ={demand.seqlen_q},"
        f" SeqK={demand.seqlen_k}, Batch={demand.batch}, Choice={choice.label}"
    )


def kernels_of_masks(device: torch.device) -> ModuleType:
    """Return the module whose `pack_mask` and `list_tiles` write the lists and bits of masks on this device."""
    if device.type != "cuda":
        return _launcher(_FORWARD[cpu_kernels()])
    if arch.physical(device).sm < config.OLDEST_TRITON:
        return _launcher("dmattn_ops.kernels.reference")
    return _launcher("dmattn_ops.kernels.masks.launch")


def kernels_of_lifetimes(device: torch.device) -> ModuleType:
    """Return the module whose `lifetimes` writes which queries see each key of a dynamic mask on this device."""
    if device.type != "cuda" and cpu_kernels() == "native":
        return _launcher("dmattn_ops.kernels.native")
    if device.type == "cuda" and arch.physical(device).sm >= config.OLDEST_TRITON:
        return _launcher("dmattn_ops.kernels.selection.launch")
    return _launcher("dmattn_ops.kernels.selection.reference")


def kernels_of_chosen_blocks(device: torch.device) -> ModuleType | None:
    """Return the Triton kernels that read chosen blocks on this device; None where torch's operations do."""
    if device.type != "cuda" or arch.physical(device).sm < config.OLDEST_TRITON:
        return None
    return _launcher("dmattn_ops.kernels.masks.chosen")


def kernels_of_masses(query: Tensor) -> ModuleType:
    """Return the module that computes masses of attention for queries `[B, Sq, H, D]`."""
    is_taken = query.is_cuda and query.shape[-1] <= LARGEST_MASS_DIM
    if is_taken and arch.physical(query.device).sm >= config.OLDEST_TRITON:
        return _launcher("dmattn_ops.kernels.mass.launch")
    return _launcher("dmattn_ops.kernels.mass.reference")


def kernels_of_steps(device: torch.device) -> ModuleType:
    """Return the function that makes a step of a cache of kept keys on a device."""
    if device.type == "cuda" and arch.physical(device).sm >= config.OLDEST_TRITON:
        return _launcher("dmattn_ops.kernels.kept.launch")
    return _launcher("dmattn_ops.kernels.kept.reference")


def kernels_of_chunks(stored: Stored, token: Token) -> ModuleType:
    """Return the module that appends a chunk of positions to a cache of kept keys."""
    on = stored.key.device
    if on.type == "cuda" and arch.physical(on).sm >= config.OLDEST_TRITON:
        kernels = _launcher("dmattn_ops.kernels.kept.chunk_launch")
        if kernels.takes(stored, token):
            return kernels
    return _launcher("dmattn_ops.kernels.kept.chunk_reference")


def launcher(direction: str, kernel: str) -> ModuleType:
    """Return the module whose function named `direction` launches a kernel."""
    return _launcher((_FORWARD if direction == "forward" else _BACKWARD)[kernel])


def notes(direction: str, kernel: str, call: Call) -> list[str]:
    """Return the lines that a kernel's launcher adds to `explain` beside its configuration."""
    tell = getattr(launcher(direction, kernel), "notes", None)
    return [] if tell is None or direction == "forward" else tell(call)


def _launcher(module: str) -> ModuleType:
    return import_module(module)
