"""One run: its loop, folder, events and plan."""
