"""Workers that come and go."""
