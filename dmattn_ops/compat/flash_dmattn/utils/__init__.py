"""Masks and padding of flash_dmattn 1.2.2."""
