"""A checkpoint on disk: its files, its manifest, its folder, and the list of checkpoints."""
