"""Commands that do not train."""
