"""Imported by servers that ranks are forked from: what is loaded here, the ranks need not load themselves."""

from anyep.backends.cpu.compilation import load_kernels

load_kernels()
