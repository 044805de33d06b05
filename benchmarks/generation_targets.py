"""What generation is meant to reach, and where a result file of `bench_generation.py` says it."""

from __future__ import annotations

from dynamic_targets import Target, value_of

TARGETS = (
    Target("a step at 131072 positions over our full-cache decoding", 30, 45, value_of("step", "B16", "over_full")),
    Target("the same over SDPA with a full cache", 25, 40, value_of("step", "B16", "over_sdpa")),
    Target("full-cache decoding, B16, share of copy speed", 0.95, 0.98, value_of("full", "B16", "share_of_copy")),
    Target(
        "a prompt in chunks over one call, CUDA graphs",
        1.25,
        1.1,
        value_of("prompt", "B1", "chunks_ratio"),
        at_most=True,
    ),
    Target("the same in eager mode", 1.25, 1.1, value_of("prompt", "B1", "chunks_ratio_eager"), at_most=True),
    *(
        Target(
            f"batch-invariant {part} over plain, {words}", 1.1, 1.06, value_of("invariant", words, field), at_most=True
        )
        for words, part, field in (
            ("S4096", "forward", "forward_ratio"),
            ("S4096", "forward and backward", "ratio"),
            ("S8192", "forward and backward", "ratio"),
        )
    ),
    *(
        Target(
            f"batch-invariant decoding over plain, {batch}",
            1.3,
            1.1,
            value_of("full", batch, "invariant_ratio"),
            at_most=True,
        )
        for batch in ("B1", "B16")
    ),
)
