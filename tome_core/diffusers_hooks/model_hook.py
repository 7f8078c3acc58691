"""The `ModelHook` of `tome_core.diffusers_hooks`. A module of its own, because its class is diffusers' own kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.hooks import ModelHook
from torch import nn

from ..compiling import compiles_here
from ..model.wrap import drop_remains, under_accelerate
from ..patching.handle import Patch
from ..running.pictures import Scope
from ..running.tensors import common_value, is_captured
from ..transformers import Tokens, TransformerPatch, arguments_of, family_of

_RESET = "_reset_stateful_cache"  # what a pipeline calls of its models after each picture; CacheMixin's, where that is


class TokenMergingHook(ModelHook):
    """A patch that lives as long as it is registered, and the picture that its calls make.

    put_on: patches a module, and gives the handle.
    """

    _is_stateful = True

    def __init__(self, put_on: Callable[[nn.Module], Patch | TransformerPatch]) -> None:
        super().__init__()
        self.put_on = put_on
        self.handle: Patch | TransformerPatch | None = None
        self._gives_reset = False
        self._new_picture()

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        """Put the patch on, beneath the registry's own wrapper of ``module.forward``."""
        self.handle = self.put_on(module)
        if under_accelerate(module):
            module.forward = module._old_forward  # where the patch is; the registry looks at the former
        self._gives_reset = not hasattr(module, _RESET)
        if self._gives_reset:
            setattr(module, _RESET, module._diffusers_hook.reset_stateful_hooks)
        return module

    def deinitalize_hook(self, module: nn.Module) -> nn.Module:
        """Take it off. (The name is diffusers'.)"""
        if under_accelerate(module):
            module._old_forward = module.forward
        self.handle.remove()
        drop_remains(module)  # where the handle was removed first
        if under_accelerate(module):
            module.forward = module._old_forward
        if self._gives_reset:
            delattr(module, _RESET)
        return module

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """One step of the picture, or the first of the next."""
        if (torch.compiler.is_compiling() and compiles_here()) or not self.handle.run.keeps:
            return self.fn_ref.original_forward(*args, **kwargs)
        of_call = _of_transformer if isinstance(self.handle, TransformerPatch) else _of_unet
        latent, timestep = of_call(module, args, kwargs)
        if is_captured(latent):
            return self.fn_ref.original_forward(*args, **kwargs)
        time = common_value(timestep)
        goes_back = time is not None and self._time is not None and time > self._time
        if goes_back or latent.shape != self._shape:
            self._new_picture()
        self._time, self._shape = time, latent.shape
        with self.handle.run.step_of(self._picture):
            return self.fn_ref.original_forward(*args, **kwargs)

    def reset_state(self, module: nn.Module) -> nn.Module:
        """The next call begins a new picture."""
        self._new_picture()
        self.handle.run.forget()
        return module

    def _new_picture(self) -> None:
        self._picture, self._time, self._shape = Scope(None), None, None


def _of_unet(unet: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    """Latent and timestep of a call."""
    return tuple(args[i] if len(args) > i else kwargs[name] for i, name in enumerate(("sample", "timestep")))


def _of_transformer(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    """The same, the time as Stable Diffusion's, which falls while a picture is made."""
    family, given = family_of(model), arguments_of(model, args, kwargs)
    tokens = family.tokens(model, given)
    return tokens.latent if isinstance(tokens, Tokens) else torch.empty(0), family.timestep(given)
