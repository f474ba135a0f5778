"""Groups: who exchanges, and the transports that carry it."""
