"""The other commands, and what the terminal shows."""
