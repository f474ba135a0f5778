"""Commands that read or end existing runs."""
