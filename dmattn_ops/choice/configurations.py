"""What a launch can be configured with: a record for each family of kernels, and the row of a table that holds one."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PortableForward:
    """Plain Triton forward: a program owns `block_m` queries and walks keys in steps of `block_n`.

    Where there are fewer programs than multiprocessors, they share walks over the keys: `per_sm` on each; 0 never splits.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int = 0
    short: PortableForward | None = None  # for calls with no more queries than its `block_m` (decoding)
    unaligned: PortableForward | None = None  # for rows that do not start at multiples of 16 bytes
    # For calls with a number for each pair of query and key: a full bias, which is buffered like keys, or dropout.
    pairwise: PortableForward | None = None

    def for_call(self, aligned: bool, pairwise: bool, queries: int) -> PortableForward:
        """Return the configuration that a call runs with."""
        if not aligned and self.unaligned is not None:
            return self.unaligned
        if self.short is not None and queries <= self.short.block_m:
            return self.short
        return self.pairwise if pairwise and self.pairwise is not None else self


@dataclass(frozen=True, slots=True)
class DecodeForward:
    """Plain Triton forward for one query: a program owns the heads of a group, `block_m` at most, and walks `block_n` keys a step.

    Programs share the keys of a head as in `PortableForward`.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int


@dataclass(frozen=True, slots=True)
class PortableBackward:
    """Plain Triton backward: dk/dv programs own `block_n` keys, dq programs own `dq_block_m` queries."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    dq_block_m: int
    dq_block_n: int
    dq_num_warps: int
    dq_num_stages: int
    unaligned: PortableBackward | None = None  # as in `PortableForward`
    pairwise: PortableBackward | None = None

    def for_call(self, aligned: bool, pairwise: bool) -> PortableBackward:
        """Return the configuration that a call runs with."""
        if not aligned and self.unaligned is not None:
            return self.unaligned
        return self.pairwise if pairwise and self.pairwise is not None else self


@dataclass(frozen=True, slots=True)
class AmpereForward:
    """Gluon forward with mma.sync: a program owns `block_m` queries, whose rows its warps share, and walks `block_n` keys a step.

    `per_sm` as in `PortableForward`. `dropout` is for calls with dropout, `plain` for calls that have neither that nor a mask, a
    band, a bias or a soft cap, `narrow_bias` for heads of at most 32 beside a bias with queries; None where they take this
    configuration too. `bias_tiles`: shared memory has room for a tile of a
    bias with queries. `held`: queries stay in registers. `ahead`: there are two buffers of keys and of values, and a step without
    a test computes the products of the next one beside its own weights; for calls without a bias.
    """

    block_m: int
    block_n: int
    num_warps: int
    per_sm: int = 2
    bias_tiles: bool = True
    held: bool = False
    ahead: bool = False
    plain: AmpereForward | None = None
    dropout: AmpereForward | None = None
    narrow_bias: AmpereForward | None = None

    def for_call(self, plain: bool, drops: bool, narrow_bias: bool) -> AmpereForward:
        """Return the configuration that a call runs with."""
        return (self.dropout if drops else self.plain if plain else self.narrow_bias if narrow_bias else None) or self


@dataclass(frozen=True, slots=True)
class AmpereSharedBias:
    """Gluon kernel with mma.sync: the gradient of a bias with queries that several batches or heads share.

    A program owns a block of it, whose queries `score_warps` of its warps share, and walks batches and heads; there are `stages`
    buffers of what these read, 1 or 2.
    """

    block_m: int
    block_n: int
    num_warps: int
    score_warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class AmpereBackward:
    """Gluon backward with mma.sync: a program owns `block_n` keys and walks `block_m` queries a step, with five products.

    `score_warps` of its warps lie along the queries of S and dP, `key_warps` along the keys of dk and dv, `query_warps` along
    the queries of dq. There are `query_stages` buffers of queries and `grad_stages` of gradients of out, each 1 or 2. `dropout` is
    for calls with dropout, `plain` for calls that have neither that nor a mask, a bias or a soft cap, `narrow_bias` for heads of at
    most 32 beside a bias with queries; None where they take this configuration too. `shared_bias` is for the gradient of a bias
    with queries that heads or batches share. Where at least `bias_sums` batches share it, the kernel itself adds this gradient up
    in memory, unless the call is deterministic; 0 is never.
    """

    block_m: int
    block_n: int
    num_warps: int
    score_warps: int
    key_warps: int
    query_warps: int
    query_stages: int
    grad_stages: int
    shared_bias: AmpereSharedBias | None = None
    plain: AmpereBackward | None = None
    dropout: AmpereBackward | None = None
    narrow_bias: AmpereBackward | None = None
    bias_sums: int = 0

    def for_call(self, plain: bool, drops: bool, narrow_bias: bool) -> AmpereBackward:
        """Return the configuration that a call runs with."""
        other = self.dropout if drops else self.plain if plain else self.narrow_bias if narrow_bias else None
        return replace(other, shared_bias=other.shared_bias or self.shared_bias) if other else self


@dataclass(frozen=True, slots=True)
class HopperForward:
    """Gluon forward for SM 9.0: consumers of 64 queries each share `block_m` queries, keys come in buffers of `block_n`.

    Calls with lists or a bias take 128 queries whatever `block_m` is; others too where they are done sooner so (`resolve.py`).
    """

    block_m: int
    block_n: int
    stages: int  # buffers of keys and of values
    query_stages: int  # buffers of queries, which also stage the output
    per_sm: int = 1  # blocks of a multiprocessor, 1 or 2; 2 are for heads that leave registers for that
    bias_tiles: bool = False  # a bias with queries comes by TMA, as keys do
    step: float = 1.0  # microseconds that `block_m` queries take for `block_n` keys
    step_of_128: float = 1.0  # the same for 128 queries


@dataclass(frozen=True, slots=True)
class HopperSharedBias:
    """Gluon kernel for SM 9.0: the gradient of a bias with queries that several batches or heads share.

    A program owns 128 queries and walks over keys in steps of 64. Where the queries of all batches and heads do not fit in
    shared memory, it adds up `chunks` steps of keys side by side.
    """

    chunks: int
    stages: int  # most buffers of keys and of values
    heads_per_group: int  # as in `HopperBackward256`


@dataclass(frozen=True, slots=True)
class HopperBackward:
    """Gluon backward for SM 9.0: a block owns `block_n` keys and walks queries in steps of `block_m`.

    `variant` is the order of a step, "overlapped" or "two_phase" (`kernels/hopper/backward/steps.py`). A deterministic call runs
    `ordered_heads` key heads side by side, a causal one `ordered_causal_heads`: with more, blocks wait less but share less of L2.
    `shared_bias` is for the gradient of a bias with queries, `dbias` for that where a portable kernel computes it.
    """

    block_m: int
    block_n: int
    variant: str
    ordered_heads: int
    ordered_causal_heads: int
    step: float  # microseconds of a step, and
    ends: float  # of a block's begin and end
    shares: int = 1  # blocks for each `block_n` keys, which divide the queries
    dbias: PortableBackward | None = None
    shared_bias: HopperSharedBias | None = None


@dataclass(frozen=True, slots=True)
class HopperBackward256:
    """Gluon backward for SM 9.0, head dimensions 129 to 256: dk/dv programs own `block_n` keys, dq ones 128 queries."""

    block_m: int
    block_n: int
    heads_per_group: int  # few enough for L2, more where SMs would idle at the end; longest blocks first
    dbias: PortableBackward | None = None  # for the gradient of a bias with queries, and the same on SM 9.0
    shared_bias: HopperSharedBias | None = None


@dataclass(frozen=True, slots=True)
class Whole:
    """Plain torch operations (`reference.py`) and the C++ kernels (`csrc/cpu`, whose tiles are those of the masks)."""

    block_m: int = 128
    block_n: int = 128


Config = (
    DecodeForward
    | PortableForward
    | PortableBackward
    | AmpereForward
    | AmpereBackward
    | HopperForward
    | HopperBackward
    | HopperBackward256
    | Whole
)


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: look-ups would hash all fields of a hundred rows
class Row:
    """One launch configuration and what it is for. Rows are tried in order: the first that suits is taken."""

    sm: int  # the architecture it was made for; newer ones without rows of their own use it too
    dim: int  # widest head dimension
    itemsize: int  # widest element in bytes
    min_seqlen: int  # fewest keys
    tier: str
    kernel: str
    config: Config
    shared_memory: int = 0  # bytes of a block
    evidence: str = ""
    few_tiles: bool = False  # for calls with fewer tiles of 128 queries than there are multiprocessors, and only those
    one_query: bool = False  # for calls with one query of each head, and only those
    dim_v: int = 0  # widest head dimension of values, where that is narrower than `dim`
    full_bias: bool = False  # for calls with a bias with queries, and only those

    @property
    def name(self) -> str:
        """A short name for reasons and tables."""
        widths = f"D <= {self.dim}, Dv <= {self.dim_v}" if self.dim_v else f"D <= {self.dim}"
        return f"{self.kernel} {self.tier} {self.config.block_m}x{self.config.block_n} ({widths})"
