"""Optimizers and learning-rate schedules over flat arenas."""
