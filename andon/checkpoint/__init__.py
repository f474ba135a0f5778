"""Checkpoints: what loads was verified."""
