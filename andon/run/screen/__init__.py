"""What a person sees of a run in the terminal."""
