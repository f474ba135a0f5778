"""Workers, coordinators and launchers."""
