"""All settings: rules, and the config that holds them. They are immutable, and checked when they are built."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from ..merging.methods import METHODS
from ..merging.metric import METRICS

SIDES = ("qkv", "kv")
HOW_MUCH, WHEN, WHERE, HOW = GROUPS = ("how much", "when", "where", "how")  # the groups of settings
DOWNSAMPLES = (1, 2, 4, 8)
SEED_LIMIT = 2**31 - 1
_LARGEST_CELL = 64  # keeps one token of 4096; a higher value is a typing error
_ENDLESS = 2**53 - 1  # the limit of settings without a limit: above it, floats are not exact


def setting(default: Any, label: str, help: str, **facts: Any) -> Any:
    """Return a dataclass field for a setting, with the label and the tooltip (`help`) of its control.

    `facts` about control and range are keys of `describe_settings` or `form`. If `default` is None, the setting may be
    None. Without choices and minimum it is a switch. Without `limit`, the maximum is the limit.
    """
    if "maximum" in facts:
        facts.setdefault("limit", facts["maximum"])
    return field(default=default, metadata={"label": label, "help": help, **facts})


def _check(item: Any, value: Any) -> Any:
    """Return a possible value of a setting, a dataclass field; a TypeError or ValueError says what to use."""
    facts, name = item.metadata, item.name
    if value is None and item.default is None:
        return None
    if "choices" in facts:
        # `1 == True` in Python, so types are compared as well
        if not any(value == choice and type(value) is type(choice) for choice in facts["choices"]):
            raise ValueError(f"{name}={value!r} is not possible; use one of {', '.join(map(repr, facts['choices']))}")
        return value
    if "minimum" not in facts:
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is {type(value).__name__}; use True or False")
        return value
    whole, least, most = isinstance(facts["step"], int), facts["minimum"], facts["limit"]
    end = "up" if most is None else f"to {most}"
    remedy = f"use {'a whole number' if whole else 'a number'} from {least} {end}"
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; {remedy}")
    # compared without conversion, because an int may exceed the largest float; written so that NaN is out of range
    if not least <= value <= (_ENDLESS if most is None else most):
        raise ValueError(f"{name}={value!r} is out of range; {remedy}")
    return value if whole else float(value)


@dataclass(frozen=True)
class MergeRule:
    """A rule: settings that say what merges, in which blocks, and at which timesteps of Stable Diffusion's schedule.

    `describe_settings` describes each setting. Rules are immutable and hashable.

    Raises:
        TypeError: a setting has the wrong type.
        ValueError: a setting is out of range, or two settings contradict each other.

    >>> MergeRule(ratio=0.9).effective_ratio  # over the cap 1 - 1/(sx*sy) of bipartite matching
    0.75
    """

    method: str = setting(
        "bipartite", "Method", "How similar tokens are found: bipartite is tomesd's method; cluster and "
        "cluster-similarity are k-means and take more time.", choices=tuple(METHODS), place=4, group=HOW)
    ratio: float = setting(
        0.5, "Ratio", "The share of tokens that merge away; 0 is off. A higher ratio is faster and changes the "
        "picture more.", minimum=0.0, maximum=1.0, step=0.05, place=0, group=HOW_MUCH, unit="share of tokens")
    sx: int = setting(
        2, "Cell width", "Width of a cell. Each cell keeps one token, so wider cells allow a higher ratio.",
        minimum=1, maximum=8, step=1, limit=_LARGEST_CELL, advanced=True, place=8, group=HOW, unit="tokens")
    sy: int = setting(
        2, "Cell height", "Height of a cell. Each cell keeps one token, so higher cells allow a higher ratio.",
        minimum=1, maximum=8, step=1, limit=_LARGEST_CELL, advanced=True, place=9, group=HOW, unit="tokens")
    use_rand: bool = setting(
        True, "Random destinations", "At every step, choose at random which token a cell keeps. If off, the top-left "
        "token stays.", advanced=True, place=10, group=HOW)
    seed: int = setting(
        0, "Merge seed", "The seed of the random destinations. It has no other effect.", minimum=0,
        maximum=SEED_LIMIT, step=1, advanced=True, place=11, group=HOW, known_as="merge_seed", beside_strength=True)
    merge_attn: bool = setting(
        True, "Self-attention", "Merge in self-attention, which gives nearly all of the gain.", advanced=True)
    merge_crossattn: bool = setting(
        False, "Cross-attention", "Merge in the attention to the prompt too. It gains little and costs detail.",
        advanced=True, place=6, group=WHERE)
    merge_mlp: bool = setting(
        False, "MLP", "Merge in the feed-forward layer too. It costs much detail in late steps.", advanced=True,
        place=7, group=WHERE)
    merge_blocks: bool = setting(
        False, "Whole blocks", "Run whole blocks on merged tokens: in SDXL all but the first of each transformer; in "
        "transformers such as Flux, whose cells merge, all but the first and last ones.", advanced=True)
    side: str = setting(
        "qkv", "Merge what", "Merge queries, keys and values of self-attention (q+k+v), or keys and values only (k+v), "
        "which loses less detail.", choices=SIDES, shown=tuple(map("+".join, SIDES)), advanced=True, place=5,
        group=WHERE, known_as="merge_what")
    max_downsample: int | None = setting(
        None, "Level", "Which resolutions of the UNet merge: automatic is the finest that has attention. Up to /1 is "
        "the latent's size, /2 also half of it, /4 a quarter, /8 an eighth.",
        choices=(None, *DOWNSAMPLES), shown=("automatic", *(f"up to /{one}" for one in DOWNSAMPLES)), advanced=True,
        place=1, group=WHERE, known_as="level")
    min_downsample: int | None = setting(
        None, "Coarsest levels", "The rule leaves out finer levels than this: 4 merges only where tokens are four "
        "latent cells wide or wider.", choices=(None, *DOWNSAMPLES), unset="no limit", advanced=True)
    min_timestep: float | None = setting(
        None, "Lowest timestep", "The rule is used at this timestep and above. Below it the next rule is used.",
        minimum=0.0, maximum=1000.0, step=1.0, unset="no limit", advanced=True, limit=None)
    max_timestep: float | None = setting(
        None, "Highest timestep", "The rule is used below this timestep. At it and above, the next rule is used.",
        minimum=0.0, maximum=1000.0, step=1.0, unset="no limit", advanced=True, limit=None)
    proportional: bool = setting(
        True, "Proportional attention", "Weight each merged key by its number of tokens, at no cost. If off, as in "
        "tomesd, the error is larger.", advanced=True, place=14, group=HOW)
    correction: bool = setting(
        True, "Correction", "Correct part of the error of merged keys and values. This leaves less than half of the "
        "error at the same work.", advanced=True)
    refine: int = setting(
        0, "Refinement", "Steps of k-means after a bipartite match, each takes as long as the match. They pay at "
        "high ratios.", minimum=0, maximum=3, step=1, advanced=True, place=16, group=HOW, unit="steps of k-means")
    metric: str = setting(
        "input", "Compare", "What a bipartite match compares: input is tomesd's method, keys+values is more exact.",
        choices=METRICS, advanced=True, place=15, group=HOW)
    keep: float = setting(
        0.0, "Keep a match for", "Later steps reuse a match for so many timesteps; 0 makes a match at every step. With "
        "20 steps, one step is 50 timesteps.",
        minimum=0.0, maximum=1000.0, step=10.0, advanced=True, place=17, group=HOW, unit="timesteps of 1000")
    max_error: float | None = setting(
        None, "Most error", "Merge less if self-attention would change by more than this, as a mean square relative to "
        "its size, a mean over all of the model. It is what late steps may; noisy ones may change more. It needs a "
        "correction, and a sampling.", minimum=0.0, maximum=1.0, step=0.0001, unset="no limit", advanced=True)
    most_steps: int | None = setting(
        None, "Most steps", "The rule is used in so many steps of a sampling at most, the first ones.", minimum=1,
        maximum=1000, step=1, unset="no limit", advanced=True, limit=None)
    only_if_it_pays: bool = setting(
        False, "Only if it pays", "Merge only if that saves time, by an estimate. If off, merge if that saves work.",
        advanced=True, place=18, group=HOW_MUCH)

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, _check(item, getattr(self, item.name)))
        if self.refine and not self.proportional and self.merge_attn:
            raise ValueError(f"refine={self.refine!r} may leave groups without tokens, which needs proportional "
                             "attention; set proportional to True, or use refine=0")

    @property
    def ratio_cap(self) -> float:
        """The highest possible ratio: ``1 - 1/(sx*sy)`` if the method keeps a token in every cell, else 1."""
        return 1.0 - 1.0 / (self.sx * self.sy) if METHODS[self.method].keeps_cells else 1.0

    @property
    def effective_ratio(self) -> float:
        """The ratio, clamped to `ratio_cap`."""
        return min(self.ratio, self.ratio_cap)

    @property
    def is_off(self) -> bool:
        """True if the rule merges nothing: its effective ratio is 0, or it covers no part of a block."""
        parts = self.merge_attn, self.merge_crossattn, self.merge_mlp, self.merge_blocks
        return self.effective_ratio == 0 or not any(parts)

    @property  # not cached: compilers trace it, and know no lock
    def is_as_tomesd(self) -> bool:
        """True if blocks merge tomesd's way: queries with keys and values, without proportional attention."""
        return self.side == "qkv" and not self.proportional

    @cached_property
    def corrects(self) -> bool:
        """True if the error of merged keys and values is corrected, which needs keys and values of all tokens."""
        at_hand = self.metric == "keys+values" and METHODS[self.method].compares
        return self.correction and self.proportional and (self.side == "kv" or at_hand)

    def holds_at(self, timestep: float | None) -> bool:
        """Tell whether a timestep is in the rule's range; None, an unknown one, only if the rule has no limit."""
        low, high = self.min_timestep, self.max_timestep
        if timestep is None:
            return low is None and high is None
        return (low is None or timestep >= low) and (high is None or timestep < high)


@dataclass(frozen=True, init=False)
class MergeConfig:
    """All settings of a patch: rules, a part of the noise schedule in which they hold, and an early phase.

    In the early phase, the first, noisiest steps, self-attention at the finest level merges at `early_ratio`, if set.

    The first rule that fits a level of the model, a part of a block and the time applies. Keywords may be the settings
    of a rule or of the config. Settings of a rule make one rule, or are set in each of ``rules``, also by
    `dataclasses.replace`:

    >>> MergeConfig(ratio=0.5).rules == (MergeRule(ratio=0.5),)
    True
    >>> early, late = MergeRule(ratio=0.75, min_timestep=600), MergeRule(ratio=0.25)
    >>> [rule.ratio for rule in MergeConfig(rules=(early, late), seed=5, end_percent=0.9).rules]
    [0.75, 0.25]

    Raises:
        TypeError: a keyword is unknown, or a value has the wrong type.
        ValueError: a value is out of range, two settings contradict each other, or there is no rule.
    """

    rules: tuple[MergeRule, ...]
    start_percent: float = setting(
        0.0, "Start", "Share of the noise schedule at which merging starts. 0 is the first step.", minimum=0.0,
        maximum=1.0, step=0.01, place=2, group=WHEN, unit="share of the schedule", known_as="start",
        beside_strength=True)
    end_percent: float = setting(
        1.0, "End", "Share of the noise schedule at which merging ends. 1 is the last step.", minimum=0.0,
        maximum=1.0, step=0.01, place=3, group=WHEN, unit="share of the schedule", known_as="end",
        beside_strength=True)
    max_beta: float | None = setting(
        None, "Noise threshold", "Merge only while beta_t, the noise added by one training step, is below this. "
        "Stable Diffusion's betas end at 0.012, so 0.2 is always on.",
        minimum=0.0, maximum=1.0, step=0.001, unset="no limit", advanced=True)
    early_ratio: float | None = setting(
        None, "Early ratio", "The ratio of the early steps. They are noisy and tolerate more merging.", minimum=0.0,
        maximum=1.0, step=0.05, unset="the same", place=12, group=HOW_MUCH, unit="share of tokens")
    early_until: float = setting(
        500.0, "Early down to timestep", "Steps at this timestep or above are early; 1000 is pure noise. Image to "
        "image and hires passes keep the same share of early steps.", minimum=0.0, maximum=1000.0,
        step=10.0, advanced=True, place=13, group=WHEN, unit="of 1000")

    def __init__(self, *, rules: tuple[MergeRule, ...] | None = None, **flat: Any) -> None:
        of_a_rule = {name: value for name, value in flat.items() if name not in _OF_A_CONFIG}
        unknown = set(of_a_rule) - {item.name for item in fields(MergeRule)}
        if unknown:
            known = ", ".join(one["name"] for one in describe_settings())
            more = "; a strength is `tome_core.strength(0.5)` or `patch(pipe, strength=0.5)`"
            raise TypeError(f"unknown setting {', '.join(sorted(unknown))}; there are: {known}"
                            + (more if "strength" in unknown else ""))
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
            object.__setattr__(self, item.name, _check(item, flat.get(item.name, item.default)))
        if self.start_percent > self.end_percent:
            raise ValueError(f"start_percent={self.start_percent!r} lies after end_percent={self.end_percent!r}; "
                             "swap them")

    def value(self, name: str) -> Any:
        """Return a setting's value by its keyword. A setting of rules is read from the first rule."""
        return getattr(self if name in _OF_A_CONFIG else self.rules[0], name)

    @property
    def is_off(self) -> bool:
        """True if no rule merges anything, in an early phase either. Limits on the time are not considered."""
        early = self.early_ratio and any(rule.merge_attn for rule in self.rules)
        return not early and all(rule.is_off for rule in self.rules)

    @property
    def uses_percent(self) -> bool:
        """True if start, end or noise threshold limit merging to a part of the noise schedule of the model."""
        return self.start_percent > 0 or self.end_percent < 1 or self.max_beta is not None


_OF_A_CONFIG = tuple(item.name for item in fields(MergeConfig)[1:])


def describe_settings() -> list[dict[str, Any]]:
    """Describe all settings: a dict for each field of `MergeRule`, then for each other keyword of `MergeConfig`.

    Its keys are name, default, label and help. If they apply: minimum and maximum (of a control), limit (the highest
    accepted value; None: no limit), step (an int for whole numbers), choices (the possible values), advanced (True),
    unset (what None means; if absent, None is "automatic"). Other keys are for `form`.
    """
    return [{"name": item.name, "default": item.default, **item.metadata}
            for item in (*fields(MergeRule), *fields(MergeConfig)[1:])]  # fmt: skip


def describe(config: MergeConfig) -> tuple[str, ...]:
    """Return a text for each rule, like ``"ratio=0.5, sx=4"``: its ratio and what differs from defaults.

    A last text tells what differs in the config itself, if anything does.
    """
    owners = ((fields(MergeRule), config.rules), (fields(config)[1:], (config,)))
    texts = (", ".join(f"{item.name}={value!r}" for item in items
                       if (value := getattr(owner, item.name)) != item.default or item.name == "ratio")
             for items, several in owners for owner in several)  # fmt: skip
    return tuple(filter(None, texts))
