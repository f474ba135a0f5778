"""Version 2 of the wire protocol."""
