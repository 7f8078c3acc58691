"""Merging as diffusers applies what speeds up a model: `apply_token_merging(unet, TokenMergingConfig())`.

diffusers is imported when one of these is called, and not before. Merging is no `enable_cache`, which takes configs of
diffusers' own kinds alone and no UNet has; it goes on beside one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..model.wrap import under_accelerate
from ..patching import patch
from ..patching.handle import Patch
from ..settings.config import MergeConfig
from ..transformers import TransformerPatch

HOOK = "token_merging"


@dataclass
class TokenMergingConfig:
    """What merges: a strength from 0, which is off, to 1, or settings by their names; without either "balanced".

    settings: keywords of `MergeConfig`, like ``{"ratio": 0.5, "use_rand": False}``. Raises ValueError for both at once.

    >>> TokenMergingConfig(strength=0.3).settings
    {}
    """

    strength: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.strength is not None and self.settings:
            raise ValueError(f"strength={self.strength!r} and settings={self.settings!r} both say what merges; "
                             "give one of them")  # fmt: skip

    def put_on(self, module: nn.Module) -> Patch | TransformerPatch:
        """The handle of a patch of the module; raises what `tome_core.patch` does."""
        if self.settings:
            return patch(module, MergeConfig(**self.settings))
        return patch(module, strength=self.strength)


def apply_token_merging(module: nn.Module, config: TokenMergingConfig | None = None) -> Patch | TransformerPatch:
    """Register merging in the module's `HookRegistry`, until `remove_token_merging`, and give the patch's handle.

    module: a UNet of diffusers, or a transformer that `tome_core.patch` takes. Its calls merge as after
    ``tome_core.patch(module, ...)``; besides, those of one picture are one sampling, over which matches may be kept. A
    picture ends where diffusers resets stateful hooks, as its pipelines do after each, and where time goes back or the
    latent's shape changes; a loop of your own whose pictures have one step each says so: `reset_stateful_hooks`.
    Guidance is not known here: `tome_core.patch(pipe)` shares a match between its halves.
    Raises ImportError without diffusers, ValueError where merging is on already, and what `tome_core.patch` does.
    """
    from diffusers.hooks import HookRegistry

    from .model_hook import TokenMergingHook

    config = TokenMergingConfig() if config is None else config
    had_registry = hasattr(module, "_diffusers_hook")
    hook = TokenMergingHook(config.put_on)
    try:
        with _beneath_accelerate(module):
            HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, HOOK)
    except BaseException:
        if not had_registry:
            vars(module).pop("_diffusers_hook", None)
        raise
    return hook.handle


def remove_token_merging(module: nn.Module) -> None:
    """Take it off the module and leave what was there before; does nothing where it is not on."""
    registry = getattr(module, "_diffusers_hook", None)
    if registry is None or registry.get_hook(HOOK) is None:
        return
    with _beneath_accelerate(module):
        registry.remove_hook(HOOK, recurse=False)
    if not registry.hooks:
        del module._diffusers_hook


@contextmanager
def _beneath_accelerate(module: nn.Module) -> Iterator[None]:
    """While in here ``module.forward`` is what lies below accelerate's hook, if there is one.

    A pipeline that offloads takes that hook off after each picture, and what lies above it is lost.
    """
    if not under_accelerate(module):
        yield
        return
    outermost, module.forward = module.forward, module._old_forward
    try:
        yield
        module._old_forward = module.forward
    finally:
        module.forward = outermost
