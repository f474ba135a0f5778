"""The samples of a fine-tuning run: rows, tokens, batches."""
