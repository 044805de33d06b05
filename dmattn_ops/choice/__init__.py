"""Which kernel would run, with which configuration: architectures, rows, blocks, epochs, measured configurations."""
