"""What wraps a UNet: opens a call, whose rules are in force, and closes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..compiling import compiles_here
from ..model.switch import Switch, inside
from ..running.call import Call
from ..running.operators import NumberedSite
from ..running.run import Run
from . import in_graph

TIME_NAMES = ("timesteps", "timestep", "t")
_INPUT_NAMES = ("hidden_states", "x", "sample")


class UNetSite(NumberedSite):
    """Around the UNet: opens and closes its calls."""

    operators = in_graph.OPERATORS

    def __init__(self, unet: nn.Module, switch: Switch) -> None:
        super().__init__(unet)
        self.switch = switch
        self.put_back: Callable[[], None] | None = None  # set by whoever knows all wraps

    def look_after_itself(self, level: int) -> None:
        """A block runs outside of any call: perhaps somebody has taken this wrap off, as DeepCache does when it goes.

        It is put back then, for the next call.
        """
        run = self.switch.run
        if run is not None and self.put_back is not None and not self.is_on_top():
            self.put_back()
            why = "somebody had taken the patch off the UNet; it is on again for the next"
            run.ledger.skip(None, level, "block", why)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The UNet's forward, inside a call of the run in force."""
        if not self.active:
            return self.original(*args, **kwargs)
        switch = self.switch
        run = switch.current()
        if torch.compiler.is_compiling() and compiles_here():  # no graph can hold a lock
            return self.original(*args, **kwargs) if run is None else self._call(run, None, args, kwargs)
        if run is None:  # another thread's call sees nothing of a merged one that goes on, one from inside must not
            call = switch.call
            is_inside = call is not None and call.thread == threading.get_ident()
            return (self._under if is_inside else self._make_call)(None, args, kwargs)
        with switch.lock:
            run = switch.current()  # somebody may have taken it off while this thread waited
            inside.depth += 1
            try:
                if run is None:
                    return self._make_call(None, args, kwargs)
                return self._call(run, threading.get_ident(), args, kwargs)
            finally:
                inside.depth -= 1
                while switch.later and switch.call is None:
                    switch.later.pop(0)()

    def _call(self, run: Run, thread: int | None, args: tuple, kwargs: dict[str, Any]) -> Any:
        latent, stamp = input_of(args, kwargs), time_of(args, kwargs)
        begun = None
        asks = thread is None and run.keeps and bool(in_graph.OPERATORS.made) and torch.is_tensor(latent)
        if asks and not torch.is_grad_enabled():  # a graph of the whole UNet asks for plans
            begun = in_graph.OPERATORS.made["begin"](self.number, latent, stamp if torch.is_tensor(stamp) else None)
        return self._under(run.begin(stamp, latent, thread, begun), args, kwargs)

    def begins(self, latent: torch.Tensor, stamp: torch.Tensor | None) -> None:
        """A call of the UNet, compiled as a whole, begins; its graph says so."""
        run = self.switch.current()
        if run is not None:
            run.begin_in_graph(stamp, latent)

    def __getstate__(self) -> dict[str, Any]:
        # who knows all wraps sets it again; a pickle would come to modules by their wraps, and take for a wrapper's
        # "original" what is on the module by then: that wrapper itself
        return {**super().__getstate__(), "put_back": None}

    def _under(self, call: Call | None, args: tuple, kwargs: dict[str, Any]) -> Any:
        switch = self.switch
        before = switch.call, switch.grid, switch.block
        switch.call, switch.grid, switch.block = call, None, None
        try:
            return self._make_call(call, args, kwargs)
        finally:
            switch.call, switch.grid, switch.block = before

    def _make_call(self, call: Call | None, args: tuple, kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() and compiles_here():
            return self.original(*args, **kwargs)
        inside.plain += call is None
        try:
            return self.original(*args, **kwargs)
        finally:
            inside.plain -= call is None


def input_of(args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a UNet, a transformer or a block is called with first; None where it is not there."""
    return args[0] if args else named_input(kwargs)


def named_input(kwargs: dict[str, Any]) -> Any:
    """`input_of` a call without positional arguments: wraps of blocks save themselves a call where there are some."""
    return next((kwargs[name] for name in _INPUT_NAMES if name in kwargs), None)


def time_of(args: tuple, kwargs: dict[str, Any]) -> Any:
    """The timestep of a UNet's call, likewise."""
    return args[1] if len(args) > 1 else next((kwargs[name] for name in TIME_NAMES if name in kwargs), None)
