"""Text to tokens to batches: the corpus, its tokenizer and its shards on disk."""
