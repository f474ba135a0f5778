"""Processes: the coordinator, the workers, and how they are started."""
