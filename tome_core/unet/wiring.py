"""The wraps of one UNet, put on when the first patch needs them and taken off when none does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from ..model.families import Place, find_blocks
from ..model.switch import Switch, adopt, patch_lock, switch_of
from ..model.wrap import Wrap
from ..running.fingerprint import widths_of
from .parts import CrossAttentionSite, FeedForwardSite, PartSite, SelfAttentionSite
from .root import UNetSite
from .sites import BlockSite, TransformerSite

_MARK = "_tome_core_patch"


class Holder:
    """Who needs wraps: a handle, which does not keep its UNet alive.

    needs: (level, part) of what it merges; run: what it knows while in force.
    """

    needs: frozenset[tuple[int, str]]
    run: Any
    _unet: Callable[[], nn.Module | None]

    @property
    def unet(self) -> nn.Module | None:
        """The UNet; None once nobody else holds it."""
        return self._unet()

    def detach(self) -> None:
        """No longer need the wraps, which come off when nobody does. Idempotent; waits for a call that goes on."""
        wiring = self._wiring()
        if wiring is not None:
            wiring.release(self)

    def belong_to(self, unet: nn.Module) -> None:
        """For a copy, which does not know its UNet: this one."""
        self._unet = weakref.ref(unet)

    def _wiring(self) -> Wiring | None:
        return None if self.unet is None else wiring_of(self.unet)


class Wiring:
    """All wraps on one UNet, and the handles that need them.

    merging: the handle that is in force wherever nobody else is named.
    """

    def __init__(self, unet: nn.Module) -> None:
        self.switch: Switch = switch_of(unet)
        self.holders: list[Holder] = []
        self.merging: Holder | None = None
        self._unet: weakref.ref[nn.Module] | None = weakref.ref(unet)
        self._wraps: dict[Any, Wrap] = {}
        self._built: frozenset[tuple[int, str]] = frozenset()  # (level, part) of which there are wraps
        self._needs: frozenset[tuple[int, str]] = frozenset()  # of which they are on
        self._may_rest = True

    def fits(self, unet: nn.Module) -> bool:
        """After a rest: are the blocks and parts still the modules that the wraps were made for?"""
        found: dict[Any, nn.Module] = {"unet": unet}
        for number, place in enumerate(find_blocks(unet)):
            found[number], found["transformer", id(place.transformer)] = place.block, place.transformer
            for part, (name, _) in _SITES.items():
                found[number, part] = getattr(place.block, name, None)
        return all(wrap.rests_from() is found.get(key) for key, wrap in self._wraps.items())

    def hold(self, unet: nn.Module, handle: Holder) -> None:
        """Have what the handle needs, on top of what others have put on the model."""
        if handle not in self.holders:
            self.holders.append(handle)
        if not handle.needs <= self._built:
            self._build(unet, handle.needs | self._built)
        self._needs |= handle.needs
        self._put_on()

    def _put_on(self) -> None:
        levels = {level for level, _ in self._needs}
        for key, wrap in self._wraps.items():
            if self._is_needed(wrap, self._needs, levels) and wrap.wake():
                self._wraps[key] = wrap.install()

    def release(self, handle: Holder) -> None:
        """The handle needs nothing any more. Waits for a call that goes on, or leaves it to that call's end."""
        with self.switch.between_calls() as free:
            if free:
                self._release(handle)
            else:
                self._silence(handle)
                self.switch.later.append(partial(self._release, handle))

    def _release(self, handle: Holder) -> None:
        with patch_lock():
            self._silence(handle)
            if handle in self.holders:
                self.holders.remove(handle)
            unet = None if self._unet is None else self._unet()
            if unet is None or vars(unet).get(_MARK) is not self:
                return
            self._shed(frozenset().union(*(one.needs for one in self.holders)))
            if not self.holders:
                del vars(unet)[_MARK]
                # the same wraps for the next patch: a compiled model knows them
                self.switch.resting = self if self._may_rest else None

    def _shed(self, needs: frozenset[tuple[int, str]]) -> None:
        """Take off what nobody needs, the inner first. It rests until it is needed again.

        A wrap that somebody else's lies on has to stay where it is, as a pass-through, and one over somebody else's has
        to remember it; all are made anew then.
        """
        levels = {level for level, _ in needs}
        for wrap in reversed(self._wraps.values()):
            if wrap.target is None or self._is_needed(wrap, needs, levels):
                continue
            entangled = wrap.beneath is not None or (wrap.active and not wrap.is_on_top())
            wrap.uninstall()
            if entangled:
                self._may_rest = False
            else:
                wrap.rest()
        self._needs = needs

    @staticmethod
    def _is_needed(wrap: Wrap, needs: frozenset[tuple[int, str]], levels: set[int]) -> bool:
        if isinstance(wrap, PartSite):
            return (wrap.level, wrap.part) in needs
        return bool(needs) if isinstance(wrap, UNetSite) else wrap.level in levels

    def _silence(self, handle: Holder) -> None:
        if self.merging is handle:
            self.merging, self.switch.run = None, None

    def _build(self, unet: nn.Module, needs: frozenset[tuple[int, str]]) -> None:
        """Make the wraps that are missing; each is known before it is on."""
        places = find_blocks(unet)
        depths = sorted({place.halvings for place in places})
        wraps = self._wraps
        if needs and "unet" not in wraps:  # the outermost comes first
            root = wraps["unet"] = UNetSite(unet, self.switch)
            root.put_back = self._put_on
        for number, place in enumerate(places):
            level = depths.index(place.halvings)
            parts = [part for part in _SITES if (level, part) in needs]
            if parts:
                self._build_block(place, places, number, level, parts)
        self._built = needs

    def _build_block(self, place: Place, places: list[Place], number: int, level: int, parts: Iterable[str]) -> None:
        wraps, key = self._wraps, ("transformer", id(place.transformer))
        if key not in wraps:
            count = sum(one.transformer is place.transformer for one in places)
            wraps[key] = TransformerSite(place.transformer, self.switch, level, count, widths_of(place.block)[0])
        block = wraps.get(number)
        if block is None:
            block = wraps[number] = BlockSite(place.block, wraps["unet"], number, level)
        for part in parts:
            name, site = _SITES[part]
            module = getattr(place.block, name, None)
            if module is not None and (number, part) not in wraps:
                more = (place.family,) if part == "attn" else ()
                wraps[number, part] = site(module, block, *more)

    def belongs_to(self, unet: nn.Module) -> bool:
        """A copy of a patched UNet brings a copy of this object, which learns here whose it is."""
        if self._unet is None:
            self._unet = weakref.ref(unet)
            adopt(unet, self.switch)
            for handle in self.holders:
                handle.belong_to(unet)
        return self._unet() is unet

    def __getstate__(self) -> dict[str, Any]:
        on = {key: wrap for key, wrap in self._wraps.items() if wrap.target is not None}
        return {**vars(self), "_unet": None, "_wraps": on, "_built": self._needs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if "unet" in self._wraps:
            self._wraps["unet"].put_back = self._put_on


_SITES: dict[str, tuple[str, Any]] = {
    "attn": ("attn1", SelfAttentionSite),
    "crossattn": ("attn2", CrossAttentionSite),
    "mlp": ("ff", FeedForwardSite),
}


def wiring_of(unet: nn.Module) -> Wiring | None:
    """The wiring that is on the UNet, if any."""
    wiring = vars(unet).get(_MARK)
    return wiring if wiring is not None and wiring.belongs_to(unet) else None


def put_on(unet: nn.Module, handle: Holder, merges: bool) -> None:
    """Put the handle's wraps on. merges: it is in force wherever nobody else is named, in the place of who was."""
    switch = switch_of(unet)
    with switch.between_calls():
        with patch_lock():
            wiring = wiring_of(unet)
            if wiring is None:
                wiring, switch.resting = switch.resting, None
                if wiring is None or not wiring.fits(unet):
                    wiring = Wiring(unet)
                vars(unet)[_MARK] = wiring  # before its wraps, so that what an interrupt leaves is found
            before = wiring.merging
            try:
                wiring.hold(unet, handle)
                if merges:
                    wiring.merging, switch.run = handle, handle.run
            except BaseException:
                wiring.release(handle)
                raise
        if merges and before is not None and before is not handle:
            before.detach()
