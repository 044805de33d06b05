"""A step of a cache of kept keys: one position is appended to each sequence, and the worst key leaves the best.

Two launchers do it, with the same arguments: `dmattn_ops.kernels.kept.launch` (Triton) and `dmattn_ops.kernels.kept.reference`
(plain torch). Both change the cache to the same bits.

    keep_step(stored: Stored, token: Token, rule: Rule, seen) -> None

`Stored`, `Token` and `Rule` are those of `dmattn_ops.masks.kept`; `seen`, int32 `[B, Hkv, N]`, becomes 1 where the query at the new
position sees the key of a slot, else 0.
"""
