"""Lifetimes of keys in Triton; the launcher is `launch.lifetimes`."""
