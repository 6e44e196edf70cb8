"""The GPU's kernels, compiled by Triton."""
