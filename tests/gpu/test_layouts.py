"""Masks of any strides, saved tensors that come back in another layout, memory of CUDA graphs, batches of gradients."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

import dmattn_ops

pytestmark = pytest.mark.gpu


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def gradients(query: Tensor, grad_out: Tensor, mask: object = None) -> list[Tensor]:
    leaf = query.detach().requires_grad_()
    out = dmattn_ops.flash_dmattn_func(leaf, leaf, leaf, mask, deterministic=True)
    return [out.detach(), *torch.autograd.grad(out, leaf, grad_out)]


@pytest.mark.parametrize("dim", [64, 256])
def test_masks_of_any_strides(dim: int) -> None:
    query, grad_out = draw(2, 300, 2, dim), draw(2, 300, 2, dim)
    padding = (torch.rand(300, 2, device="cuda") < 0.5).t()[:, None, None]
    documents = torch.randint(0, 3, (300, 2), device="cuda", dtype=torch.int32).sort(0).values.t()
    pairs = (
        [dmattn_ops.prepare_mask(keep, seqlen_q=300) for keep in (padding, padding.contiguous())],
        [dmattn_ops.prepare_mask(documents=ids) for ids in (documents, documents.contiguous())],
    )
    for far, near in pairs:
        for one, other in zip(gradients(query, grad_out, far), gradients(query, grad_out, near), strict=True):
            assert torch.equal(one, other)


def test_offsets_and_masks_of_packed_sequences_of_any_strides() -> None:
    packed, kept = draw(400, 2, 64), (torch.rand(400, 2, device="cuda") < 0.5).t()
    both = torch.tensor([[0, 0], [150, 100], [400, 400]], dtype=torch.int32, device="cuda")
    far = dmattn_ops.flash_dmattn_varlen_func(packed, packed, packed, both[:, 0], both[:, 0], 250, 250, kept)
    offsets = both[:, 0].contiguous()
    near = dmattn_ops.flash_dmattn_varlen_func(packed, packed, packed, offsets, offsets, 250, 250, kept.contiguous())
    assert torch.equal(far, near)


def test_saved_tensors_that_come_back_in_another_layout() -> None:
    """`save_on_cpu` returns contiguous copies, where the allocator may give them the addresses of the freed ones."""
    for _ in range(6):
        query, grad_out = draw(2, 4, 256, 64), draw(2, 256, 4, 64)
        expected = gradients(query.transpose(1, 2), grad_out)[1]
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            leaf = query.clone().requires_grad_()
            rows = leaf.transpose(1, 2)
            out = dmattn_ops.flash_dmattn_func(rows, rows, rows, deterministic=True)
        del query, rows
        [found] = torch.autograd.grad(out, leaf, grad_out)
        assert torch.equal(found.transpose(1, 2), expected)


def test_nothing_stays_in_the_memory_of_a_cuda_graph() -> None:
    code = (
        "import torch, dmattn_ops\n"
        "q = torch.randn(4, 1024, 16, 64, device='cuda', dtype=torch.bfloat16, requires_grad=True)\n"
        "step = torch.compile(lambda q: dmattn_ops.flash_dmattn_func(q, q, q, is_causal=True).sum(),\n"
        "                     fullgraph=True, mode='reduce-overhead')\n"
        "for _ in range(5):\n"
        "    q.grad = None\n"
        "    torch.compiler.cudagraph_mark_step_begin(); step(q).backward()\n"
        "torch.cuda.synchronize(); print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("done"), done.stderr[-2000:]


def test_gradients_in_batches() -> None:
    leaf = draw(1, 64, 2, 64).requires_grad_()
    out = dmattn_ops.flash_dmattn_func(leaf, leaf, leaf, deterministic=True)
    grads = draw(3, *out.shape)
    [batched] = torch.autograd.grad(out, leaf, grads, is_grads_batched=True, retain_graph=True)
    for grad, found in zip(grads, batched, strict=True):
        assert torch.equal(found, torch.autograd.grad(out, leaf, grad, retain_graph=True)[0])


def test_parts_of_zeros_without_memory() -> None:
    """The gradient of a sign is zeros without memory; each call gets a part, which begins somewhere in it."""
    leaves = [draw(1, 64, 2, 64).requires_grad_() for _ in range(3)]
    for _ in range(3):  # the later ones are repeated by plans
        outs = [dmattn_ops.flash_dmattn_func(leaf, leaf, leaf) for leaf in leaves]
        for grad in torch.autograd.grad(torch.sgn(torch.cat(outs)).sum(), leaves):
            assert grad.shape == leaves[0].shape and not grad.any()
