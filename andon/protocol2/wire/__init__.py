"""The wire format of protocol 2: its messages, and which of them comes next."""
