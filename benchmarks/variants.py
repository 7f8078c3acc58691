"""Every variant of the quality benchmark: its name, how it patches a network, and the groups that measure it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import torch
from torch import nn

import tome_core
from benchmarks.networks import KINDS, UNET, Downsampled, Tiles, Zeros, before_each_call, finest_blocks
from tome_core import MergeConfig, MergeRule
from tome_core.models import unet
from tome_core.models.fewer_tokens import WholeBlockSite
from tome_core.models.wrap import wrap_of
from tome_core.patching import curve_of
from tome_core.settings.presets import MARKS, change_rules, refine_of, rules_of_blocks

PutOn = Callable[[nn.Module, int], AbstractContextManager]
PLAIN = "unmerged"
FRONT = (  # ratio and cell of merged keys and values, from which strength is chosen
    (0.25, 4), (0.5, 4), (0.625, 4), (0.75, 4), (0.8125, 4), (0.875, 4), (0.9375, 4),
    (0.9375, 8), (0.96875, 8), (0.984375, 8),
)  # fmt: skip
BETWEEN = (0.1, 0.375, 0.625, 0.875)  # strengths without a name
# share of tokens and highest timestep of whole blocks, from which SDXL's strength is chosen
BLOCKS_FRONT = tuple((share, below) for share in (0.5, 0.25, 0.125, 0.0625) for below in (510, 760, 890, 1010))


@dataclass(frozen=True)
class Variant:
    """One way to run a network, merged or not, that the quality benchmark measures.

    `put_on` takes a network and a seed, and gives a context manager in which the network is so. `method` is a line in
    the plot, `setting` a point on it, `role` its place in tables, `code` what runs ("reference", "engine", "tomesd" or
    "torch"), `solver` the factor of solver steps, and `kinds` the networks that can do it.
    """

    method: str
    setting: str
    put_on: PutOn
    role: Literal["plain", "method", "tomesd", "control", "yardstick"] = "method"
    code: str = "reference"
    solver: int = 1
    kinds: tuple[str, ...] = KINDS

    @property
    def name(self) -> str:
        """The name on a command line: method and setting, with hyphens for spaces."""
        return f"{self.method} {self.setting}".strip().replace(" ", "-")

    def describe(self) -> dict[str, Any]:
        """Return the fields that a result keeps: name, method, setting, role and code."""
        return {name: getattr(self, name) for name in ("name", "method", "setting", "role", "code")}


def in_bfloat16(network: nn.Module, seed: int) -> AbstractContextManager:
    """Return a context manager in which products are computed in bfloat16, the rest as before. The seed is not used."""
    return torch.autocast(next(network.parameters()).device.type, torch.bfloat16)


def engine(**settings: Any) -> PutOn:
    """Make a function (network, seed) -> context manager of a sampling that `tome_core.patch(**settings)` merges."""

    @contextmanager
    def put_on(network: nn.Module, seed: int) -> Iterator[None]:
        with tome_core.patch(network, seed=seed, host_clock=True, **settings) as merging:
            sampling = object()
            with before_each_call(network, lambda time: merging.set_time(timestep=time, sampling=sampling)):
                yield

    return put_on


def strength(value: float) -> PutOn:
    """Make a function (network, seed) -> context manager that merges by a strength, 0 to 1, even if it does not pay."""
    return engine(strength=value, only_if_it_pays=False)


def _keys(ratio: float, cell: int) -> dict[str, Any]:
    """Return settings by which keys and values are compared by distance and merge, refined if cells are large."""
    return {"ratio": ratio, "sx": cell, "sy": cell, "side": "kv", "use_rand": False, "metric": "keys+values",
            "refine": refine_of(cell)}  # fmt: skip


def attention_alone(value: float) -> PutOn:
    """Make a function (unet, seed) -> context manager that merges by a strength, 0 to 1, but no whole blocks."""

    def put_on(unet: nn.Module, seed: int) -> AbstractContextManager:
        config = change_rules(tome_core.strength(value, curve_of(unet)), 0.0)
        return engine(config=config, only_if_it_pays=False)(unet, seed)

    return put_on


def blocks_rule(share: float, below: float) -> MergeRule:
    """Return a strength's rule for whole blocks, on a share of the tokens below a timestep, without bound and gate."""
    (rule,) = rules_of_blocks(1.0)
    return replace(rule, ratio=1 - share, max_timestep=below, max_error=None, only_if_it_pays=False)


def whole_blocks(share: float, below: float, keep_whole: int = 1, stretches: int = 1) -> PutOn:
    """Make a function (unet, seed) -> context manager: whole blocks run on a share of the tokens, and nothing else.

    below: the timestep below which they do. keep_whole: how many first blocks of each transformer keep all tokens.
    stretches: the others merge in so many stretches of about equal length, each with its own match.
    """
    rule = blocks_rule(share, below)

    @contextmanager
    def put_on(network: nn.Module, seed: int) -> Iterator[None]:
        usual, unet.KEEP_WHOLE = unet.KEEP_WHOLE, keep_whole
        try:
            with engine(config=MergeConfig(rules=(rule,)))(network, seed):
                sites = [site for module in network.modules()
                         if type(site := wrap_of(module.forward)) is WholeBlockSite]  # fmt: skip
                for _, group in groupby(sites, lambda site: site.place.stretch):
                    several = list(group)
                    for number, site in enumerate(several):
                        part = number * stretches // len(several)
                        site.place = site.place._replace(stretch=(site.place.stretch, part))
                yield
        finally:
            unet.KEEP_WHOLE = usual

    return put_on


def keys_below(ratio: float, cell: int) -> PutOn:
    """Make a function (unet, seed) -> context manager: keys and values merge at all levels but the finest."""

    def put_on(unet: nn.Module, seed: int) -> AbstractContextManager:
        below = 2 ** (finest_blocks(unet)[0].halvings + 1)
        return engine(**_keys(ratio, cell), min_downsample=below)(unet, seed)

    return put_on


def tomesd(ratio: float, early: float | None = None) -> PutOn:
    """Make a (unet, seed) -> context manager: tomesd merges `ratio` of tokens in the finest level with attention.

    early: the ratio from timestep 500 up; None: the same.
    """

    @contextmanager
    def put_on(unet: nn.Module, seed: int) -> Iterator[None]:
        import tomesd as package

        device = next(unet.parameters()).device
        # its destinations come from a clone of the global generator, so only a seed there makes them equal
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            package.apply_patch(unet, ratio=ratio, max_downsample=2 ** finest_blocks(unet)[0].halvings)

            def choose(time: float) -> None:
                unet._tome_info["args"]["ratio"] = ratio if early is None or time < 500 else early

            try:
                with before_each_call(unet, choose):
                    yield
            finally:
                package.remove_patch(unet)
                for module in unet.modules():  # it leaves this on the UNet and the patched blocks
                    vars(module).pop("_tome_info", None)

    return put_on


_ALWAYS = (  # in every table
    Variant(PLAIN, "", lambda network, seed: nullcontext(), "plain", "torch"),
    Variant("bfloat16", "", in_bfloat16, "yardstick", "torch"),
    Variant("twice the solver steps", "", lambda network, seed: nullcontext(), "yardstick", "torch", solver=2),
    Variant("zero attention", "", lambda network, seed: Zeros(network), "control"),
)
_STANDARD = (  # the strengths, and what users may do instead; measured by default
    Variant("tomesd", "0.5", tomesd(0.5), "tomesd", "tomesd", kinds=(UNET,)),
    Variant("tomesd", "0.75", tomesd(0.75), "tomesd", "tomesd", kinds=(UNET,)),
    Variant("downsample", "2x2", lambda network, seed: Downsampled(network, 2)),
    Variant("sized", "0.5", engine(ratio=0.5, use_rand=False), code="engine"),
    *(Variant("preset", name, strength(value), code="engine") for name, value in MARKS.items()),
    *(Variant("strength", str(value), strength(value), code="engine") for value in BETWEEN),
)
_RIVALS = (  # measured if named
    Variant("tomesd early and late", "0.75 then 0.35", tomesd(0.35, early=0.75), code="tomesd", kinds=(UNET,)),
    Variant("tiles", "2x2", lambda unet, seed: Tiles(unet, 2), kinds=(UNET,)),
)
_TO_CHOOSE_BY = tuple(Variant("merged keys", f"{ratio} cells {cell}", engine(**_keys(ratio, cell)), code="engine")
                      for ratio, cell in FRONT)  # fmt: skip
_BELOW = tuple(Variant("keys below", f"{ratio} cells {cell}", keys_below(ratio, cell), code="engine", kinds=(UNET,))
               for ratio, cell in ((0.9375, 4), (0.984375, 8)))  # fmt: skip
_ALONE = tuple(Variant("attention alone", name, attention_alone(value), code="engine", kinds=(UNET,))
               for name, value in {**MARKS, **{str(value): value for value in (0.125, 0.175, 0.35)}}.items())
_BLOCKS = tuple(
    Variant("whole blocks", " ".join([f"{share} below {below}", *words]), whole_blocks(share, below, **more),
            code="engine", kinds=(UNET,))
    for share, below, words, more in (
        *((share, below, (), {}) for share, below in BLOCKS_FRONT),
        (0.25, 760, ("first too",), {"keep_whole": 0}), (0.25, 760, ("first two whole",), {"keep_whole": 2}),
        (0.25, 760, ("two stretches",), {"stretches": 2}))
)  # fmt: skip
VARIANTS = {variant.name: variant for variant in (
    *_ALWAYS, *_STANDARD, *_RIVALS, *_TO_CHOOSE_BY, *_BELOW, *_ALONE, *_BLOCKS)}  # fmt: skip
ALWAYS = tuple(variant.name for variant in _ALWAYS)
GROUPS = {"smallest": (*ALWAYS, "tomesd-0.75", "preset-balanced"),
          "standard": (*ALWAYS, *(variant.name for variant in _STANDARD)),
          "choose": (*ALWAYS, *(variant.name for variant in _TO_CHOOSE_BY)),
          "blocks": tuple(variant.name for variant in (*_BLOCKS, *_ALONE))}  # fmt: skip
