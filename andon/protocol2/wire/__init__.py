"""What is said in protocol 2: messages, and which of them comes next."""
