"""One rule, frozen, and checked when it is built. Its times are Stable Diffusion's timesteps."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..merging.methods import METHODS
from ..merging.metric import METRICS
from .setting import check, one_of, setting

SIDES = ("qkv", "kv")
DOWNSAMPLES = (1, 2, 4, 8)
SEED_LIMIT = 2**31 - 1
_LARGEST_CELL = 64  # more is a slip of the hand: one token is kept of 4096, of a latent of a picture 8192 pixels wide


@dataclass(frozen=True)
class MergeRule:
    """One rule: what is merged, in which blocks, at which times.

    >>> MergeRule(ratio=0.9).effective_ratio  # over the cap 1 - 1/(sx*sy) of bipartite matching
    0.75
    """

    method: str = setting(
        "bipartite", "Method",
        "How tokens are matched: " + "; ".join(f"{m.name}: {m.summary}" for m in METHODS.values()),
        choices=tuple(METHODS), place=5,
    )
    ratio: float = setting(
        0.5, "Ratio", "Share of tokens that are merged away. 0 is off. Bipartite matching can reach "
        "1 - 1/(sx*sy); more is clamped and reported. Not used by downsample, where it follows from sx and sy. The "
        "early ratio counts beside 0 as well.",
        minimum=0.0, maximum=1.0, step=0.05, place=0,
    )
    sx: int = setting(
        2, "Stride x", "Width in tokens of the cell that keeps one destination; downsample: the factor.",
        minimum=1, maximum=8, step=1, limit=_LARGEST_CELL, advanced=True, place=9,
    )
    sy: int = setting(
        2, "Stride y", "Height in tokens of the cell that keeps one destination; downsample: the factor.",
        minimum=1, maximum=8, step=1, limit=_LARGEST_CELL, advanced=True, place=10,
    )
    use_rand: bool = setting(
        True, "Random destinations", "Draw each cell's destination anew at every step (from the seed, so equal "
        "seeds give equal pictures) instead of always taking the top left token.", advanced=True, place=11,
    )
    seed: int = setting(
        0, "Seed", "What the random destinations are drawn from; nothing else depends on it.",
        minimum=0, maximum=SEED_LIMIT, step=1, advanced=True, place=12, known_as="merge_seed", beside_strength=True,
    )
    merge_attn: bool = setting(
        True, "Self-attention", "Merge in self-attention, where nearly all of the gain is.", advanced=True
    )
    merge_crossattn: bool = setting(
        False, "Cross-attention", "Merge in the attention to the prompt as well. Rarely worth its damage.",
        advanced=True, place=7,
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
    max_downsample: int | None = setting(
        None, "Level", "Which resolutions of the UNet merge. Automatic is the finest that has attention: 64x64 tokens "
        "on SD1.5 at 512 px, 32x32 on SDXL. Up to /2 is every block down-sampled at most twofold from the latent, and "
        "so on, as in tomesd; up to /1 reaches nothing on SDXL.",
        choices=(None, *DOWNSAMPLES), shown=("automatic", *(f"up to /{one}" for one in DOWNSAMPLES)), advanced=True,
        place=1, known_as="level",
    )
    min_timestep: float | None = setting(
        None, "Lowest timestep", "The rule holds at timesteps of at least this, below them the next one. Known even on "
        "a bare UNet.",
        minimum=0.0, maximum=1000.0, step=1.0, unset="no limit", advanced=True, open_ended=True,
    )
    min_pixels: int = setting(
        0, "Smallest picture", "Merge only in pictures of at least this many pixels, width times height (512x512 is "
        "262144, 1024x1024 is 1048576), counting a latent's token as 8x8. 0 is every picture. Leaves a first pass "
        "alone and serves the high-resolution one.",
        minimum=0, maximum=16777216, step=65536, open_ended=True, place=4, beside_strength=True,
    )
    proportional: bool = setting(
        True, "Proportional attention", "Let a merged key of self-attention weigh as much as the tokens it stands for, "
        "by adding the logarithm of their number to its logit. Less error at the same cost, and what makes strong "
        "merging of keys and values possible. Off is tomesd's way.", advanced=True, place=15,
    )
    correction: bool = setting(
        True, "Correction", "Give back what merged keys and values lose: to first order, and what a few exact answers "
        "tell besides. Made at a match and kept with it; less than half the error at the same work. Where keys and "
        "values alone are merged, or a match compares them.", advanced=True,
    )
    refine: int = setting(
        0, "Refinement", "k-means steps after the match: every token goes to the nearest of the merged ones. Each "
        "costs as much as a match; worth it for strong merging of keys and values. Used by bipartite. Where this is "
        "above 0, a match that has grown too old is renewed by one such step; at 0 it is made anew.",
        minimum=0, maximum=3, step=1, advanced=True, place=17,
    )
    metric: str = setting(
        "input", "Compare", "What a match compares: input (the block's input, by cosine, as tomesd does), keys, "
        "or keys+values (by distance). The last is the most exact, and costs two projections. Used by bipartite.",
        choices=METRICS, advanced=True, place=16,
    )
    keep: float = setting(
        0.0, "Keep a match for", "How many timesteps (of 1000) a block's match goes on serving the following steps. "
        "With 20 sampling steps one is 50. A kept match serves both halves of guidance, too. 0 matches anew at every "
        "step. Needs a host or a pipeline that says which steps belong to one picture.",
        minimum=0.0, maximum=1000.0, step=10.0, advanced=True, place=18,
    )
    only_if_it_pays: bool = setting(
        False, "Only where it pays", "Merge only where that saves time: as measured, where this model, size and device "
        "were (measure), else as the number of tokens and the kind of device suggest.", advanced=True, place=19,
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, check(item, getattr(self, item.name)))
        self._check_combination()

    def _check_combination(self) -> None:
        method = METHODS[self.method]
        if self.side is not None and self.side not in method.sides:
            raise ValueError(f"side={self.side!r} is not possible with method={self.method!r}; "
                             f"use {one_of(method.sides)}")
        if method.mode == "pick" and (self.merge_crossattn or self.merge_mlp):
            raise ValueError(f"method={self.method!r} keeps every query, so it cannot merge_crossattn or merge_mlp; "
                             "set both to False, or add a second rule with another method")
        if self.refine and not self.proportional and self.merge_attn:
            raise ValueError(f"refine={self.refine!r} may leave groups without tokens, which needs proportional "
                             "attention; set proportional to True, or use refine=0")

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
    def is_off(self) -> bool:
        """True where the rule can merge nothing."""
        return self.effective_ratio == 0 or not (self.merge_attn or self.merge_crossattn or self.merge_mlp)

    @property
    def is_proportional(self) -> bool:
        """True where merged keys get proportional attention: not where all groups are alike."""
        return self.proportional and METHODS[self.method].mode == "mean"

    @property
    def corrects(self) -> bool:
        """True where merged keys and values get their correction, which needs those of all tokens.

        These are at hand where a match compares them; elsewhere making them pays where every query is kept.
        """
        at_hand = self.metric == "keys+values" and METHODS[self.method].compares
        return self.correction and self.is_proportional and (self.effective_side == "kv" or at_hand)

    @property
    def uses_time(self) -> bool:
        """True where the rule does not hold at all times."""
        return self.min_timestep is not None
