"""Generations: which workers take part, and how one generation succeeds another."""
