"""A config in words: what a report says of each rule, and what somebody should know of them before anything runs."""

from __future__ import annotations

from dataclasses import replace

from ..merging.methods import METHODS
from .config import MergeConfig
from .phases import HIGHEST_EARLY_RATIO
from .rule import MergeRule


def describe(config: MergeConfig, rule: MergeRule) -> str:
    """One of the config's rules, with what the config adds to it."""
    if replace(config, rules=(rule,)).is_off:
        return "off"
    parts = [("attention", rule.merge_attn), ("cross-attention", rule.merge_crossattn), ("MLP", rule.merge_mlp)]
    where = ", ".join(name for name, on in parts if on)
    text = f"{rule.method} {rule.effective_ratio:.0%} of {rule.effective_side} in {where}"
    if rule.merge_attn and rule.is_proportional:
        text += ", proportional attention"
    if config.early_ratio is not None:
        text += f", {config.early_ratio:.0%} down to timestep {config.early_until:g}"
    limits = []
    if config.start_percent > 0 or config.end_percent < 1:
        limits.append(f"{config.start_percent:.0%} to {config.end_percent:.0%} of the schedule")
    if rule.min_timestep is not None:
        limits.append(f"timesteps from {rule.min_timestep:g} up")
    if config.max_beta is not None:
        limits.append(f"beta below {config.max_beta:g}")
    return text + (f", {', '.join(limits)}" if limits else "")


def notes_on(config: MergeConfig, covered: list[bool], downsamples: list[int]) -> tuple[str, ...]:
    """What is clamped, and that nothing merges. covered: by level, whether any rule merges there at some time."""
    notes = [f"ratio {rule.ratio:g} is over the cap {rule.ratio_cap:g} of cells {rule.sx}x{rule.sy} and was clamped; "
             "larger cells (sx, sy) allow more"
             for rule in config.rules if METHODS[rule.method].uses_ratio and rule.ratio > rule.ratio_cap]  # fmt: skip
    if config.early_ratio is not None and config.early_ratio > HIGHEST_EARLY_RATIO:
        notes.append(f"early_ratio {config.early_ratio:g} is over the cap {HIGHEST_EARLY_RATIO:g} and was clamped")
    if not any(covered) and not config.is_off:
        have = ", ".join(f"/{d}" for d in downsamples)
        notes.append(f"nothing will merge: no rule reaches a level of this model, whose attention is at {have} of the "
                     "latent; leave max_downsample at None for the finest of them")
    return tuple(notes)
