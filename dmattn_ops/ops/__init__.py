"""The operators `torch.ops.dmattn.*` for torch: schemas, derivatives, vmap, operation counts, private names of torch."""
