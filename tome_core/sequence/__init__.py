"""Merging in transformers, whose attention is over a sequence: text beside a picture's or a film's grid of tokens."""

from .attend import Host
from .handle import SequenceMerging
from .layout import BY_HEAD, BY_TOKEN, FLAT, Layout, by_token, in_form

__all__ = ["BY_HEAD", "BY_TOKEN", "FLAT", "Host", "Layout", "SequenceMerging", "by_token", "in_form"]
