"""Merging of tokens: methods that choose the groups of tokens, and operations and kernels that apply them."""
