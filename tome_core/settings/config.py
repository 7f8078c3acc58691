"""What to merge, where and when: rules, and what holds for all of them; frozen, and checked when it is built.

The form of all hosts and the table of docs/settings.md are made from the fields. What is a setting of the whole,
`Clock` and `plain_rules` make into what rules can say.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from ..merging.methods import METHODS
from .rule import MergeRule
from .setting import check, setting

EARLY_CELLS = (2, 4, 8)  # sides, of which an early phase takes the smallest whose cap allows its ratio
_HIGHEST_EARLY_RATIO = 1 - 1 / EARLY_CELLS[-1] ** 2


@dataclass(frozen=True, init=False)
class MergeConfig:
    """Rules, in order; the first that fits a block, a part of it and a time is the one that counts. And what holds for
    all of them: a part of the noise schedule, and an early phase.

    Flat keywords are settings of both kinds. Those of a rule make one, or are set in each of ``rules``, so that
    `dataclasses.replace` takes them, too:

    >>> MergeConfig(ratio=0.5).rules == (MergeRule(ratio=0.5),)
    True
    >>> early, late = MergeRule(ratio=0.75, min_timestep=600), MergeRule(ratio=0.25)
    >>> [rule.ratio for rule in MergeConfig(rules=(early, late), seed=5, end_percent=0.9).rules]
    [0.75, 0.25]
    """

    rules: tuple[MergeRule, ...]
    start_percent: float = setting(
        0.0, "Start", "When merging starts, as a share of the noise schedule (0 is pure noise, the first step).",
        minimum=0.0, maximum=1.0, step=0.01, place=2, known_as="start", beside_strength=True,
    )
    end_percent: float = setting(
        1.0, "End", "When merging ends, as a share of the noise schedule (1 is the finished picture).",
        minimum=0.0, maximum=1.0, step=0.01, place=3, known_as="end", beside_strength=True,
    )
    max_beta: float | None = setting(
        None, "Noise threshold", "Merge only while beta_t, the noise added by one training step, is below this. "
        "Stable Diffusion's betas end at 0.012, so 0.2 is always on.",
        minimum=0.0, maximum=1.0, step=0.001, unset="no limit", advanced=True,
    )
    early_ratio: float | None = setting(
        None, "Early ratio", "Another ratio of self-attention for the early, noisy steps, which bear far more, at the "
        "finest level that merges. Cells are made as large as it needs, up to 8x8, and from 0.9 on the match is "
        "refined.",
        minimum=0.0, maximum=1.0, step=0.05, unset="the same", place=13,
    )
    early_until: float = setting(
        500.0, "Early until timestep", "The early phase is every step at this timestep or a higher one: 1000 is pure "
        "noise, 0 the finished picture. In a pass that begins below 850, such as a hires pass, and in one of at most "
        "8 steps it ends where the same share of the pass's steps is left.", minimum=0.0, maximum=1000.0, step=10.0,
        advanced=True, place=14,
    )

    def __init__(self, *, rules: tuple[MergeRule, ...] | None = None, **flat: Any) -> None:
        of_a_rule = {name: value for name, value in flat.items() if name not in _OF_A_CONFIG}
        unknown = set(of_a_rule) - {item.name for item in fields(MergeRule)}
        if unknown:
            known = ", ".join(one["name"] for one in describe_settings())
            text = f"unknown setting {', '.join(sorted(unknown))}; there are: {known}"
            strength = "; a strength is `tome_core.strength(0.5)` or `patch(pipe, strength=0.5)`"
            raise TypeError(text + (strength if "strength" in unknown else ""))
        if rules is None:
            rules = (MergeRule(**of_a_rule),)
        elif not isinstance(rules, (list, tuple)) or not all(isinstance(rule, MergeRule) for rule in rules):
            raise TypeError(f"rules is {rules!r}; it has to be a list or tuple of MergeRule")
        elif of_a_rule:
            rules = tuple(replace(rule, **of_a_rule) for rule in rules)
        if not rules:
            raise ValueError("rules=() merges nothing; give one rule or more, or do without the patch")
        object.__setattr__(self, "rules", tuple(rules))
        for item in fields(self)[1:]:
            object.__setattr__(self, item.name, check(item, flat.get(item.name, item.default)))
        if self.start_percent > self.end_percent:
            raise ValueError(f"start_percent={self.start_percent!r} lies after end_percent={self.end_percent!r}; "
                             "swap them")
        method = next((rule.method for rule in self.rules if not METHODS[rule.method].uses_ratio), None)
        if self.early_ratio is not None and method is not None:
            raise ValueError(f"early_ratio={self.early_ratio!r} is not used by method={method!r}, whose ratio follows "
                             "from sx and sy; leave it at None")

    def value(self, name: str) -> Any:
        """A setting's value; of a rule's, the first one's. Raises AttributeError for what is no setting."""
        return getattr(self if name in _OF_A_CONFIG else self.rules[0], name)

    @property
    def is_off(self) -> bool:
        """True where nothing can merge."""
        early = self.early_ratio and any(rule.merge_attn for rule in self.rules)
        return not early and all(rule.is_off for rule in self.rules)

    @property
    def uses_percent(self) -> bool:
        """True where merging is limited to a part of the model's own noise schedule."""
        return self.start_percent > 0 or self.end_percent < 1 or self.max_beta is not None


_OF_A_CONFIG = tuple(item.name for item in fields(MergeConfig)[1:])


def describe_settings() -> list[dict[str, Any]]:
    """What there is to set: one dict a field of `MergeRule`, then one for each other keyword of `MergeConfig`.

    Keys: name, default, label, help, and where they apply minimum, maximum, step, choices, advanced, unset (what
    None means, else "automatic"). The maximum is a user interface's and the engine's; where `limit` is given, that is
    the engine's, and where `open_ended` is, it has none. Others are the form's, see `form`.
    """
    return [{"name": item.name, "default": item.default, **item.metadata}
            for item in (*fields(MergeRule), *fields(MergeConfig)[1:])]  # fmt: skip


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
    if config.early_ratio is not None and config.early_ratio > _HIGHEST_EARLY_RATIO:
        notes.append(f"early_ratio {config.early_ratio:g} is over the cap {_HIGHEST_EARLY_RATIO:g} and was clamped")
    if not any(covered) and not config.is_off:
        have = ", ".join(f"/{d}" for d in downsamples)
        notes.append(f"nothing will merge: no rule reaches a level of this model, whose attention is at {have} of the "
                     "latent; leave max_downsample at None for the finest of them")
    return tuple(notes)
