"""The control plane: the coordinator of a run and its clients."""
