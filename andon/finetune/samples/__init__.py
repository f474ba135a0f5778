"""The samples of a fine-tuning: rows, tokens, batches."""
