"""How much attention keys get: probabilities, summed over chosen blocks, over queries and over the heads of a group.

Two launchers write them, with the same arguments: `dmattn_ops.kernels.mass.launch` (Triton) and
`dmattn_ops.kernels.mass.reference` (plain torch, in chunks of queries). Both compute scores in float32, or in float64 where the
inputs are, and never a whole `[Sq, Sk]` of them.

    selection_mass(choice: Selection, mass) -> None
    key_mass(call: Call, statistics: Statistics | None, mass) -> None

`Selection` and `Statistics` are those of `dmattn_ops.masks.chosen`; plain torch finds statistics by itself.
"""
