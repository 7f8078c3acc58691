"""Whether a patch merges in a kind of call: what was measured says so, else what is known of the card.

Asked when the patch is put on, and never again while it stays on: nobody's picture changes half way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..engine.decision import is_host_bound
from ..reporting.gains import Gain, nearest
from ..settings.schedule import LevelRules
from .fingerprint import device_of, dtype_of

_HOST_BOUND = "the card is so fast at this size that it waits for its host, and merging would not pay; not measured"
_MOST = 1024  # kinds of calls that are remembered

Rules = tuple[LevelRules, ...]


class Verdict:
    """Says whether a kind of call merges.

    opens: None leaves it to the number of tokens. gain: measured of it, where that decided.
    """

    def __init__(self, opens: bool | None, why_not: str = "", gain: Gain | None = None) -> None:
        self.opens, self.why_not, self.gain = opens, why_not, gain
        self.decided: dict[tuple, tuple[Rules, tuple[str, ...]]] = {}


class Pays:
    """Opens and closes the gate for each kind of call, by what merging was measured to gain.

    gains: of this model and these rules; used: those that decided, in order. blocks: (down-sampling, channels) each.
    always: merge in calls of every kind, without asking: that is what a measurement is made of.
    """

    def __init__(self, gains: Sequence[Gain], blocks: Sequence[tuple[int, int]], always: bool = False) -> None:
        self._gains, self._blocks, self._always = tuple(gains), tuple(blocks), always
        self._found: dict[tuple, Verdict] = {}
        self.used: dict[Gain, None] = {}

    def apply(
        self, rules: Rules, why_off: tuple[str, ...], latent: Any, gated: Callable[[Rules, bool], Rules]
    ) -> tuple[Rules, tuple[str, ...]]:
        """The rules of a call with these latents, and why there are none, by level. gated: see `Clock.apply_gate`."""
        if not torch.is_tensor(latent) or latent.dim() != 4:
            return rules, why_off
        key = (latent.shape, latent.dtype, latent.device)
        verdict = self._found.get(key)
        if verdict is None:
            verdict = self._find(latent)
            if len(self._found) >= _MOST:
                self._found.clear()
            self._found[key] = verdict
        if verdict.opens is None:
            return rules, why_off
        if verdict.gain is not None:
            self.used[verdict.gain] = None
        key = (id(rules), why_off)  # the rules are kept by their clock, so that no other object gets their id
        if key not in verdict.decided:
            left = gated(rules, verdict.opens)
            changed = zip(why_off, rules, left, strict=True)
            why_not = (why if before == after else verdict.why_not for why, before, after in changed)
            verdict.decided[key] = left, why_off if verdict.opens else tuple(why_not)
        return verdict.decided[key]

    def _find(self, latent: torch.Tensor) -> Verdict:
        batch, _, height, width = latent.shape
        if self._always:
            return Verdict(True)
        if self._gains:
            device, dtype = device_of(latent.device), dtype_of(latent.dtype)
            gain = nearest(self._gains, device, dtype, height, width, batch)
            if gain is not None:
                return Verdict(gain.pays, gain.why_not, gain)
        waits = is_host_bound(self._blocks, batch, height * width, latent.dtype, latent.device)
        return Verdict(False, _HOST_BOUND) if waits else Verdict(None)
