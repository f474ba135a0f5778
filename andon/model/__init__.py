"""The model: a Llama-shaped decoder that knows nothing of ranks."""
