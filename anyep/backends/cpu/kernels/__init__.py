"""The CPU's kernels, compiled by Numba.

They see memory as addresses (int64) and arrays, never raise and never block for long: a kernel that has to
wait returns what it still waits for after a short while, and its caller decides whether to go on.
"""
