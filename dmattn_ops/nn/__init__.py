"""Layers: attention whose mask is learned (`dynamic`), or whose keys an indexer chooses (`indexed`)."""

from dmattn_ops.nn.dynamic import DynamicMaskAttention, KeyScores
from dmattn_ops.nn.indexed import IndexedAttention, LightningIndexer

__all__ = ["DynamicMaskAttention", "IndexedAttention", "KeyScores", "LightningIndexer"]
