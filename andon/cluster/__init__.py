"""Processes: how the coordinator and the workers are started."""
