"""A folder per device: its heap, its stream and its kernels, under the same names everywhere."""
