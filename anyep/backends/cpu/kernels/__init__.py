"""The CPU's kernels, compiled by Numba.

They access memory through addresses (int64) and arrays, never raise and never block for long: a kernel that
has to wait returns after a short while and reports what is still missing; its caller decides whether to
continue.
"""
