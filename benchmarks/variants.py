"""What a row of the quality benchmark is about: a name, and how to make a network do what it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch import nn

import tome_core
from benchmarks import networks
from benchmarks.networks import KINDS, TRANSFORMER, at_each_call, finest_blocks, kind_of
from benchmarks.reference import Recipe, SequenceReference, as_toma, in_unet
from tome_core.attention import correction

Role = Literal["plain", "method", "tomesd", "control", "yardstick"]
PutOn = Callable[[nn.Module, int], AbstractContextManager]
MEASURES = ("noised", "pictures")


@dataclass(frozen=True)
class Variant:
    """One thing to measure.

    method: the line it belongs to in the plot. setting: what it is on that line. put_on: (network, seed) -> context
    manager inside which the network does it. code: whose code runs, the "engine", "reference", "tomesd", "diffusers" or
    "torch". solver: how many times as many solver steps as the others it takes. kinds: of networks that can do it.
    """

    method: str
    setting: str
    put_on: PutOn
    role: Role = "method"
    code: str = "reference"
    solver: int = 1
    measures: tuple[str, ...] = MEASURES
    kinds: tuple[str, ...] = KINDS

    @property
    def name(self) -> str:
        """As a command line calls it: no spaces."""
        return f"{self.method} {self.setting}".strip().replace(" ", "-")

    def describe(self) -> dict[str, Any]:
        """The part of it that a result keeps."""
        return {name: getattr(self, name) for name in ("name", "method", "setting", "role", "code")}


def nothing(network: nn.Module, seed: int) -> AbstractContextManager:
    """The network as it is."""
    return nullcontext()


def in_bfloat16(network: nn.Module, seed: int) -> AbstractContextManager:
    """Products in bfloat16, the rest as it is."""
    return torch.autocast(next(network.parameters()).device.type, torch.bfloat16)


def closed_form_alone(rule: dict[str, Any]) -> PutOn:
    """tome_core with these settings, whose correction is told nothing by exact answers."""
    def unfitted(q: torch.Tensor, merged: torch.Tensor, left: torch.Tensor, same: float) -> correction.Pair:
        batch, heads, _, width = left.shape
        return left.new_zeros(batch, heads, 2 * width, width), left.new_zeros(batch, heads, 1, width)

    @contextmanager
    def put_on(network: nn.Module, seed: int) -> Iterator[None]:
        with mock.patch.object(correction, "_ridge", unfitted), engine(rule)(network, seed):
            yield

    return put_on


def engine(*rules: dict[str, Any]) -> PutOn:
    """tome_core with these settings; several are rules of which the first that holds counts."""
    if len(rules) == 1:
        return _merging(**rules[0])
    return _merging(tome_core.MergeConfig(rules=tuple(tome_core.MergeRule(**settings) for settings in rules)))


def strength(value: float, **more: Any) -> PutOn:
    """A strength of tome_core's, also on grids that it would leave alone. more: settings that it does not decide."""
    return _merging(strength=value, only_if_it_pays=False, **more)


def _merging(config: tome_core.MergeConfig | None = None, **asked: Any) -> PutOn:
    """`tome_core.patch` of what is asked for. Inside is one sampling, whose matches may be kept from step to step."""

    @contextmanager
    def put_on(network: nn.Module, seed: int) -> Iterator[None]:
        with tome_core.patch(network, config, seed=seed, host_clock=True, **asked) as merging:
            sampling = object()
            with at_each_call(network, lambda time: merging.set_time(timestep=time, sampling=sampling)):
                yield

    return put_on


def reference(recipe: Recipe) -> PutOn:
    """The reference code."""
    def put_on(network: nn.Module, seed: int) -> AbstractContextManager:
        return (SequenceReference if kind_of(network) == TRANSFORMER else in_unet)(network, recipe, seed)

    return put_on


def toma(ratio: float) -> PutOn:
    """ToMA by its abstract, in a Flux transformer: see `reference`."""
    return lambda transformer, seed: as_toma(transformer, ratio)


def first_block_cache(threshold: float) -> PutOn:
    """See `networks`. What happens inside is one sampling."""

    @contextmanager
    def put_on(transformer: nn.Module, seed: int) -> Iterator[None]:
        with networks.first_block_cache(transformer, threshold), transformer.cache_context("both halves of guidance"):
            yield

    return put_on


def tomesd(ratio: float, early: float | None = None, until: float = 0) -> PutOn:
    """tomesd itself, as its users call it, at the finest level the UNet has.

    early: the ratio of the noisy steps, down to timestep `until`; what a user gets who changes it between steps.
    """

    @contextmanager
    def put_on(unet: nn.Module, seed: int) -> Iterator[None]:
        import tomesd as package

        device = next(unet.parameters()).device
        # its destinations come from a clone of the global generator, so equal seeds need that one set
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            package.apply_patch(unet, ratio=ratio, max_downsample=2 ** finest_blocks(unet)[0].halvings)

            def choose(time: float) -> None:
                unet._tome_info["args"]["ratio"] = early if early is not None and time >= until else ratio

            try:
                with at_each_call(unet, choose):
                    yield
            finally:
                package.remove_patch(unet)
                for module in unet.modules():  # the UNet and the patched blocks, on which it leaves that
                    vars(module).pop("_tome_info", None)

    return put_on
