"""The SM 9.0 forward."""
