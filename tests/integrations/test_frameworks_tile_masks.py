"""Prepared masks of every kind through real frameworks: FSDP2, pipeline schedules, Lightning, accelerate, torchao.

torchao comes with `pip install '.[frameworks]'`, the others with `'.[test]'`.
"""

import copy

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

import dmattn_ops
from dmattn_ops import dynamic_mask, flash_dmattn_func, prepare_mask, selection_mask

B, S, HEADS, DIM = 4, 70, 2, 8
WIDTH = HEADS * DIM


@pytest.fixture(scope="module")
def two_ranks():
    with ranks.Ranks(2) as group:
        yield group


def masks():
    """A mask of each kind, for one batch entry or for all."""
    torch.manual_seed(5)
    keep = torch.ones(B, S, dtype=torch.bool)
    keep[1, :30] = keep[3, 50:] = False
    ids = torch.arange(S).expand(B, -1) // torch.tensor([[20], [S], [7], [33]])
    start = torch.randint(0, S, (B, HEADS, S), dtype=torch.int32)
    end = start + 30
    return {
        "bits": prepare_mask(torch.rand(B, 1, S, S) < 0.5, is_causal=True),
        "bits of all": prepare_mask(torch.rand(1, HEADS, S, S) < 0.5),
        "padding": prepare_mask(keep, seqlen_q=S, is_causal=True),
        "documents": prepare_mask(documents=ids, window_size=(9, 0)),
        "dynamic": dynamic_mask(torch.randn(B, 1, S), 5, keep_last=2),
        "dynamic of all": dynamic_mask(torch.randn(1, HEADS, S), 5),
        "hidden": prepare_mask(intervals=(start, end), hidden=(start + 5, end - 5), seqlen_q=S),
        "chosen": selection_mask(torch.randint(-1, 9, (B, 1, S, 3)), block=8),
    }


class Attends(nn.Module):
    """A layer of attention by a mask that it is given."""

    def __init__(self):
        super().__init__()
        self.project, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, mask):
        query, key, value = self.project(hidden).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        return hidden + self.merge(flash_dmattn_func(query, key, value, mask).flatten(2))


class Layers(nn.Module):
    """Two such layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attends(), Attends()])

    def forward(self, hidden, mask):
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return hidden


def layers():
    torch.manual_seed(1)
    return Layers()


def batch():
    torch.manual_seed(2)
    return torch.randn(B, S, WIDTH), torch.randn(B, S, WIDTH)


def loss_of(out, target):
    return (out.float() - target).square().mean()


def expected_of(mask):
    """What one process computes in float32: out and the gradients of all parameters."""
    model, (hidden, target) = layers(), batch()
    out = model(hidden, mask)
    loss_of(out, target).backward()
    return out.detach(), [part.grad for part in model.parameters()]


def distance(found, expected):
    return float((found.float() - expected).norm() / expected.norm())


def under_fsdp(dtype):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=True)
    found = {}
    for kind, mask in masks().items():
        model, (hidden, target) = layers(), batch()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        out = model(hidden, mask=mask)
        loss_of(out, target).backward()
        expected, gradients = expected_of(mask)
        made = [part.grad.full_tensor() for part in model.parameters()]
        errors = [distance(one, other) for one, other in zip(made, gradients, strict=True)]
        found[kind] = max(distance(out.detach(), expected), *errors)
    return found


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.05), (None, 1e-5)], ids=str)
def test_fsdp_with_mixed_precision_hands_masks_over(two_ranks, dtype, most):
    for errors in two_ranks(under_fsdp, dtype):
        assert set(errors) == set(masks()) and max(errors.values()) < most, errors


def in_a_schedule(name):
    from torch.distributed import pipelining

    rank, found = dist.get_rank(), {}
    for kind, mask in masks().items():
        layer, (hidden, target) = layers().layers[rank], batch()
        stage = pipelining.PipelineStage(layer, rank, 2, torch.device("cpu"))
        schedule = getattr(pipelining, name)(stage, n_microbatches=2, loss_fn=loss_of)
        if rank == 0:
            schedule.step(hidden, mask=mask)
        else:
            out = schedule.step(target=target, losses=[], mask=mask)
        expected, gradients = expected_of(mask)
        half = len(gradients) // 2
        own = gradients[:half] if rank == 0 else gradients[half:]
        errors = [distance(part.grad, other) for part, other in zip(layer.parameters(), own, strict=True)]
        found[kind] = max(errors) if rank == 0 else max(distance(out.detach(), expected), *errors)
    return found


@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B"])
def test_pipeline_schedules_train_with_masks(two_ranks, name):
    for errors in two_ranks(in_a_schedule, name):
        assert set(errors) == set(masks()) and max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
def test_lightning_hands_masks_of_a_batch_over(precision, tmp_path):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.outs = layers(), []

        def training_step(self, given, _):
            out = self.model(given["hidden"].to(self.model.layers[0].merge.weight.dtype), given["mask"])
            self.outs.append(out.detach())
            return loss_of(out, given["target"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, precision=precision, default_root_dir=tmp_path, **quiet
    )
    hidden, target = batch()
    module, every = Module(), masks()
    batches = [{"hidden": hidden, "target": target, "mask": mask} for mask in every.values()]
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    for out, (kind, mask) in zip(module.outs, every.items(), strict=True):
        assert distance(out, expected_of(mask)[0]) < (1e-5 if precision == "32-true" else 0.05), kind


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_fabric_hands_masks_over(precision):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    model = layers()
    model, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    hidden, target = batch()
    for kind, mask in masks().items():
        given = fabric.to_device({"hidden": hidden, "mask": mask})
        out = model(**given)
        fabric.backward(loss_of(out, target))
        assert distance(out.detach(), expected_of(mask)[0]) < 0.05, kind


def test_accelerate_trains_with_masks_of_a_batch():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model, (hidden, target), every = layers(), batch(), masks()
    batches = [{"hidden": hidden, "mask": mask} for mask in every.values()]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), loader)
    found = []
    for given in loader:
        found.append(model(**given))
        accelerator.backward(loss_of(found[-1], target))
    for out, (kind, mask) in zip(found, every.items(), strict=True):
        assert distance(out.detach(), expected_of(mask)[0]) < 0.05, kind


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_weights_that_accelerate_keeps_elsewhere_attend_by_masks(where, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model, (hidden, _) = layers(), batch()
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    for kind, mask in masks().items():
        for _ in range(2):
            assert distance(model(hidden, mask=mask).detach(), expected_of(mask)[0]) < 1e-5, kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_layers_whose_weights_torchao_quantises_compute_what_their_weights_say(dtype):
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    torch.manual_seed(3)
    layer = dmattn_ops.nn.DynamicMaskAttention(32, 4, 2, keep=7, keep_first=1, keep_last=2).to(dtype)
    quantised, hidden = copy.deepcopy(layer), torch.randn(2, 50, 32).to(dtype)
    torchao.quantize_(quantised, torchao.Int8WeightOnlyConfig())
    for own, rounded in zip(layer.modules(), quantised.modules(), strict=True):
        if isinstance(own, nn.Linear):
            own.weight.copy_(rounded.weight.dequantize())
    assert distance(quantised(hidden), layer(hidden).float()) < (1e-5 if dtype == torch.float32 else 0.05)
