"""Checkpoints: only what was verified is loaded."""
