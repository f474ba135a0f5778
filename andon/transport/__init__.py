"""Groups of ranks, and the transports over which they exchange."""
