"""Wire protocol version 2: gradient server and worker client (C-WIRE-002)."""
