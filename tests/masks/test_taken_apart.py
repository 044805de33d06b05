"""A `TileMask` that others take apart: frameworks that rebuild what they hand over, files of anybody, wrong fields."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import dmattn_ops
from dmattn_ops import TileMask, dynamic_mask, flash_dmattn_func, prepare_mask
from dmattn_ops.flex import to_block_mask
from dmattn_ops.masks import taken_apart
from dmattn_ops.masks.tile_mask import lengths_of
from tests.masks.test_tile_mask import BANDS, KINDS

S = 200


def cast(tensor: Tensor) -> Tensor:
    """Return what mixed precision makes of an input."""
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def fsdp(mask: TileMask) -> TileMask:
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(cast, {"mask": mask})["mask"]


def fsdp_moves(mask: TileMask) -> TileMask:
    from torch.distributed.utils import _to_kwargs

    return _to_kwargs((), {"mask": mask}, torch.device("cpu"), False)[1][0]["mask"]


def lightning(function: Callable[[Tensor], Tensor]) -> Callable[[TileMask], TileMask]:
    def handed_over(mask: TileMask) -> TileMask:
        collections = pytest.importorskip("lightning_utilities.core.apply_func")
        return collections.apply_to_collection([{"mask": mask}], Tensor, function)[0]["mask"]

    return handed_over


def lightning_moves(mask: TileMask) -> TileMask:
    utilities = pytest.importorskip("lightning.fabric.utilities.apply_func")
    return utilities.move_data_to_device({"mask": mask}, torch.device("cpu"))["mask"]


def lightning_precision(mask: TileMask) -> TileMask:
    precision = pytest.importorskip("lightning.fabric.plugins.precision")
    mixed = precision.MixedPrecision("bf16-mixed", "cpu").convert_input({"mask": mask})
    return precision.HalfPrecision("bf16-true").convert_input(mixed)["mask"]


def accelerate(name: str, *arguments: Any) -> Callable[[TileMask], TileMask]:
    def handed_over(mask: TileMask) -> TileMask:
        operations = pytest.importorskip("accelerate.utils.operations")
        return getattr(operations, name)({"mask": mask}, *arguments)["mask"]

    return handed_over


def filed(weights_only: bool) -> Callable[[TileMask], TileMask]:
    def handed_over(mask: TileMask) -> TileMask:
        file = io.BytesIO()
        torch.save(mask, file)
        file.seek(0)
        return torch.load(file, weights_only=weights_only)

    return handed_over


FRAMEWORKS: dict[str, Callable[[TileMask], TileMask]] = {
    "FSDP": fsdp,
    "FSDP moves": fsdp_moves,
    "lightning casts": lightning(cast),
    "lightning copies": lightning(torch.clone),
    "lightning moves": lightning_moves,
    "lightning precision": lightning_precision,
    "accelerate moves": accelerate("send_to_device", "cpu"),
    "accelerate casts": accelerate("convert_to_fp32"),
    "dataclasses": dataclasses.replace,
    "tree": lambda mask: pytree.tree_map(lambda leaf: cast(leaf) if isinstance(leaf, Tensor) else leaf, mask),
    "tree of others": lambda mask: pytree.tree_map(lambda of: of(), pytree.tree_map(lambda leaf: lambda: leaf, mask)),
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)),
    "file": filed(False),
    "file of weights": filed(True),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_framework_hands_over_the_same_mask(framework: str):
    for kind, maker in KINDS.items():
        made, _ = maker(**BANDS["window"])
        before = made.to_dense()
        got = pytree.tree_map(lambda leaf: leaf, FRAMEWORKS[framework](made))  # as a compiler sees it afterwards
        assert type(got) is TileMask and repr(got) == repr(made), kind
        assert torch.equal(got.to_dense(), before) and torch.equal(made.to_dense(), before), kind
        query, key = torch.randn(2, made.shape[2], 3, 4), torch.randn(2, made.shape[3], 3, 4)
        assert torch.equal(flash_dmattn_func(query, key, key, got), flash_dmattn_func(query, key, key, made)), kind


@pytest.mark.parametrize("where", ["argument", "keyword"])
def test_pipelines_cut_a_mask_along_the_batch_or_hand_it_to_every_part(where: str):
    from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

    for kind, maker in KINDS.items():
        made, _ = maker(**BANDS["causal"])
        for mask in (made, made.batch(0, 1)):
            query, key = torch.randn(2, mask.shape[2], 3, 4), torch.randn(2, mask.shape[3], 3, 4)
            given, named = ((query, key, mask), {}) if where == "argument" else ((query, key), {"mask": mask})
            parts, keywords = split_args_kwargs_into_chunks(given, named, 2)
            assert len(parts) == 2, kind
            outs = [
                flash_dmattn_func(part[0], part[1], part[1], *part[2:], **named)
                for part, named in zip(parts, keywords, strict=True)
            ]
            torch.testing.assert_close(torch.cat(outs), flash_dmattn_func(query, key, key, mask))


def test_a_copy_takes_its_fields_anew_until_it_is_used_and_nothing_else():
    made, _ = KINDS["hidden"]()
    other = copy.deepcopy(made)
    other.end, other.at_most, other.band_lo = other.end.clone(), other.at_most, other.band_lo
    words = "a TileMask is never modified, dataclasses.replace makes another one"
    for name, value in (
        ("end", other.end[..., 1:]),
        ("end", other.end.long()),
        ("end", None),
        ("start", 3),
        ("band_lo", 7),
        ("name", "mask"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError, match=words):
            setattr(other, name, value)
    query, key = torch.randn(2, made.shape[2], 3, 4), torch.randn(2, made.shape[3], 3, 4)
    flash_dmattn_func(query, key, key, other)
    with pytest.raises(dataclasses.FrozenInstanceError, match=words):
        other.end = other.end.clone()
    assert torch.equal(other.to_dense(), made.to_dense())


# Fields that are no mask.

BITS = prepare_mask(torch.rand(2, 3, S, S) < 0.5, window_size=(30, 0))
SEGMENTS = prepare_mask(documents=torch.arange(S).view(2, -1) // 30)
ENDS = dynamic_mask(torch.randn(2, 3, S), 5)
WRONG = {
    "no tensor": (BITS, {"row_tiles": [1]}, TypeError, "row_tiles must be a tensor, got list"),
    "no lengths": (BITS, {"lengths": None}, TypeError, "lengths must be a tensor, got NoneType"),
    "a rank": (BITS, {"row_tiles": torch.zeros(3)}, ValueError, "row_tiles must have 4 dimensions, got 1, shape (3,)"),
    "a rank of ids": (SEGMENTS, {"q_segments": SEGMENTS.k_segments}, ValueError, "q_segments must have 2 dimensions"),
    "a dtype": (ENDS, {"end": ENDS.end.float()}, TypeError, "end must have dtype torch.int32, got torch.float32"),
    "a layout": (ENDS, {"end": ENDS.end.to_sparse()}, TypeError, "end must be a dense tensor"),
    "a device": (ENDS, {"end": ENDS.end.to("meta")}, ValueError, "end must be on cpu like query, got meta"),
    "other keys": (
        ENDS,
        {"end": ENDS.end[..., 1:]},
        ValueError,
        "end must have shape (2 or 1, 3 or 1, 200), got (2, 3, 199)",
    ),
    "other bits": (BITS, {"row_bits": BITS.row_bits[:, :, 1:]}, ValueError, "row_bits must have shape"),
    "fewer lists": (BITS, {"col_tiles": BITS.col_tiles[:, :, :1]}, ValueError, "col_tiles must have shape"),
    "narrow lists": (
        BITS,
        {"col_tiles": BITS.col_tiles[..., :3]},
        ValueError,
        "col_tiles must have a last dimension of at least 4",
    ),
    "another batch": (SEGMENTS, {"k_segments": SEGMENTS.k_segments[[0, 0, 1]]}, ValueError, "must have shape"),
    "lengths with elements": (
        ENDS,
        {"lengths": torch.zeros(3, 3, 1)},
        ValueError,
        "lengths must have shape (3, 3, 0), got (3, 3, 1)",
    ),
    "long": (
        ENDS,
        {"lengths": lengths_of(ENDS.end, 1 << 30, S)},
        ValueError,
        "Sq of a mask must be less than 1073741824",
    ),
    "two kinds": (
        ENDS,
        {"k_segments": ENDS.end},
        ValueError,
        "a mask must have either row_bits and col_bits, or k_segments, or end",
    ),
    "no kind": (
        ENDS,
        {"end": None},
        ValueError,
        "a mask must have either row_bits and col_bits, or k_segments, or end",
    ),
    "a promise": (ENDS, {"at_most": -1}, ValueError, "at_most must not be negative, got -1"),
    "no promise": (ENDS, {"at_most": "5"}, TypeError, "at_most must be an int, got str"),
    "an end of the band": (ENDS, {"band_lo": 1.5}, TypeError, "band_lo must be an int, got float"),
    "an alignment": (ENDS, {"from_bottom_right": 1}, TypeError, "from_bottom_right must be a bool, got int"),
}


def words(text: str) -> str:
    return re.escape(text)


@pytest.mark.parametrize("wrong", WRONG)
def test_fields_that_are_no_mask_are_refused_wherever_they_come_from(wrong: str):
    mask, fields, error, text = WRONG[wrong]
    with pytest.raises(error, match=words(text)):
        dataclasses.replace(mask, **fields)
    with pytest.raises(error, match=words(text)):
        load({**taken_apart.state_of(mask), **fields})


# Files.


def load(state: Any) -> TileMask:
    """Return what torch loads, with nothing but weights allowed, from a file in which somebody wrote this state of a mask."""
    made = object.__new__(TileMask)
    file = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TileMask, "__getstate__", lambda mask: state)
        torch.save({"mask": made}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["mask"]


def altered(mask: TileMask, name: str, place: Any, value: int) -> dict[str, Any]:
    state = taken_apart.state_of(mask)
    state[name] = state[name].clone()
    state[name][place] = value
    return state


LISTED = {
    "no tile": ((..., 1, 4), -1, "{} must list tiles from 0 to 1, got another number"),
    "a tile behind": ((..., 1, 4), 2, "{} must list tiles from 0 to 1, got another number"),
    "a tile far away": ((..., 1, 4), 2**31 - 1, "{} must list tiles from 0 to 1, got another number"),
    "a tile twice": ((..., 1, slice(4, 6)), 0, "each record of {} must list a tile once, got one twice"),
    "a count below": ((..., 1, 1), -1, "each record of {} must list between 0 and 2 tiles"),
    "a count above": ((..., 1, 1), 7, "each record of {} must list between 0 and 2 tiles"),
    "a count of many": ((..., 0, 2), 2**31 - 1, "each record of {} must list between 0 and 2 tiles"),
    "a rank": ((0, 0, 1, 0), -1, "word 0 of the records of {} must name each of 2 rows once"),
    "a rank twice": ((..., 0), 0, "word 0 of the records of {} must name each of 2 rows once"),
    "word 3": ((0, 0, 1, 3), 1, "word 3 of the records of {} must be 0, got another number"),
}


@pytest.mark.parametrize("wrong", LISTED)
def test_a_file_with_lists_that_no_kernel_should_walk_is_refused(wrong: str):
    place, value, text = LISTED[wrong]
    for mask in (prepare_mask(torch.rand(2, 3, S, S) < 0.5), SEGMENTS_OF_ALL):
        for name in ("row_tiles", "col_tiles"):
            with pytest.raises(ValueError, match=words(text.format(name))):
                load(altered(mask, name, place, value))


SEGMENTS_OF_ALL = prepare_mask(torch.rand(2, S) < 0.5, seqlen_q=S)


def test_a_file_of_another_format_is_refused_in_words():
    state = taken_apart.state_of(ENDS)
    assert torch.equal(load(state).to_dense(), ENDS.to_dense())
    for found in (3, -1, "1", None):
        with pytest.raises(ValueError, match=f"a file holds a TileMask of format {found!r}, and dmattn_ops"):
            load({**state, "format": found})
    with pytest.raises(ValueError, match="a file holds a TileMask of format None"):
        load([1])
    del state["end"]
    with pytest.raises(ValueError, match="a file of a TileMask must hold lengths, row_tiles"):
        load(state)
    with pytest.raises(ValueError, match=r"got .*, warmth$"):
        load({**taken_apart.state_of(ENDS), "warmth": 1})
    file = io.BytesIO()
    torch.save(ENDS, file, _use_new_zipfile_serialization=False)
    file.seek(0)
    with pytest.raises(ValueError, match="a TileMask cannot be checked in a file of torch's old format"):
        torch.load(file)


@pytest.mark.parametrize("weights_only", [True, False])
def test_files_of_the_last_version_load(weights_only: bool):
    saved = torch.load(Path(__file__).parents[1] / "golden" / "masks_of_0_2_0.pt", weights_only=weights_only)
    assert set(saved) == {"bits", "segments", "padding", "intervals", "dynamic"}
    for mask, dense in saved.values():
        assert torch.equal(mask.to_dense(), dense)
        query, key = torch.randn(1, dense.shape[2], 2, 4), torch.randn(1, dense.shape[3], 2, 4)
        torch.testing.assert_close(flash_dmattn_func(query, key, key, mask), flash_dmattn_func(query, key, key, dense))


def test_masks_whose_memory_was_given_back_are_refused_by_what_reads_them():
    reads: list[Callable[[TileMask], Any]] = [
        TileMask.to_dense, TileMask.density, TileMask.clone, to_block_mask,
        lambda mask: mask.queries(3, 9), lambda mask: mask.keys(3, 9), lambda mask: mask.batch(0, 1),
        lambda mask: mask.heads(0, 1), lambda mask: mask.also(dmattn_ops.bands.Band(-3, 3)),
    ]  # fmt: skip
    for mask in (BITS, SEGMENTS, ENDS):
        for name in taken_apart.MASK_TENSORS:
            if getattr(mask, name) is None:
                continue
            other = mask.clone()
            getattr(other, name).untyped_storage().resize_(0)
            assert repr(other) == repr(mask)
            refused = 0
            for read in reads:
                try:
                    read(other)
                except ValueError as error:
                    refused += "has no memory: its storage was resized to 0 bytes" in str(error)
            assert refused >= 4, name
            with pytest.raises(ValueError, match="has no memory"):
                other.to_dense()
