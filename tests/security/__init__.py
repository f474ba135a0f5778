"""Peers that nobody invited."""
