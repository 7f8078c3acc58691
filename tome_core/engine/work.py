"""Work: the multiplications of matrix products, by shapes alone, of what merges and of what merging costs.

A machine that waits for multiplications takes a time in proportion to them. Sums, norms, softmax and copies are not
counted. All results are of one sample.
"""

from __future__ import annotations

from functools import cache

from ..attention.correction import PENALTY, block_of, count_answers, inverse_steps
from ..merging.grid import Grid, Layout, cell_of, tokens_in, windows
from ..merging.methods import METHODS
from ..merging.methods.cluster import ITERATIONS
from ..settings.config import MergeRule
from .merged_tokens import RIDGE


def of_attention(queries: int, keys: int, channels: int) -> int:
    """Return the work of an attention of so many `channels`, all heads together: queries by keys, weights by values."""
    return 2 * queries * keys * channels


@cache
def of_match(
    rule: MergeRule, grid: Grid, groups: int, features: int, is_renewed: bool = False, in_one_window: bool = False
) -> int:
    """Return the work of matching a grid's tokens, each compared by so many `features`, into `groups` by a rule.

    A match that `is_renewed` adapts an earlier one by a single step of k-means. tomesd matches `in_one_window`.
    """
    work, tokens = 0, grid.height * grid.width
    for window in [grid] if in_one_window else [window for _, window in windows(grid)]:
        there = window.height * window.width
        of_step = there * (groups * there // tokens)  # each token with each group's mean
        if not METHODS[rule.method].keeps_cells:
            work += ITERATIONS * of_step
        elif is_renewed:
            work += of_step
        else:
            st, sy, sx = cell_of(rule.sy, rule.sx, window.frames)
            work += there * (there // (st * sy * sx)) + rule.refine * of_step
    return work * features


def groups_of(rule: MergeRule, grid: Grid) -> int:
    """Return the number of groups into which a rule merges a grid's tokens."""
    left = 0
    for _, window in windows(grid):
        there = window.height * window.width
        left += there - int(there * rule.effective_ratio)
    return left


@cache
def of_fit(answers: int, tokens: int, groups: int, heads: int, width: int) -> int:
    """Return the work of fitting a correction to so many exact `answers`, for heads of `width` channels."""
    answered = of_attention(answers, tokens + groups, width)
    first_order, unknowns = tokens * width**2, 2 * block_of(width)
    solved = answers * width * (width + 3 * unknowns) + width * unknowns**2
    told = answers * width * 3 * unknowns  # its own error
    inverted = 4 * inverse_steps(PENALTY * unknowns / answers, unknowns) * width * unknowns**2
    return heads * (answered + first_order + solved + told + inverted)


def of_correction(tokens: int, heads: int, width: int) -> int:
    """Return the work of adding a correction to so many outputs."""
    return 2 * heads * tokens * width**2


@cache
def of_way_back(tokens: int, samples: int, channels: int) -> int:
    """Return the work by which a stretch's tokens come back, corrected by so many `samples`; 0 without samples."""
    if not samples:
        return 0
    inverted = 2 * inverse_steps(RIDGE, samples) * samples**3
    return 2 * samples * channels * (samples + tokens) + inverted


@cache
def pays_in_part(rule: MergeRule, grid: Grid, channels: int, weights: int) -> bool:
    """Tell whether a part of a block saves more work than a match of the block's input costs, as tomesd merges.

    `weights` is the number by which each of the part's tokens is multiplied, 0 if it is not known. Self-attention
    always pays; parts without it share the match.
    """
    tokens = grid.height * grid.width
    groups = tokens - int(tokens * rule.effective_ratio)
    saved = (tokens - groups) * weights * (rule.merge_crossattn + rule.merge_mlp)
    return rule.merge_attn or not weights or of_match(rule, grid, groups, channels, in_one_window=True) < saved


@cache
def pays(
    rule: MergeRule, layout: Layout, tokens: int, heads: int, width: int, features: int, corrects: bool, serves: bool
) -> bool:
    """Tell whether a rule saves more work in a self-attention over a sequence of `tokens` than merging costs.

    Args:
        rule: how it merges.
        layout: the place of the picture's tokens.
        tokens: all tokens of the sequence.
        heads: number of heads.
        width: channels of a head.
        features: numbers of a token that a match compares.
        corrects: whether a correction is fitted.
        serves: whether a match serves more than one step.
    """
    picture = tokens_in(layout)
    groups = groups_of(rule, layout.grid) + tokens - picture
    queries, channels = groups if rule.side == "qkv" else tokens, heads * width
    saved = of_attention(tokens, tokens, channels) - of_attention(queries, groups, channels)
    once = of_match(rule, layout.grid, groups, features)
    if corrects:
        once += of_fit(count_answers(picture, width), tokens, groups, heads, width)
        saved -= of_correction(queries, heads, width)
    return once / (2 if serves else 1) < saved
