"""What only GPUs run: compiled blocks, products that write gradients once, triton kernels."""
