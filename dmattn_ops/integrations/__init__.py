"""Adapters for libraries that call attention: `dmattn_ops.integrations.transformers`."""
