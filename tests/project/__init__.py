"""The repository: its architecture, documents, wheel and list of faults."""
