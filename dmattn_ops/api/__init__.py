"""The public functions: how they read their arguments, repeat their calls, and say what would run."""
