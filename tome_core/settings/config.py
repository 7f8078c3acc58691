"""What to merge, where and when: frozen settings, checked when they are built.

Every field carries its own label, help, range and step: the form of all hosts and the settings table of the README are
made from them. A rule's times are Stable Diffusion's timesteps. Shares of the schedule, its betas, an early phase and
deep MLPs are settings of the whole: `Clock` and `plain_rules` make of them what rules can say.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from ..merging.methods import METHODS
from ..merging.methods.cluster import CLUSTER_ON
from ..merging.metric import METRICS
from .setting import checked, one_of, setting

SIDES = ("qkv", "kv")
DOWNSAMPLES = (1, 2, 4, 8)
SEED_LIMIT = 2**31 - 1
# more is a slip of the hand: one token kept of 4096, the latent of a picture 8192 pixels wide, and more channels than
# keys and values of any Stable Diffusion have together
_LARGEST_CELL = 64


@dataclass(frozen=True)
class MergeRule:
    """One rule: what is merged, in which blocks, at which times.

    >>> MergeRule(ratio=0.9).effective_ratio  # over the cap 1 - 1/(sx*sy) of bipartite matching
    0.75
    """

    method: str = setting(
        "bipartite", "Method",
        "How tokens are matched: " + "; ".join(f"{m.name}: {m.summary}" for m in METHODS.values()),
        choices=tuple(METHODS),
        place=5,
    )
    ratio: float = setting(
        0.5, "Ratio", "Share of tokens that are merged away. 0 is off. Bipartite matching can reach "
        "1 - 1/(sx*sy); more is clamped and reported. Not used by downsample, where it follows from sx and sy. The "
        "early ratio and both MLP ratios count beside 0 as well.",
        minimum=0.0, maximum=1.0, step=0.05,
        place=0,
    )
    sx: int = setting(
        2, "Stride x", "Width in tokens of the cell that keeps one destination; downsample: the factor.",
        minimum=1, maximum=8, step=1, limit=_LARGEST_CELL, advanced=True,
        place=9,
    )
    sy: int = setting(
        2, "Stride y", "Height in tokens of the cell that keeps one destination; downsample: the factor.",
        minimum=1, maximum=8, step=1, limit=_LARGEST_CELL, advanced=True,
        place=10,
    )
    use_rand: bool = setting(
        True, "Random destinations", "Draw each cell's destination anew at every step (from the seed, so equal "
        "seeds give equal pictures) instead of always taking the top left token.", advanced=True,
        place=11,
    )
    seed: int = setting(
        0, "Seed", "What the random destinations are drawn from; nothing else depends on it.",
        minimum=0, maximum=SEED_LIMIT, step=1, advanced=True,
        place=12, known_as="merge_seed", beside_strength=True,
    )
    merge_attn: bool = setting(
        True, "Self-attention", "Merge in self-attention, where nearly all of the gain is.", advanced=True
    )
    merge_crossattn: bool = setting(
        False, "Cross-attention", "Merge in the attention to the prompt as well. Rarely worth its damage.",
        advanced=True,
        place=7,
    )
    merge_mlp: bool = setting(
        False, "MLP", "Merge in the feed-forward layer as well. Costs much detail in late steps.", advanced=True,
        place=8,
    )
    side: str | None = setting(
        None, "Merge what", "What of self-attention is merged: q+k+v (queries, keys and values) or k+v (every query is "
        "kept). Automatic is the method's own: k+v for downsample, else q+k+v.",
        choices=(None, *SIDES), shown=("automatic", *("+".join(side) for side in SIDES)), advanced=True,
        place=6, known_as="merge_what",
    )
    levels: tuple[int, ...] | None = setting(
        None, "Levels", "Instead of max_downsample: which resolutions of the UNet, counting those that have "
        "attention, the finest is 0. Automatic is the finest: 64x64 tokens on SD1.5 at 512 px, and on SDXL at 1024 px.",
        advanced=True,
    )
    max_downsample: int | None = setting(
        None, "Level", "Which resolutions of the UNet merge. Automatic is the finest that has attention: 64x64 tokens "
        "on SD1.5 at 512 px, 32x32 on SDXL. Up to /2 is every block down-sampled at most twofold from the latent, and "
        "so on, as in tomesd; up to /1 reaches nothing on SDXL.",
        choices=(None, *DOWNSAMPLES), shown=("automatic", *(f"up to /{one}" for one in DOWNSAMPLES)), advanced=True,
        place=1, known_as="level",
    )
    min_timestep: float | None = setting(
        None, "Lowest timestep", "Merge only at timesteps of at least this. Known even on a bare UNet.",
        minimum=0.0, maximum=1000.0, step=1.0, unset="no limit", advanced=True, open_ended=True,
    )
    max_timestep: float | None = setting(
        None, "Highest timestep", "Merge only at timesteps of at most this. Known even on a bare UNet.",
        minimum=0.0, maximum=1000.0, step=1.0, unset="no limit", advanced=True, open_ended=True,
    )
    min_pixels: int = setting(
        0, "Smallest picture", "Merge only in pictures of at least this many pixels, width times height (512x512 is "
        "262144, 1024x1024 is 1048576), counting a latent's token as 8x8. 0 is every picture. Leaves a first pass "
        "alone and serves the high-resolution one.",
        minimum=0, maximum=16777216, step=65536, open_ended=True,
        place=4, beside_strength=True,
    )
    cluster_on: str = setting(
        "tokens", "Cluster on",
        "What the method cluster compares: the tokens, or their similarity to the image's mean.",
        choices=CLUSTER_ON, advanced=True,
    )
    proportional: bool = setting(
        True, "Size-aware keys", "Let a merged key of self-attention weigh as much as the tokens it stands for, by "
        "adding the logarithm of their number to its logit. Less error at the same cost, and what makes strong "
        "merging of keys and values possible. Off is tomesd's way.", advanced=True,
        place=15,
    )
    correction: bool = setting(
        True, "Correction", "Give back what merged keys and values lose: to first order, and what a few exact answers "
        "tell besides. Made at a match and kept with it; less than half the error at the same work. Where keys and "
        "values alone are merged, or a match compares them.", advanced=True,
    )
    refine: int = setting(
        0, "Refinement", "k-means steps after the match: every token goes to the nearest of the merged ones. Each "
        "costs as much as a match; worth it for strong merging of keys and values. Used by bipartite. A match that is "
        "kept over steps is renewed by one such step.",
        minimum=0, maximum=3, step=1, advanced=True,
        place=17,
    )
    query_ratio: float = setting(
        0.0, "Query ratio", "Where keys and values are merged: share of the queries that is merged beside them, by a "
        "match of their own in 2x2 cells, so 0.75 at most. 0 keeps every query.",
        minimum=0.0, maximum=0.75, step=0.05, advanced=True,
        place=18,
    )
    metric: str = setting(
        "input", "Compare", "What a match compares: input (the block's input, by cosine, as tomesd does), keys, "
        "or keys+values (by distance). The last is the most exact, and costs two projections. Used by bipartite.",
        choices=METRICS, advanced=True,
        place=16,
    )
    keep: float = setting(
        0.0, "Keep a match for", "How many timesteps (of 1000) a block's match goes on serving the following steps. "
        "With 20 sampling steps one is 50. A kept match serves both halves of guidance, too. 0 matches anew at every "
        "step. Needs a host or a pipeline that says which steps belong to one picture.",
        minimum=0.0, maximum=1000.0, step=10.0, advanced=True,
        place=19,
    )
    only_if_it_pays: bool = setting(
        False, "Only where it pays", "Merge only where that saves time: as measured, where this model, size and device "
        "were (measure), else as the number of tokens and the kind of device suggest.", advanced=True,
        place=20,
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value = checked(item, getattr(self, item.name))
            object.__setattr__(self, item.name, value)
        self._check_combination()
        object.__setattr__(self, "ratio_text", repr(self.effective_ratio))
        own = [name for name in _OF_A_MATCH if name != "seed" or self.use_rand]
        object.__setattr__(self, "match_text", repr({name: getattr(self, name) for name in own}))

    def _check_combination(self) -> None:
        method = METHODS[self.method]
        if self.side is not None and self.side not in method.sides:
            raise ValueError(
                f"side={self.side!r} is not possible with method={self.method!r}; use {one_of(method.sides)}"
            )
        if method.mode == "pick" and (self.merge_crossattn or self.merge_mlp):
            raise ValueError(
                f"method={self.method!r} keeps every query, so it cannot merge_crossattn or merge_mlp; "
                "set both to False, or add a second rule with another method"
            )
        self._check_sides()
        if self.levels is not None and self.max_downsample is not None:
            raise ValueError(
                f"levels={self.levels!r} and max_downsample={self.max_downsample!r} both choose the blocks; "
                "give one of them"
            )
        first, last = self.min_timestep, self.max_timestep
        if first is not None and last is not None and first > last:
            raise ValueError(f"min_timestep={first!r} lies after max_timestep={last!r}; swap them")

    def _check_sides(self) -> None:
        if self.refine and not self.proportional and self.merge_attn:
            raise ValueError(
                f"refine={self.refine!r} may leave groups without tokens, which only keys that know their sizes can "
                "be; set proportional to True, or use refine=0"
            )
        if self.query_ratio and self.effective_side != "kv":
            raise ValueError(
                f"query_ratio={self.query_ratio!r} merges queries beside side='kv'; use that side, or query_ratio=0"
            )

    @property
    def effective_side(self) -> str:
        """The side that is merged: the one given, else the method's own."""
        return self.side or METHODS[self.method].sides[0]

    @property
    def ratio_cap(self) -> float:
        """The highest ratio the settings allow: ``1 - 1/(sx*sy)`` where every cell keeps a destination."""
        return 1.0 - 1.0 / (self.sx * self.sy) if METHODS[self.method].keeps_cells else 1.0

    @property
    def effective_ratio(self) -> float:
        """The ratio in force: clamped to the cap, or the one that follows from the cell size."""
        return min(self.ratio, self.ratio_cap) if METHODS[self.method].uses_ratio else self.ratio_cap

    @property
    def constant_ratio(self) -> float:
        """The ratio in force, for use inside compiled models.

        From a text, because compilers of torch 2.4 take a number that differs from the last graph's for a variable,
        and fail where it is multiplied with a size.
        """
        return float(self.ratio_text)

    @property
    def is_off(self) -> bool:
        """True where the rule can merge nothing."""
        return self.effective_ratio == 0 or not (self.merge_attn or self.merge_crossattn or self.merge_mlp)

    @property
    def sizes_keys(self) -> bool:
        """True where merged keys are to know their sizes: not where all groups are alike."""
        return self.proportional and METHODS[self.method].mode == "mean"

    @property
    def corrects(self) -> bool:
        """True where merged keys and values get their correction, which needs those of all tokens.

        These are at hand where a match compares them; elsewhere making them pays where every query is kept.
        """
        at_hand = self.metric == "keys+values" and METHODS[self.method].compares
        return self.correction and self.sizes_keys and (self.effective_side == "kv" or at_hand)

    @property
    def uses_time(self) -> bool:
        """True where the rule does not hold at all times."""
        return self.min_timestep is not None or self.max_timestep is not None


@dataclass(frozen=True, init=False)
class MergeConfig:
    """Rules, in order; the first that fits a block, a part of it and a time is the one that counts. And what holds for
    all of them: a part of the noise schedule, an early phase, a ratio for deep MLPs.

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
        minimum=0.0, maximum=1.0, step=0.01,
        place=2, known_as="start", beside_strength=True,
    )
    end_percent: float = setting(
        1.0, "End", "When merging ends, as a share of the noise schedule (1 is the finished picture).",
        minimum=0.0, maximum=1.0, step=0.01,
        place=3, known_as="end", beside_strength=True,
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
        minimum=0.0, maximum=1.0, step=0.05, unset="the same",
        place=13,
    )
    early_until: float = setting(
        500.0, "Early until timestep", "The early phase is every step at this timestep or a higher one: 1000 is pure "
        "noise, 0 the finished picture. In a pass that begins below 900, such as a hires pass, it ends where the same "
        "share of the pass's steps is left.", minimum=0.0, maximum=1000.0, step=10.0, advanced=True,
        place=14,
    )
    deep_mlp: float = setting(
        0.0, "Deep MLP ratio", "Merge this share of the tokens in the feed-forward layer too, below timestep 500, "
        "in blocks at half of the latent's resolution or less, where it does little harm: all of SDXL's, and of "
        "SD1.5's those beyond the finest, where the level setting reaches them.",
        minimum=0.0, maximum=0.75, step=0.05, advanced=True,
        place=21,
    )

    def __init__(self, *, rules: tuple[MergeRule, ...] | None = None, **flat: Any) -> None:
        of_a_rule = {name: value for name, value in flat.items() if name not in _OF_A_CONFIG}
        unknown = set(of_a_rule) - {item.name for item in fields(MergeRule)}
        if unknown:
            known = ", ".join(one["name"] for one in describe_settings())
            raise TypeError(f"unknown setting {', '.join(sorted(unknown))}; there are: {known}")
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
            object.__setattr__(self, item.name, checked(item, flat.get(item.name, item.default)))
        self._check_combination()

    def _check_combination(self) -> None:
        if self.start_percent > self.end_percent:
            raise ValueError(f"start_percent={self.start_percent!r} lies after end_percent={self.end_percent!r}; "
                             "swap them")
        method = next((rule.method for rule in self.rules if not METHODS[rule.method].uses_ratio), None)
        if self.early_ratio is not None and method is not None:
            raise ValueError(
                f"early_ratio={self.early_ratio!r} is not used by method={method!r}, whose ratio follows from sx and "
                "sy; leave it at None"
            )

    def value(self, name: str) -> Any:
        """A setting's value; of a rule's, the first one's. Raises AttributeError for what is no setting."""
        return getattr(self if name in _OF_A_CONFIG else self.rules[0], name)

    @property
    def is_off(self) -> bool:
        """True where nothing can merge."""
        early = self.early_ratio and any(rule.merge_attn for rule in self.rules)
        return not self.deep_mlp and not early and all(rule.is_off for rule in self.rules)

    @property
    def uses_percent(self) -> bool:
        """True where merging is limited to a part of the model's own noise schedule."""
        return self.start_percent > 0 or self.end_percent < 1 or self.max_beta is not None


_OF_A_CONFIG = tuple(item.name for item in fields(MergeConfig)[1:])
# what a match depends on, wherever and whenever the rule holds; and merge_attn, without which others are refused
_OF_A_MATCH = ("method", "ratio", "sx", "sy", "use_rand", "seed", "merge_attn", "side", "cluster_on", "proportional",
               "correction", "refine", "query_ratio", "metric", "keep")  # fmt: skip


@lru_cache(maxsize=1024)
def rule_of(match_text: str) -> MergeRule:
    """A rule that matches as the one with this ``match_text`` does; one object for a text."""
    return MergeRule(**ast.literal_eval(match_text))


def describe_settings() -> list[dict[str, Any]]:
    """What there is to set: one dict a field of `MergeRule`, then one for each other keyword of `MergeConfig`.

    Keys: name, default, label, help, and where they apply minimum, maximum, step, choices, advanced, unset (what
    None means, else "automatic"). The maximum is a user interface's and the engine's; where `limit` is given, that is
    the engine's, and where `open_ended` is, it has none. Others are the form's, see `form`.
    """
    described = (*fields(MergeRule), *fields(MergeConfig)[1:])
    return [{"name": item.name, "default": item.default, **item.metadata} for item in described]
