"""Derivatives of the operators: first derivatives in reverse mode. Any other derivative raises; none is silently zero.

An operator has one kernel at the dispatcher's Autograd key, so that direct, compiled, exported and checkpointed calls
and `torch.func` all meet the same derivative. `torch.library.register_autograd` would register such a kernel too, but
its own drops tangents and fails under `torch.func` (pytorch#168393); it remains for a torch that lacks private names that
are needed here (`ops/torch_privates.py`), and `tests/ops/test_autograd.py` holds both to the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.compiler import is_compiling
from torch.library import Library
from torch.nn import Parameter
from torch.overrides import has_torch_function

from dmattn_ops.ops import schemas, torch_privates

# bound once: to look each of these up in torch takes as long as to call it
_grad_enabled = torch.is_grad_enabled
_transforms_active, _dispatch_modes = torch_privates.transforms_active, torch_privates.dispatch_modes
_is_tracing, _profiler_enabled = torch_privates.is_tracing, torch_privates.profiler_enabled
_NO_TENSORS = frozenset((type(None), bool, int, float))
_NO_ARGUMENT = (None,)  # a mode that sees functions of torch is asked about any argument
_Kernel = Callable[..., tuple[Tensor, ...]]
_Gradients = Callable[..., tuple[Tensor | None, ...] | None]


class _Function(torch_privates.single_level_function or Function):  # type: ignore[misc]
    """A Function whose `apply` starts no levels of torch.func, which has called the kernel once for each level."""

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
        return (ctx._autograd_function_id,)  # as Function has it


class Differentiable(NamedTuple):
    """The places of a forward operator's arguments that have derivatives, and the operator's signature."""

    primals: int  # query, key and value, or qkv: the first arguments
    places: tuple[int, ...]  # of primals, bias and sink, among the arguments of the forward
    signature: schemas.Signature


def _differentiable(name: str) -> Differentiable:
    signature, backward = schemas.SIGNATURES[name], schemas.SIGNATURES[name.replace("forward", "backward")]
    primals = tuple(argument for argument in ("query", "key", "value", "qkv") if argument in signature.names)
    places = tuple(signature.names.index(argument) for argument in (*primals, "bias", "sink"))
    tensors, numbers = signature.split(signature.names)
    before, appended = signature.around_needs(numbers)
    count = len(primals)
    expected = (
        *("grad_out", "grad_lse"), *primals, *("out", "lse", "lse_tail"), *tensors[count:],
        *before, *("needs_dbias", "needs_dsink"), *appended,
    )  # fmt: skip
    assert backward.names == expected, f"the schema of the backward of {name} must follow the forward's"
    return Differentiable(count, places, signature)


OPERATORS = {name: _differentiable(name) for name in schemas.SCHEMAS if name.partition(".")[0].endswith("forward")}


def register(library: Library) -> tuple[dict[str, _Kernel], dict[str, _Gradients]]:
    """Register the derivatives of every operator of `library`, whose schemas are those of `ops/schemas.py`.

    Returns what may be called instead of each forward operator where `callable_directly` says so, and what computes its backward.
    """
    torch_privates.tell_what_is_lost()
    if not torch_privates.has_needed:
        register_public(library)
        return {}, {}
    directly, gradients = {}, {}
    for name, of in OPERATORS.items():
        backward_name = name.replace("forward", "backward")
        gradients[name] = _gradients(backward_name, of)
        kernel, directly[name] = _forward_kernels(name, gradients[name], of)
        library.impl(name, kernel, "Autograd")
        library.impl(backward_name, _backward_kernels(backward_name)[0], "Autograd")
    return directly, gradients


def register_public(library: Library) -> None:
    """Register the derivatives of every operator of `library` with nothing but the public interface of torch."""
    for name, of in OPERATORS.items():
        backward_name = name.replace("forward", "backward")
        packet, _, of_packet = backward_name.partition(".")
        backward_op = getattr(getattr(getattr(torch.ops, library.ns), packet), of_packet or "default")

        def setup_context(
            ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], *, like: Differentiable = of
        ) -> None:
            _save(ctx, like, inputs, output)
            ctx.mark_non_differentiable(*output[2:])

        def backward(
            ctx: Any, *grads: Tensor | None, like: Differentiable = of, call: Any = backward_op
        ) -> tuple[Any, ...]:
            given = len(ctx.needs_input_grad)  # defaults at the end are left out
            needs = tuple([place < given and ctx.needs_input_grad[place] for place in like.places[-2:]])
            found = _backward(like, call, ctx.saved_tensors, ctx.numbers, needs, *grads[:2])
            return _placed(like, found, needs, len(like.signature.names))[:given]

        torch.library.register_autograd(f"{library.ns}::{name}", backward, setup_context=setup_context, lib=library)
        torch.library.register_autograd(
            f"{library.ns}::{backward_name}", _refuse_second_derivative, setup_context=_save_nothing, lib=library
        )


def callable_directly(*arguments: Any) -> bool:
    """Return whether the dispatcher may be bypassed for a call with these arguments, of which the first is a tensor.

    It may in plain eager mode with plain tensors, where nothing else needs to see the call. This saves 4 us of 20 in a forward
    and as much in a backward.
    """
    return in_plain_mode() and (arguments[0].is_cuda or arguments[0].is_cpu) and all_plain(arguments)


def in_plain_mode() -> bool:
    """Return whether torch is in plain eager mode, and says so."""
    return (
        torch_privates.has_needed
        and torch_privates.has_short_cuts
        and not is_compiling()
        and not _transforms_active()
        and _dispatch_modes() == 0
        and not has_torch_function(_NO_ARGUMENT)
        and not _is_tracing()
        and not _profiler_enabled()
    )


def all_plain(arguments: tuple[Any, ...]) -> bool:
    """Return whether no tensor among the arguments is of a subclass, or a view that is to be negated."""
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor or kind is Parameter:
            if argument.is_neg():
                return False
        elif kind not in _NO_TENSORS and isinstance(argument, Tensor):
            return False
    return True


def _has_memory(grad: Tensor | None) -> bool:
    """Return whether a gradient is an ordinary tensor: no batch from `is_grads_batched`, and no zero tensor without memory."""
    try:
        # not of the tensor: the address of a part of zeros without memory is how far it begins behind the start
        return grad is None or grad.untyped_storage().data_ptr() != 0 or grad.numel() == 0
    except RuntimeError:  # a batch has no storage of its own
        return False


def _forward_kernels(
    name: str, gradients: _Gradients, of: Differentiable
) -> tuple[_Kernel, Callable[..., tuple[Any, ...]]]:
    """Return two functions that compute an operator and record its derivative: one for torch's dispatcher, one called directly."""
    fill, place_of_max = of.signature.fill, of.signature.names.index("needs_max")
    whole, short, shortest = _forward_functions(gradients, of)
    by_dispatcher = _through_dispatcher(name)[name]

    def through_dispatcher(*arguments: Any) -> tuple[Tensor, ...]:
        arguments = fill(arguments)
        if not _may_need_gradient(_tensors_among(arguments)):
            return by_dispatcher(*arguments)[0]
        return _apply(whole, by_dispatcher, arguments, *[arguments[place] for place in of.places])

    def directly(
        arguments: tuple[Any, ...], compute: schemas.Planned | None = None, needs_lse: bool = True
    ) -> tuple[Any, ...]:
        """Compute outputs where `callable_directly`, by `compute` or in the usual way.

        lse_tail is None where it is saved for a backward, and so may lse and row_max be where they are not needed.
        """
        arguments, compute = fill(arguments), compute or schemas.implementations[name]
        differentiable = [arguments[place] for place in of.places]
        if not _may_need_gradient(differentiable):
            return compute(*arguments)[0]
        kind = whole if arguments[place_of_max] else short if needs_lse else shortest
        found = kind.apply(compute, arguments, *differentiable)
        if kind is shortest:
            return found, None, None, None
        return found if kind is whole else (*found, None, None)

    return through_dispatcher, directly


def _gradients(backward_name: str, of: Differentiable) -> _Gradients:
    """Return what computes a backward operator with what its forward saved, in the shortest way that there is.

    It takes the saved tensors, the forward's numbers around `needs_max`, which of dbias and dsink are needed, the `plans.Origin` of
    the forward or None, and the gradients of out and lse; it returns the gradients of the primals, dbias and dsink.
    """
    backward_op = schemas.overload(backward_name)
    _, backward_directly = _backward_kernels(backward_name)

    def gradients(
        saved: tuple[Any, ...],
        numbers: tuple[tuple[Any, ...], tuple[Any, ...]],
        needs: tuple[bool, ...],
        origin: Any,
        grad_out: Tensor | None,
        grad_lse: Tensor | None = None,
    ) -> tuple[Tensor | None, ...] | None:
        given = [tensor for tensor in (*saved, grad_out, grad_lse) if tensor is not None]
        direct = callable_directly(*given) and _has_memory(grad_out) and _has_memory(grad_lse)
        if direct and origin is not None and grad_out is not None and not _grad_enabled():
            grads = origin.backward(backward_name, of.primals, grad_out, grad_lse, saved, needs)
            if grads is not None:
                return grads
        call = backward_directly if direct else backward_op
        return _backward(of, call, saved, numbers, needs, grad_out, grad_lse)

    return gradients


def _forward_functions(gradients: _Gradients, of: Differentiable) -> tuple[Any, Any, Any]:
    """Return the Functions of an operator with all of its outputs, with the first two, and with the first one."""
    nothing = (None,) * (of.primals + 4)

    class Attention(_Function):
        """Takes all arguments as one tuple, which autograd does not inspect, and those with derivatives once more on their own."""

        @staticmethod
        def forward(
            ctx: Any, call: Callable[..., Any], arguments: tuple[Any, ...], *differentiable: Tensor | None
        ) -> tuple[Tensor, ...]:
            outputs, ctx.origin = _in_function(call, arguments)
            _save(ctx, of, arguments, outputs)
            ctx.mark_non_differentiable(*outputs[2:])
            return outputs

        @staticmethod
        def backward(
            ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None, *_: Tensor | None
        ) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors  # once: under checkpointing each access computes them again
            needs = tuple(ctx.needs_input_grad[-2:])
            grads = gradients(saved, ctx.numbers, needs, ctx.origin, grad_out, grad_lse)
            if grads is None:
                return nothing
            return (
                None,
                None,
                *grads[:-2],
                *[grad if need else None for grad, need in zip(grads[-2:], needs, strict=True)],
            )

    class OutAndLse(Attention):
        """The same without lse_tail and row_max: autograd takes a microsecond for each output.

        What is no output is saved for the backward all the same. Nobody else has it, so that nobody can write to it, and there is
        no second derivative in which it would have a part.
        """

        @staticmethod
        def forward(
            ctx: Any, call: Callable[..., Any], arguments: tuple[Any, ...], *differentiable: Tensor | None
        ) -> tuple[Tensor, ...]:
            outputs, ctx.origin = call(*arguments)
            _save(ctx, of, arguments, outputs)
            return outputs[:2]

    class Out(Attention):
        """The same without lse."""

        @staticmethod
        def forward(ctx: Any, *given: Any) -> Tensor:  # type: ignore[override]
            return OutAndLse.forward(ctx, *given)[0]

    return Attention, OutAndLse, Out


def _backward_kernels(name: str) -> tuple[_Kernel, _Kernel]:
    """Return two functions that compute a backward operator without a derivative: for torch's dispatcher, and called directly."""

    class AttentionBackward(_Function):
        @staticmethod
        def forward(ctx: Any, call: Callable[..., Any], *arguments: Any) -> tuple[Tensor, ...]:
            return _in_function(call, arguments)[0]

        backward = staticmethod(_refuse_second_derivative)

    def computed_by(calls: dict[str, schemas.Planned]) -> _Kernel:
        def kernel(*arguments: Any) -> tuple[Tensor, ...]:
            if not _may_need_gradient(_tensors_among(arguments)):
                return calls[name](*arguments)[0]
            return _apply(AttentionBackward, calls[name], *arguments)

        return kernel

    return computed_by(_through_dispatcher(name)), computed_by(schemas.implementations)


def _through_dispatcher(name: str) -> dict[str, schemas.Planned]:
    """Return an operator in the form of those that are called directly."""
    operator = schemas.overload(name)

    def call(*arguments: Any) -> tuple[Any, None]:
        with schemas.below_autograd():
            return operator(*arguments), None

    return {name: call}


def _tensors_among(arguments: tuple[Any, ...]) -> list[Tensor]:
    return [argument for argument in arguments if type(argument) not in _NO_TENSORS and isinstance(argument, Tensor)]


def _may_need_gradient(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether a gradient of one of these may be asked for; refuse forward-mode derivatives."""
    refuse_tangents(tensors)
    if _grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _apply(function: Any, *arguments: Any) -> Any:
    """Apply a Function at the level of torch.func that the kernel was called for."""
    if not _transforms_active():
        return function.apply(*arguments)
    from torch._functorch.utils import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        return function.apply(*arguments)


def _in_function(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call an operator inside a Function. It turned derivatives off; for outer levels of torch.func they are turned on again.

    To leave the inference mode turns on those in forward mode, too, which `torch.enable_grad` leaves as they are.
    """
    if not _transforms_active():
        return call(*arguments)
    with torch.inference_mode(False):
        return call(*arguments)


def _save(ctx: Any, of: Differentiable, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    tensors, numbers = of.signature.split(arguments)
    ctx.numbers = of.signature.around_needs(numbers)
    ctx.save_for_backward(*tensors, *outputs[:3])  # out, lse and lse_tail
    ctx.set_materialize_grads(False)


def _backward(
    of: Differentiable,
    call: Callable[..., Any],
    saved: tuple[Any, ...],
    numbers: tuple[tuple[Any, ...], tuple[Any, ...]],
    needs: tuple[bool, ...],
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
) -> tuple[Tensor, ...] | None:
    """Return the gradients of the primals, dbias and dsink; None where nothing flows.

    `numbers` are those before `needs_max` in the forward's schema, and those behind it.
    """
    if grad_out is None and grad_lse is None:
        return None
    *tensors, out, lse, lse_tail = saved
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    primals, others = tensors[: of.primals], tensors[of.primals :]
    before, appended = numbers
    return call(grad_out, grad_lse, *primals, out, lse, lse_tail, *others, *before, *needs, *appended)


def _placed(
    of: Differentiable, grads: Sequence[Tensor] | None, needs: tuple[bool, ...], count: int
) -> tuple[Tensor | None, ...]:
    """Return gradients of the primals, bias and sink where their arguments stand among `count`."""
    placed: list[Tensor | None] = [None] * count
    if grads is not None:
        for place, grad, need in zip(of.places, grads, (*[True] * of.primals, *needs), strict=True):
            placed[place] = grad if need else None
    return tuple(placed)


def _refuse_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("dmattn: the backward of attention is not differentiable (no double backward)")


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def refuse_tangents(tensors: Iterable[Tensor | None]) -> None:
    """Refuse forward-mode derivatives, which would be dropped."""
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError("dmattn: attention has no forward-mode derivative (jvp, dual tensors)")


kernels, gradients = register(schemas.library)
