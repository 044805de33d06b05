"""The place that `TileMask` had: files that hold one, written by torch.save or pickle, name it so."""

from dmattn_ops.masks.tile_mask import TileMask as TileMask
