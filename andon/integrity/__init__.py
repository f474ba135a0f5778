"""What stops the line: halts and fingerprints."""
