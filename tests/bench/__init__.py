"""Benchmarks, and comparisons of two commits."""
