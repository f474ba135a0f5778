"""Generations: who takes part, and how one generation succeeds another."""
