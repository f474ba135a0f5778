"""The command line."""

from andon.cli.main import app, main

__all__ = ["app", "main"]
