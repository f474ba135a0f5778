"""A worker's end of the control link."""
