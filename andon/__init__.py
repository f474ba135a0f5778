"""Andon: data-parallel pretraining that stops the line."""

__version__ = "0.1.0"
