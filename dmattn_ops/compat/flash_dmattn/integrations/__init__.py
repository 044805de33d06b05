"""The attention function of flash_dmattn 1.2.2 for models of transformers. It needs no transformers here."""
