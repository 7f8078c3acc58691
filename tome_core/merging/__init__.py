"""Tensors in, a map out: which tokens merge, and the kernels that find and apply it."""
