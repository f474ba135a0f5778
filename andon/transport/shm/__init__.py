"""Workers of one machine: shared memory."""
