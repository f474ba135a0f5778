"""The model and its kernels."""
