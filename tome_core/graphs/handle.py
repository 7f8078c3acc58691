"""`tome_core.capture`: a UNet whose calls are replayed from graphs, one for each kind of call, until that is undone."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from torch import nn

from ..model.families import brings_compiled, find_unet
from ..model.switch import CAPTURE
from ..model.wrap import is_wrapped_by_others
from ..unet.wiring import Holder, put_on
from .cuda import CudaGraphs
from .model_state import COMPILED, WRAPPED, ModelState
from .replayer import Replayer

LIMIT = 64


class Capture(Holder):
    """The handle: a context manager that can also be kept. It does not keep the UNet alive.

        with tome_core.capture(pipe), tome_core.patch(pipe):
            image = pipe("a lake").images[0]

    plain_calls: calls that were made without a graph, by reason.
    """

    needs = frozenset({(-1, "call")})  # of no block: the UNet's own wrap
    run = None

    def __init__(self, unet: nn.Module, limit: int = LIMIT) -> None:
        self.limit = limit
        self.plain_calls: Counter[str] = Counter()
        self._unet = weakref.ref(unet)

    @property
    def graphs(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Kind and shape of the latents of each graph that is held.

        A kind is "plain" without a patch of ours; with one "new", "renewed" and "kept", by what the call does for its
        matches, and "merged" where nothing is kept.
        """
        replayer = self._replayer()
        return () if replayer is None else tuple((one.kind, one.latents) for one in replayer.list_calls())

    def remove(self) -> None:
        """Call the UNet as before, and let go of the graphs. Idempotent; never fails."""
        unet = self.unet
        if self._replayer() is not None:
            del vars(unet)[CAPTURE]
            self.detach()

    def _replayer(self) -> Replayer | None:
        """Ours, while it is on."""
        found = None if self.unet is None else vars(self.unet).get(CAPTURE)
        return found if found is not None and found.owner is self else None

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self.limit}  # a copy belongs to a copy of the UNet, which makes itself known

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, plain_calls=Counter(), _unet=lambda: None)


def capture(model: Any, *, limit: int = LIMIT) -> Capture:
    """Replay the UNet's calls from CUDA graphs, merged or not, until the handle is left or removed.

    model: a UNet, a diffusers pipeline, or an LDM model; patched or not, before or after. limit: of graphs that are
    held; a picture's size needs one where nothing merges, else one for each phase of the rules and for what it does for
    its matches, up to five for a preset. Calls that no graph fits are made as they are, and the first of each sort says
    why. A graph is recorded at the first call of its kind, at which the call is made twice more.
    Raises ValueError for a UNet whose calls no graph can hold: one that is compiled, whose weights are moved to and
    fro, or on which somebody else's wrappers or hooks lie; TypeError for what is no model.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"limit={limit!r} is no number of graphs; use a whole number from 1 up")
    return capture_by(model, None, limit)


def capture_by(model: Any, backend: CudaGraphs | None, limit: int = LIMIT) -> Capture:
    """`capture` with somebody else who records, as `CudaGraphs` does; None is that."""
    unet = find_unet(model)
    problem = COMPILED if brings_compiled(model) else ""
    problem = problem or ModelState(unet).problem or (WRAPPED if is_wrapped_by_others(unet) else "")
    if problem:
        raise ValueError(f"the UNet's calls cannot be captured: {problem}")
    before = vars(unet).get(CAPTURE)
    if before is not None:
        before.owner.remove()
    handle = Capture(unet, limit)
    put_on(unet, handle, merges=False)
    vars(unet)[CAPTURE] = Replayer(handle, backend)
    return handle
