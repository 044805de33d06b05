"""Positions are appended to a cache of kept keys: one in a step, several in a chunk.

Launchers with the same arguments do it, with Triton (`launch`, `chunk_launch`) and with plain torch operations (`reference`,
`chunk_reference`). They change the cache to the same bits. The kernels of a chunk take neither padding nor documents.

    keep_step(stored: Stored, token: Token, rule: Rule, seen) -> None
    keep_chunk(stored: Stored, token: Token, rule: Rule, appended: Appended) -> None

The records are those of `dmattn_ops.masks.kept`; `seen`, int32 `[B, Hkv, N]`, becomes 1 where the query at the new position
sees the key of a slot, else 0.
"""
