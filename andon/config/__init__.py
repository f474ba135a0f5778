"""The configuration: its keys, its presets and how it is read."""
