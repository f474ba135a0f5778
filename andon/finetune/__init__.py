"""Fine-tuning of Hugging Face models: LoRA adapters, or all weights."""
