"""Workers on several machines: ring and star over TCP."""
