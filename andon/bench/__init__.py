"""Benchmarks that a user can repeat."""
