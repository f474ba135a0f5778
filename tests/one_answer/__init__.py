"""Values and bits: plain PyTorch's numbers, one digest for every setting and processor."""
