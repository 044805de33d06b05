"""The operators `torch.ops.dmattn.*`: the only place that holds a schema. Arguments: `problem.py`; layout of masks: DESIGN.md."""

from __future__ import annotations

import torch

MASK = ", ".join(
    f"Tensor? {name}=None"
    for name in ("row_tiles", "col_tiles", "row_bits", "col_bits", "q_segments", "k_segments")
)
BAND = "SymInt band_lo=-1073741824, SymInt band_hi=1073741824"
SCALARS = "float? softmax_scale=None, float softcap=0.0, float dropout_p=0.0, bool deterministic=False"
CALL = f"{MASK}, Tensor? seed=None, {BAND}, {SCALARS}"
QKV = "Tensor query, Tensor key, Tensor value"
LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
VARLEN_CALL = f"Tensor? bias=None, Tensor? mask=None, Tensor? seed=None, bool top_left=False, {BAND}, {SCALARS}"
SAVED = "Tensor out, Tensor lse"
GRADS = "Tensor grad_out, Tensor? grad_lse"

SCHEMAS = {
    "forward": f"({QKV}, Tensor? bias=None, {CALL}) -> (Tensor out, Tensor lse)",
    "backward": f"({GRADS}, {QKV}, {SAVED}, Tensor? bias=None, {CALL}, bool needs_dbias=False)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    "qkvpacked_forward": f"(Tensor qkv, Tensor? bias=None, {CALL}) -> (Tensor out, Tensor lse)",
    "qkvpacked_backward": f"({GRADS}, Tensor qkv, {SAVED}, Tensor? bias=None, {CALL}, bool needs_dbias=False)"
    " -> (Tensor dqkv, Tensor dbias)",
    "varlen_forward": f"({QKV}, {LENGTHS}, {VARLEN_CALL}) -> (Tensor out, Tensor lse)",
    "varlen_backward": f"({GRADS}, {QKV}, {SAVED}, {LENGTHS}, {VARLEN_CALL}, bool needs_dbias=False)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    "pack_mask": f"(Tensor mask, Tensor? q_segments, Tensor? k_segments, SymInt seqlen_q, {BAND})"
    " -> (Tensor row_tiles, Tensor col_tiles, Tensor row_bits, Tensor col_bits)",
    "list_tiles": f"(Tensor? q_segments, Tensor k_segments, SymInt seqlen_q, {BAND}) -> (Tensor row_tiles, Tensor col_tiles)",
}

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
library = torch.library.Library("dmattn", "DEF")
for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema, tags=_TAGS)
