"""Groups and their transports."""
