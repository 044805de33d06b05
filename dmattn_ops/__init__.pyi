# The public names for type checkers, beside `__init__.py`: what a call returns follows from `return_lse` and `return_max`.

from typing import Literal, TypedDict, overload

from torch import Tensor
from typing_extensions import Unpack

from dmattn_ops import biases as biases
from dmattn_ops import compat as compat
from dmattn_ops import distributed as distributed
from dmattn_ops import flex as flex
from dmattn_ops import integrations as integrations
from dmattn_ops import nn as nn
from dmattn_ops import sdpa as sdpa
from dmattn_ops import testing as testing
from dmattn_ops import trees as trees
from dmattn_ops.api.backend import BackendInfo as BackendInfo
from dmattn_ops.api.backend import backend_info as backend_info
from dmattn_ops.api.explain import Explanation as Explanation
from dmattn_ops.api.explain import explain as explain
from dmattn_ops.api.mass import key_mass as key_mass
from dmattn_ops.api.mass import selection_mass as selection_mass
from dmattn_ops.bands import CausalFrom, Window
from dmattn_ops.generation import KeptKeys as KeptKeys
from dmattn_ops.masks.chosen import selection_mask as selection_mask
from dmattn_ops.masks.prepare import dynamic_mask as dynamic_mask
from dmattn_ops.masks.prepare import prepare_mask as prepare_mask
from dmattn_ops.masks.tile_mask import TileMask as TileMask
from dmattn_ops.sdpa import activate as activate
from dmattn_ops.sdpa import activated as activated
from dmattn_ops.sdpa import deactivate as deactivate
from dmattn_ops.version import __version__ as __version__

class _Keywords(TypedDict, total=False):
    """What every function takes by name besides `return_lse` and `return_max`, which tell what is returned."""

    is_causal: bool
    causal_from: CausalFrom
    window_size: Window
    softmax_scale: float | None
    softcap: float
    dropout_p: float
    deterministic: bool | None
    batch_invariant: bool
    sink: Tensor | None

class _DenseKeywords(_Keywords, total=False):
    """What functions of whole batches take by name as well."""

    seqlen_k_used: Tensor | None

@overload
def flash_dmattn_func(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | TileMask | None = ..., bias: Tensor | None = ...,
    *, return_lse: Literal[False] = ..., return_max: Literal[False] = ..., **keywords: Unpack[_DenseKeywords],
) -> Tensor: ...  # fmt: skip
@overload
def flash_dmattn_func(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | TileMask | None = ..., bias: Tensor | None = ...,
    *, return_lse: Literal[True], return_max: Literal[False] = ..., **keywords: Unpack[_DenseKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_dmattn_func(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | TileMask | None = ..., bias: Tensor | None = ...,
    *, return_lse: Literal[False] = ..., return_max: Literal[True], **keywords: Unpack[_DenseKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_dmattn_func(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | TileMask | None = ..., bias: Tensor | None = ...,
    *, return_lse: Literal[True], return_max: Literal[True], **keywords: Unpack[_DenseKeywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_dmattn_func(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | TileMask | None = ..., bias: Tensor | None = ...,
    *, return_lse: bool = ..., return_max: bool = ..., **keywords: Unpack[_DenseKeywords],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
@overload
def flash_dmattn_qkvpacked_func(
    qkv: Tensor, mask: Tensor | TileMask | None = ..., bias: Tensor | None = ...,
    *, return_lse: Literal[False] = ..., return_max: Literal[False] = ..., **keywords: Unpack[_DenseKeywords],
) -> Tensor: ...  # fmt: skip
@overload
def flash_dmattn_qkvpacked_func(
    qkv: Tensor, mask: Tensor | TileMask | None = ..., bias: Tensor | None = ...,
    *, return_lse: Literal[True], return_max: Literal[False] = ..., **keywords: Unpack[_DenseKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_dmattn_qkvpacked_func(
    qkv: Tensor, mask: Tensor | TileMask | None = ..., bias: Tensor | None = ...,
    *, return_lse: Literal[False] = ..., return_max: Literal[True], **keywords: Unpack[_DenseKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_dmattn_qkvpacked_func(
    qkv: Tensor, mask: Tensor | TileMask | None = ..., bias: Tensor | None = ...,
    *, return_lse: Literal[True], return_max: Literal[True], **keywords: Unpack[_DenseKeywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_dmattn_qkvpacked_func(
    qkv: Tensor, mask: Tensor | TileMask | None = ..., bias: Tensor | None = ...,
    *, return_lse: bool = ..., return_max: bool = ..., **keywords: Unpack[_DenseKeywords],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
@overload
def flash_dmattn_varlen_func(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, mask: Tensor | None = ..., bias: Tensor | None = ...,
    *, return_lse: Literal[False] = ..., return_max: Literal[False] = ..., **keywords: Unpack[_Keywords],
) -> Tensor: ...  # fmt: skip
@overload
def flash_dmattn_varlen_func(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, mask: Tensor | None = ..., bias: Tensor | None = ...,
    *, return_lse: Literal[True], return_max: Literal[False] = ..., **keywords: Unpack[_Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_dmattn_varlen_func(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, mask: Tensor | None = ..., bias: Tensor | None = ...,
    *, return_lse: Literal[False] = ..., return_max: Literal[True], **keywords: Unpack[_Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_dmattn_varlen_func(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, mask: Tensor | None = ..., bias: Tensor | None = ...,
    *, return_lse: Literal[True], return_max: Literal[True], **keywords: Unpack[_Keywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_dmattn_varlen_func(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, mask: Tensor | None = ..., bias: Tensor | None = ...,
    *, return_lse: bool = ..., return_max: bool = ..., **keywords: Unpack[_Keywords],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
