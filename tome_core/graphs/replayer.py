"""Who makes the calls of a captured UNet: by a graph that fits, else by recording one, else as they are."""

from __future__ import annotations

import logging
import threading
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from ..running.call import Call
from ..running.tensors import is_transformed
from ..unet.root import TIME_NAMES, UNetSite, input_of, time_of
from .cuda import CudaGraphs
from .forms import Unrecordable, put_together, take_apart
from .model_state import WRAPPED, ModelState
from .recorded_call import Buffers, NotedPlans, RecordedCall

logger = logging.getLogger(__name__)


class Replayer:
    """Lies on the UNet, and goes with it: what is recorded holds the UNet's weights.

    owner: the `Capture` whose calls these are. backend: who records, as `CudaGraphs` does.
    """

    def __init__(self, owner: Any, backend: CudaGraphs | None = None) -> None:
        self.owner, self._backend = owner, backend or CudaGraphs()
        self._calls, self._said_full, self._why_never = 0, False, ""
        self._lock = threading.RLock()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._state: ModelState | None = None
        self._recorded: dict[Any, list[RecordedCall]] = {}
        self._refused: dict[Any, str] = {}
        self._buffers: Buffers = WeakValueDictionary()

    def list_calls(self) -> list[RecordedCall]:
        """What is held."""
        with self._lock:
            return [one for some in self._recorded.values() for one in some]

    def call(self, site: UNetSite, call: Call | None, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of the site's UNet, replayed where that can be. call: of ours, where it merges."""
        if self.owner.unet is None:
            self.owner.belong_to(site.target)
        why = self._why_not(site.target, call, args, kwargs)
        if not why:
            with self._lock:
                try:
                    return self._replay(site, call, args, kwargs)
                except Unrecordable as error:
                    why = str(error)
        if not self.owner.plain_calls[why]:
            logger.warning("tome_core.capture: the UNet is called without a graph: %s.", why)
        self.owner.plain_calls[why] += 1
        return site.original(*args, **kwargs)

    def _why_not(self, unet: nn.Module, call: Call | None, args: tuple, kwargs: dict[str, Any]) -> str:
        latent = input_of(args, kwargs)
        if type(latent) is not torch.Tensor or is_transformed(latent):
            return "it is called in an unknown way"
        if torch.is_grad_enabled() or unet.training:
            return "a backward pass may follow; call it under torch.no_grad() and after eval()"
        if torch.is_autocast_enabled(latent.device.type):
            return "autocast is on; load the model in half precision instead"
        if call is not None and call.run.maps is not None:
            return "maps of what merges are kept"
        return self._why_never or self._backend.why_not(latent)

    def _replay(self, site: UNetSite, call: Call | None, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._look_at(site)
        latent, kept = input_of(args, kwargs), None if call is None else call.kept
        form, given = take_apart(_with_tensor_time(args, kwargs, latent.device))
        ours = None if call is None else (call.run, id(call.rules), call.why_off, kept is None)
        key = (form, tuple(one.stride() for one in given), ours)
        if key in self._refused:
            raise Unrecordable(self._refused[key])
        with self._backend.in_turn(latent.device):
            found, read = self._find(key, kept)
            if found is None:
                found = self._record(key, site, call, latent, form, given)
                read = found.read_by(kept)
            self._calls = found.used = self._calls + 1
            return found.replay(given, call, read)

    def _look_at(self, site: UNetSite) -> None:
        if self._state is None or not self._state.holds():
            self._begin_anew()
            self._state = ModelState(site.target)
        problem = self._state.problem or ("" if site.beneath is None else WRAPPED)
        if problem:
            raise Unrecordable(problem)

    def _find(self, key: Any, kept: Any) -> tuple[RecordedCall | None, Any]:
        reading = ((one, one.read_by(kept)) for one in self._recorded.get(key, ()))
        return next(((one, read) for one, read in reading if read is not None), (None, None))

    def _record(
        self, key: Any, site: UNetSite, call: Call | None, latent: torch.Tensor, form: Any, given: list[torch.Tensor]
    ) -> RecordedCall:
        self._make_room()
        switch = site.switch
        with torch.inference_mode(False):  # whoever calls later may write into them
            # on the device of the latents: what a call copies there from its host, no graph could
            inputs = [torch.empty_like(one, device=latent.device, requires_grad=False) for one in given]
        args, kwargs = put_together(form, inputs)
        for to, value in zip(inputs, given, strict=True):
            to.copy_(value)

        def forward(noted: NotedPlans | None) -> Any:
            before = switch.call
            if call is not None:
                switch.call = call._replace(kept=noted, stamp=time_of(args, kwargs))
            try:
                return site.original(*args, **kwargs)
            finally:
                switch.call = before

        try:
            found = RecordedCall(tuple(latent.shape), inputs, forward, call, self._buffers, self._backend)
        except Exception as error:  # of a model that asks its host for something: each its own type
            why = str(error) if isinstance(error, Unrecordable) else f"{type(error).__name__} while recording: {error}"
            self._refused[key] = why
            raise Unrecordable(why) from error
        if not self._state.holds():
            self._begin_anew()
            self._why_never = "its calls change attributes of its modules, which replayed ones would not"
            raise Unrecordable(self._why_never)
        self._recorded.setdefault(key, []).append(found)
        return found

    def _make_room(self) -> None:
        held = [(key, one) for key, some in self._recorded.items() for one in some]
        if len(held) < self.owner.limit:
            return
        if not self._said_full:
            self._said_full = True
            logger.warning("tome_core.capture: %d graphs are held, the most there may be, and each new one takes the "
                           "place of the least recently used: fewer sizes, or capture(..., limit=...), save recording "
                           "them again.", self.owner.limit)  # fmt: skip
        key, oldest = min(held, key=lambda one: one[1].used)
        self._recorded[key].remove(oldest)
        if not self._recorded[key]:
            del self._recorded[key]

    def __getstate__(self) -> dict[str, Any]:
        return {"owner": self.owner}  # a copy records for itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["owner"])


def _with_tensor_time(args: tuple, kwargs: dict[str, Any], device: torch.device) -> tuple[tuple, dict[str, Any]]:
    """With a timestep that is a number as the tensor that diffusers' UNets make of it: it is another at each step."""
    time = time_of(args, kwargs)
    if type(time) not in (int, float):
        return args, kwargs
    tensor = torch.tensor(time, dtype=torch.int64 if type(time) is int else torch.float64, device=device)
    if len(args) > 1:
        return (args[0], tensor, *args[2:]), kwargs
    return args, {**kwargs, next(name for name in TIME_NAMES if name in kwargs): tensor}
