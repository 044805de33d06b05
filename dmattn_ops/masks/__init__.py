"""Masks: how they are made of what users give, what a TileMask holds, and the layout of its tensors."""
