"""Other people's replacements of `forward`: put wherever a patch stands, and put back as they do it."""

from __future__ import annotations

from tome_core.models.unet_blocks import find_blocks, find_unet


class Foreign:
    """Replaces a module's method the way accelerate and ControlNet do: save what is there, call it, put it back."""

    def __init__(self, module, name="forward"):
        self.module, self.name, self.calls = module, name, 0
        self.saved = getattr(module, name)
        setattr(module, name, self._call)

    def _call(self, *args, **kwargs):
        self.calls += 1
        return self.saved(*args, **kwargs)

    def put_back(self):
        """accelerate and ControlNet put the saved method onto the instance even if it was the class's."""
        setattr(self.module, self.name, self.saved)


def sites_of(model) -> list:
    """All that the patch wraps, and so what others may wrap as well: (module, method)."""
    unet = find_unet(model)
    found = [(unet, "forward")]
    for place in find_blocks(unet):
        method = "_forward" if hasattr(place.block, "_forward") else "forward"
        found += [(place.transformer, "forward"), (place.block, method), (place.block.attn1, "forward")]
    return list(dict.fromkeys(found))


def wrap_everything(model) -> list[Foreign]:
    """Replace all that the patch wraps, or would wrap."""
    return [Foreign(*site) for site in sites_of(model)]


def unwrap(foreign: list[Foreign]) -> None:
    """Put everything back, the last one first."""
    for one in reversed(foreign):
        one.put_back()
