"""The operators on real tensors: they choose a kernel, run it, and do what it does not do (sinks)."""
