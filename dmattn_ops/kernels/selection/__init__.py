"""From scores to the queries that see each key: what a dynamic mask keeps, as one interval a key.

Query i sees key j iff (causal) `j <= i`, both lie in one document, and at least one of these holds: j is among the `keep`
best keys of the document up to i; `i - j < keep_last`; j is one of the `keep_first` first keys of the document. Keys that
the last two show count among the best as any other. A higher score is better, of equal scores the earlier key; -0 equals
0, and NaNs are equal to each other and worse than everything else. Not causal: every query of a document sees its `keep`
best and its `keep_first` first keys.

The queries that see a key are neighbours. Let its death be the first query i, not before j, at which `keep` keys of the
document up to i are better than j. Causal, key j is seen from j to its death (or `j + keep_last`, or the end of the
document, where that is later and allowed). So the whole mask is two integers a key.

Three modules write them, with the same arguments and exactly the same results: `dmattn_ops.kernels.native` (C++, a heap),
`dmattn_ops.kernels.selection.launch` (Triton) and `dmattn_ops.kernels.selection.reference` (plain torch).

    lifetimes(scores, documents, keep, keep_first, keep_last, is_causal, start, end) -> None

- `scores` `[B or 1, Hm, S]`, any of float16, bfloat16, float32, float64, compared as they are.
- `documents` `[B or 1, S]`, integers of any width, or None. A document is a run of equal ids.
- `keep`, `keep_first`, `keep_last`: not negative; `keep_last` is 0 unless `is_causal`.
- `start`, `end` `[B, Hm, S]`, int32, contiguous, uninitialised, written completely. Where a key is never seen, both are j
  (causal), or the first key of its document (not causal).
"""
