"""Text to tokens to batches: the corpus, its tokenizer, its shards on disk."""
