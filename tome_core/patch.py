"""Patching a model in place, and undoing it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from .clock import SchedulerClock
from .config import MergeConfig, MergeRule
from .families import Place, find_blocks, find_unet
from .methods import METHODS
from .parts import CrossAttentionSite, FeedForwardSite, SelfAttentionSite
from .phases import HIGHEST_EARLY_RATIO, plain_rules
from .presets import DEFAULT, preset_config
from .report import Ledger, LevelTally, Report, make_report
from .runtime import MergeMap, Run
from .schedule import NoiseSchedule, ever_merges
from .sites import BlockSite, TransformerSite, UNetSite
from .sized import Routes, SizedKeys
from .wrap import Wrap

logger = logging.getLogger(__name__)

_MARK = "_tome_core_patch"
_LOCK = threading.RLock()  # two threads may patch one model


class Patch:
    """The handle of one patch: a context manager that can also be kept.

    >>> # with tome_core.patch(pipe, MergeConfig(ratio=0.5)) as handle:
    >>> #     image = pipe("a lake").images[0]
    >>> #     print(handle.report())

    It is installed when `patch` returns it. Leaving the ``with`` takes it off and puts back the patch that was
    there before, if any. Nothing else is left behind: no attribute, hook, class or state-dict key.
    """

    def __init__(self, unet: nn.Module, config: MergeConfig, schedule: NoiseSchedule | None) -> None:
        self.unet = unet
        self.config = config
        self._previous: Patch | None = None
        self._removed = False
        self._entered = False
        places = find_blocks(unet)
        depths = sorted({place.halvings for place in places})
        downsamples = [2**depth for depth in depths]
        self._covered = [ever_merges(plain_rules(config.rules, downsamples), i, d) for i, d in enumerate(downsamples)]
        self._notes = _notes(config, self._covered, downsamples)
        tallies = [LevelTally(2**depth, sum(p.halvings == depth for p in places)) for depth in depths]
        ledger = Ledger(tallies, self._notes)
        self.run = Run(config, downsamples, schedule, ledger)
        covered = [place for place in places if self._covered[depths.index(place.halvings)]]
        self._wraps = self._build(covered, depths)

    def _build(self, places: list[Place], depths: list[int]) -> list[Wrap]:
        if not places:
            return []
        rules = self.run.in_order
        wraps: list[Wrap] = [UNetSite(self.unet, self.run)] if places[0].transformer is not self.unet else []
        transformers: dict[int, TransformerSite] = {}
        sizes_keys, routes = any(rule.sizes_keys and rule.merge_attn and not rule.is_off for rule in rules), Routes()
        for number, place in enumerate(places):
            transformer = transformers.get(id(place.transformer))
            if transformer is None:
                transformer = transformers[id(place.transformer)] = TransformerSite(place.transformer, self.run)
                wraps.append(transformer)
            block = BlockSite(place.block, transformer, self.run, number, depths.index(place.halvings))
            wraps.append(block)
            if any(rule.merge_attn for rule in rules):
                sized = SizedKeys(place.block.attn1, place.family, routes) if sizes_keys else None
                wraps.append(SelfAttentionSite(place.block.attn1, block, place.family, sized))
            if any(rule.merge_crossattn for rule in rules) and getattr(place.block, "attn2", None) is not None:
                wraps.append(CrossAttentionSite(place.block.attn2, block))
            if any(rule.merge_mlp for rule in rules) and getattr(place.block, "ff", None) is not None:
                wraps.append(FeedForwardSite(place.block.ff, block))
        return wraps

    def _follow(self, scheduler: Any) -> None:
        """Take the time from a pipeline's scheduler, where a rule asks for the time at all."""
        if self._wraps and self.run.wants_time and hasattr(scheduler, "scale_model_input"):
            self.run.in_pipeline = True
            self._wraps.append(SchedulerClock(scheduler, self.run))

    @property
    def is_installed(self) -> bool:
        """True while the model merges."""
        return vars(self.unet).get(_MARK) is self

    def install(self) -> Patch:
        """Put the patch on, in place of another of ours if there is one.

        Idempotent; cheap enough for every step, and also brings back what somebody else has overwritten.
        """
        with _between_calls(self.unet) as current:
            if current is not None and current is not self:
                current.uninstall()
            vars(self.unet)[_MARK] = self  # before the wraps, so that what an interrupt leaves of them can be found
            self._removed = False
            try:
                for place, wrap in enumerate(self._wraps):
                    self._wraps[place] = wrap.install()
            except BaseException:
                self.uninstall()
                raise
        return self

    def uninstall(self) -> None:
        """Take the patch off, keeping its counts and its wraps for another `install`. Idempotent.

        Like `install` it waits for a call of the UNet that goes on in another thread.
        """
        with _between_calls(self.unet):
            if not self.is_installed:
                return
            for wrap in reversed(self._wraps):
                wrap.uninstall()
            del vars(self.unet)[_MARK]

    def remove(self) -> None:
        """Take the patch off for good. Idempotent; never fails."""
        self._removed = True
        self.uninstall()
        self.run.forget()
        for wrap in self._wraps:
            if isinstance(wrap, (TransformerSite, BlockSite)):
                wrap.memory.clear()

    def set_time(
        self,
        *,
        percent: float | None = None,
        timestep: float | None = None,
        sigma: float | None = None,
        sampling: Hashable = None,
    ) -> None:
        """Tell the time before a call of the UNet, on whichever scale is at hand; without arguments, stop telling.

        percent: 0..1, ComfyUI's ``percent_to_sigma`` scale. timestep: of the training schedule. sigma: the
        noise's standard deviation. sampling: whatever tells this picture's sampling from all others, the same at
        each of its steps; matches are kept over steps (``keep``) only where it is given. Needed for rules in percent
        on a bare UNet, and for every rule that is limited in time on a UNet compiled as a whole, which cannot look
        at its own arguments.
        """
        self.run.set_time(percent, timestep, sigma, sampling)

    def keep_maps(self, keep: bool = True) -> None:
        """From now on keep the latest map of each level on the CPU, for `maps`; costs a wait for the device each."""
        self.run.maps = {} if keep else None

    def maps(self) -> dict[int, MergeMap]:
        """Level -> what a block of it merged last; empty unless `keep_maps` was called before the model ran."""
        return dict(self.run.maps or {})

    def reset_counts(self) -> None:
        """Begin the report, and the maps, anew: for a host whose users ask about one picture at a time."""
        self.run.ledger.reset()
        if self.run.maps is not None:
            self.run.maps = {}

    def report(self) -> Report:
        """What was merged so far, where, and what was skipped and why."""
        settings = tuple(_describe(rule) for rule in self.config.rules)
        return make_report(self.run.ledger, self._covered, settings, self.is_installed)

    def __enter__(self) -> Patch:
        self._entered = True
        return self.install()

    def __exit__(self, *error: object) -> None:
        self._entered = False
        # patches put on inside this `with` end with it
        later = list(_back_from(vars(self.unet).get(_MARK)))
        if self not in later:
            self.remove()
            return
        for one in later[: later.index(self) + 1]:
            one.remove()
        before = next((one for one in _back_from(self._previous) if not one._removed), None)
        if before is not None:
            before.install()


def patch(model: Any, config: MergeConfig | str | None = None, *, host_clock: bool = False) -> Patch:
    """Merge tokens in a model, in place, until the handle is left or removed.

    model: a UNet, a compiled one, a diffusers pipeline, or an LDM model. config: settings, or the name of a preset:
    "quality", "balanced" (None is that), "fast" or "max".
    host_clock: the caller will use `Patch.set_time`, so rules in percent are no reason to speak up.
    A patch of ours that is already there is replaced; leaving the ``with`` brings it back.
    Raises UnsupportedModelError (a ValueError) where there is no LDM-style transformer block, TypeError for
    what is no model.
    """
    if config is None or isinstance(config, str):
        config = preset_config(DEFAULT if config is None else config)
    if not isinstance(config, MergeConfig):
        raise TypeError(f"config is {type(config).__name__}; it has to be a MergeConfig, a preset's name, or None")
    unet = find_unet(model)
    handle = Patch(unet, config, _schedule_of(model))
    handle._follow(getattr(model, "scheduler", None))
    handle._previous = current = vars(unet).get(_MARK)
    if current is not None and not current._entered:
        current._previous = None  # nobody will leave it for what was before it; without this, the chain would grow
    if not host_clock and handle.run.lacks_schedule:
        logger.warning(
            "A rule is limited in percent or beta, which a bare UNet does not know: call handle.set_time(percent=...) "
            "before each step, patch the pipeline instead, or use min_timestep and max_timestep."
        )
    for note in handle._notes:
        logger.warning("%s", note)
    return handle.install()


def apply_patch(
    model: Any,
    ratio: float = 0.5,
    max_downsample: int | None = None,
    sx: int = 2,
    sy: int = 2,
    use_rand: bool = True,
    merge_attn: bool = True,
    merge_crossattn: bool = False,
    merge_mlp: bool = False,
    seed: int = 0,
) -> Any:
    """Merge tokens in a model, in place, and return the model. Takes tomesd's arguments and does what tomesd does.

    `patch` does more, and by default better: its merged keys know how many tokens they stand for.
    ratio: share of tokens merged away, 0..1, clamped to ``1 - 1/(sx*sy)``. max_downsample: 1, 2, 4 or 8;
    None, unlike tomesd, is the finest level that has attention. use_rand: draw destinations from ``seed``
    and the timestep. Raises ValueError or TypeError for values outside, UnsupportedModelError for a model
    without LDM-style blocks.

    >>> # tome_core.apply_patch(pipe, ratio=0.5)
    >>> # image = pipe("a lake").images[0]
    >>> # tome_core.remove_patch(pipe)
    """
    config = MergeConfig(
        ratio=ratio,
        max_downsample=max_downsample,
        sx=sx,
        sy=sy,
        use_rand=use_rand,
        merge_attn=merge_attn,
        merge_crossattn=merge_crossattn,
        merge_mlp=merge_mlp,
        seed=seed,
        proportional=False,
    )
    patch(model, config)
    return model


def remove_patch(model: Any) -> Any:
    """Take our merging off a model and return the model. Does nothing, and never fails, where there is none."""
    for handle in _back_from(_handle_of(model)):
        handle.remove()
    return model


def report(model: Any) -> Report:
    """What the model's patch did so far; also for a wrapped model and its inner one."""
    handle = _handle_of(model)
    return handle.report() if handle is not None else Report(patched=False)


def _handle_of(model: Any) -> Patch | None:
    try:
        return vars(find_unet(model)).get(_MARK)
    except TypeError:
        return None


@contextmanager
def _between_calls(unet: nn.Module) -> Iterator[Patch | None]:
    """While nobody else patches the UNet, and no other thread is inside of it; gives the patch it has.

    The UNet's own lock first: whoever is inside may patch it from there.
    """
    while True:
        current = vars(unet).get(_MARK)
        with nullcontext() if current is None else current.run.lock, _LOCK:
            if vars(unet).get(_MARK) is current:
                yield current
                return


def _back_from(handle: Patch | None) -> Iterator[Patch]:
    """A patch and those it took the place of, the latest first."""
    while handle is not None:
        yield handle
        handle = handle._previous


def _schedule_of(model: Any) -> NoiseSchedule | None:
    """The noise schedule of a pipeline's scheduler, or of an LDM model itself; None for a bare UNet."""
    owner = getattr(model, "scheduler", None) or model
    betas = getattr(owner, "betas", None)
    if torch.is_tensor(betas) and betas.dim() == 1:
        return NoiseSchedule(tuple(betas.double().tolist()))
    return NoiseSchedule.stable_diffusion() if hasattr(owner, "scale_model_input") else None


def _notes(config: MergeConfig, covered: list[bool], downsamples: list[int]) -> tuple[str, ...]:
    notes = []
    for rule in config.rules:
        if METHODS[rule.method].uses_ratio and rule.ratio > rule.ratio_cap:
            notes.append(
                f"ratio {rule.ratio:g} is over the cap {rule.ratio_cap:g} of cells {rule.sx}x{rule.sy} and was "
                f"clamped; larger cells (sx, sy) allow more"
            )
        if rule.early_ratio is not None and rule.early_ratio > HIGHEST_EARLY_RATIO:
            notes.append(f"early_ratio {rule.early_ratio:g} is over the cap {HIGHEST_EARLY_RATIO:g} and was clamped")
    if not any(covered) and not all(rule.is_off for rule in config.rules):
        have = ", ".join(f"/{d}" for d in downsamples)
        notes.append(
            f"nothing will merge: no rule reaches a level of this model, whose attention is at {have} of the latent; "
            "leave levels and max_downsample at None for the finest of them"
        )
    return tuple(notes)


def _describe(rule: MergeRule) -> str:
    if rule.is_off:
        return "off"
    parts = [("attention", rule.merge_attn), ("cross-attention", rule.merge_crossattn), ("MLP", rule.merge_mlp)]
    where = ", ".join(name for name, on in parts if on)
    text = f"{rule.method} {rule.effective_ratio:.0%} of {rule.effective_side} in {where}"
    if rule.merge_attn and rule.sizes_keys:
        text += ", size-aware"
    if rule.has_early_phase:
        text += f", {_describe_early(rule)}"
    if rule.deep_mlp:
        text += f", {rule.deep_mlp:.0%} of the deep MLP"
    limits = []
    if rule.uses_percent:
        limits.append(f"{rule.start_percent:.0%} to {rule.end_percent:.0%} of the schedule")
    if rule.min_timestep is not None or rule.max_timestep is not None:
        last = "the highest" if rule.max_timestep is None else f"{rule.max_timestep:g}"
        limits.append(f"timesteps {rule.min_timestep or 0:g} to {last}")
    if rule.max_beta is not None:
        limits.append(f"beta below {rule.max_beta:g}")
    return text + (f", {', '.join(limits)}" if limits else "")


def _describe_early(rule: MergeRule) -> str:
    parts = [] if rule.early_ratio is None else [f"{rule.early_ratio:.0%}"]
    if rule.early_mlp:
        parts.append(f"{rule.early_mlp:.0%} of the MLP")
    return f"{' and '.join(parts)} down to timestep {rule.early_until:g}"
