"""Merging in diffusers' transformers (Flux, SD3, Qwen-Image, Z-Image, Lumina 2, Wan and others), in place."""

from .arguments import arguments_of
from .families import NAMES, Tokens, family_of, find_transformers
from .handle import TransformerPatch, handle_on

__all__ = ["NAMES", "Tokens", "TransformerPatch", "arguments_of", "family_of", "find_transformers", "handle_on"]
