"""Lists and bits of masks on a GPU."""
