"""Frameworks that take the inputs of layers apart, move, cast, split and copy them: masks of a forward come through.

FSDP2 and pipelines are torch's own; Lightning, accelerate and PEFT are part of what `pip install '.[test]'` brings.
"""

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import ranks  # noqa: E402
from tiny_models import decoder, tokens, under  # noqa: E402

import dmattn_ops.integrations.transformers as integration  # noqa: E402

B, S = 2, 19
KINDS = ("causal", "padded", "packed", "dense")


@pytest.fixture(scope="module")
def two_ranks():
    with ranks.Ranks(2) as group:
        yield group


def padding():
    keep = torch.ones(B, S, dtype=torch.int64)
    keep[0, :5] = 0
    return keep


def batch():
    torch.manual_seed(0)
    return {"input_ids": tokens(B, S), "attention_mask": padding()}


def model_here():
    integration.register()
    torch.manual_seed(1)
    return under(decoder("llama"), "dmattn")


def mask_of(kind):
    if kind == "dense":
        return integration.make_mask(B, S, S, mask_function=lambda b, h, i, j: (i + j) % 3 != 0)
    given = {"attention_mask": padding()} if kind == "padded" else {}
    mask = integration.make_mask(B, S, S, **given)
    if kind == "packed":
        documents = (torch.arange(S) // 7).int().expand(B, -1)
        mask = dataclasses.replace(mask, documents=documents).prepare(torch.device("cpu"))
    return mask


def by_fsdp(mask):
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(lambda part: part.bfloat16() if part.is_floating_point() else part, mask)


def by_pytree(mask):
    return torch.utils._pytree.tree_map(lambda part: part, mask)


def by_lightning(mask):
    """What lightning_utilities.core.apply_func.apply_to_collection does with a dataclass."""
    fields = {field.name: getattr(mask, field.name) for field in dataclasses.fields(mask)}
    result = copy.deepcopy(mask, memo={id(value): value for value in fields.values()})
    for name, value in fields.items():
        setattr(result, name, value.clone() if isinstance(value, torch.Tensor) else value)
    return result


WAYS = {
    "replace": dataclasses.replace, "deepcopy": copy.deepcopy, "copy": copy.copy, "to": lambda mask: mask.to("cpu"),
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)), "FSDP": by_fsdp, "pytree": by_pytree, "Lightning": by_lightning,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_mask_of_a_forward_can_be_taken_apart(way, kind):
    mask = mask_of(kind)
    before = mask.tensor()
    again = WAYS[way](mask)
    assert type(again) is type(mask) and again.shape == mask.shape == (B, 1, S, S)
    assert torch.equal(again.tensor(), before) and torch.equal(mask.tensor(), before)


def trained_under_fsdp(dtype):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = model_here()
    expected = model(**batch()).logits.detach()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=True)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    inputs = batch()
    found = model(**inputs, labels=inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100))
    found.loss.backward()
    finite = all(part.grad is not None and part.grad.full_tensor().isfinite().all() for part in model.parameters())
    rows = inputs["attention_mask"].bool()
    return finite, float((found.logits[rows] - expected[rows]).norm() / expected[rows].norm())


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.1), (None, 1e-5)])
def test_fsdp_with_mixed_precision_trains(two_ranks, dtype, most):
    for finite, error in two_ranks(trained_under_fsdp, dtype):
        assert finite and error < most


class Stage(nn.Module):
    """One layer as a stage of a pipeline: hidden states in and out, and the tokens' padding beside them."""

    def __init__(self, model, number):
        super().__init__()
        self.model, self.layer = model, model.model.layers[number]

    def forward(self, hidden, keep):
        places = torch.arange(hidden.shape[1])[None]
        mask = integration.make_mask(hidden.shape[0], hidden.shape[1], hidden.shape[1], attention_mask=keep)
        rotary = self.model.model.rotary_emb(hidden, places)
        return self.layer(hidden, attention_mask=mask, position_embeddings=rotary, position_ids=places)


def in_a_pipeline():
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model = model_here().requires_grad_(False)
    hidden, keep = torch.randn(B, S, 32, generator=torch.Generator().manual_seed(3)), padding()
    expected = Stage(model, 1)(Stage(model, 0)(hidden, keep), keep)
    rank = dist.get_rank()
    stage = PipelineStage(Stage(model, rank), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2)
    with torch.no_grad():
        found = schedule.step(hidden, keep=keep) if rank == 0 else schedule.step(keep=keep)
    return True if rank == 0 else torch.allclose(found[keep.bool()], expected[keep.bool()], atol=1e-5)


def test_a_pipeline_splits_a_batch(two_ranks):
    assert two_ranks(in_a_pipeline) == [True, True]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_lightning_trains(precision, tmp_path):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = model_here(), []

        def training_step(self, inputs, _):
            mask = inputs.pop("mask", None)
            labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
            if mask is not None:
                inputs["attention_mask"] = mask
            loss = self.model(**inputs, labels=labels).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    module = Module()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        max_steps=8, accelerator="cpu", devices=1, precision=precision, default_root_dir=tmp_path, **quiet
    )
    batches = [batch() | {"mask": mask_of("padded")} for _ in range(8)]  # the mask travels with the batch
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    assert module.losses[-1] < module.losses[0]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_fabric_trains(precision):
    fabric = pytest.importorskip("lightning", reason="lightning is not installed").Fabric(
        accelerator="cpu", devices=1, precision=precision
    )
    model = model_here()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    losses = []
    for _ in range(6):
        inputs = fabric.to_device(batch() | {"attention_mask": mask_of("padded")})
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("where", ["cpu", "disk"])
@torch.no_grad()
def test_weights_that_accelerate_keeps_elsewhere(where, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model, inputs = model_here(), batch()
    expected = model(**inputs).logits
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    for _ in range(2):
        torch.testing.assert_close(model(**inputs).logits, expected)


def test_lora_of_peft_trains_and_changes_nothing_at_first():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, inputs = model_here(), batch()
    expected = model(**inputs).logits.detach()
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    found = model(**inputs, labels=inputs["input_ids"])
    torch.testing.assert_close(found.logits, expected)
    found.loss.backward()
    assert any(part.grad is not None and part.grad.abs().max() > 0 for part in model.parameters())
