"""NVIDIA GPUs: kernels compiled by Triton."""
