"""Things on parts of blocks, to which whole blocks on merged tokens hand fewer tokens, and on lists of blocks."""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.beside.models import Beside
from tests.beside.things import On, Places, Thing, each, hook, model, wrapper

# every module below a block whose output is the picture's tokens, by path; diffusers' and LDM's have the same names
PARTS = ("norm1", "attn1", "attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "attn1.to_out.1", "norm2",
         "attn2", "attn2.to_q", "attn2.to_out.0", "attn2.to_out.1", "norm3", "ff", "ff.net.0", "ff.net.0.proj",
         "ff.net.1", "ff.net.2")  # fmt: skip
BY_NAME = {(False, False), (False, True)}  # see `Thing.left`; other than those that compute scores by hand


def blocks_of(transformers: list[nn.Module]) -> list[nn.Module]:
    return [block for transformer in transformers for block in transformer.transformer_blocks]


def below(*paths: str) -> Places:
    """The modules at these paths in each block that may run on merged tokens."""
    return lambda beside: [block.get_submodule(path) for block in beside.later.values() for path in paths]


def is_deep(beside: Beside) -> bool:
    return bool(beside.deep)


def has_processors(beside: Beside) -> bool:
    return is_deep(beside) and hasattr(beside.attentions[0], "processor")


class Own:
    """A processor that computes attention itself, and notes how many tokens it gets."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, attn: Any, hidden_states: Any, encoder_hidden_states: Any = None, **more: Any) -> torch.Tensor:
        self.seen.append(hidden_states.shape[1])
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context)
        out = self.attend(*(tensor.unflatten(2, (attn.heads, -1)).transpose(1, 2) for tensor in (q, k, v)))
        return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2)))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Masking(Own):
    """Queries of a side see half of the keys, as with HD-Painter; the number of tokens tells where the sides are."""

    def attend(self, q, k, v):
        count, side = q.shape[2], round(q.shape[2] ** 0.5)
        if side**2 != count:
            return F.scaled_dot_product_attention(q, k, v)
        is_left = torch.arange(count) % side < side // 2
        keys = is_left if k.shape[2] == count else torch.arange(k.shape[2]) < k.shape[2] // 2
        return F.scaled_dot_product_attention(q, k, v, attn_mask=is_left[:, None] == keys)


class NeedingGrid(Own):
    """Makes a picture of the tokens, as StoryDiffusion's does, and fails if there is none."""

    def attend(self, q, k, v):
        side = round(q.shape[2] ** 0.5)
        rows = F.scaled_dot_product_attention(q, k, v).unflatten(2, (side, -1))
        return (rows * torch.linspace(0.5, 1.5, side)[:, None, None]).reshape(q.shape)


class MapsOfTheFirst(Own):
    """All pictures get the first one's attention maps: Prompt-to-Prompt."""

    def attend(self, q, k, v):
        maps = (q @ k.mT * q.shape[3] ** -0.5).softmax(-1)
        return maps[:1].expand_as(maps) @ v


class FeaturesOfTheFirst(Own):
    """All pictures get the first one's queries and keys: Plug-and-Play."""

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q[:1].expand_as(q), k[:1].expand_as(k), v)


class KeysOfTheFirst(Own):
    """All pictures also see the first one's keys: StyleAligned."""

    def attend(self, q, k, v):
        k, v = (torch.cat([tensor, tensor[:1].expand_as(tensor)], 2) for tensor in (k, v))
        return F.scaled_dot_product_attention(q, k, v)


PROCESSORS = (Masking, NeedingGrid, MapsOfTheFirst, FeaturesOfTheFirst, KeysOfTheFirst)


def processor(name: str, kind: type[Own]) -> On:
    """Set such a processor in ``attn1`` or ``attn2`` of all blocks of the transformers that have several."""

    def put_on(attention: nn.Module) -> Callable[[], Any]:
        before, attention.processor = attention.processor, kind()
        return lambda: setattr(attention, "processor", before)

    return each(lambda beside: [getattr(block, name) for block in blocks_of(beside.deep)], put_on)


class Together(nn.Module):
    """Blocks as one; every second call runs the first alone, and adds what the others added in the call before."""

    def __init__(self, blocks: nn.ModuleList, kept: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.kept = blocks, kept

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        first = x = self.inner[0](x, *args, **kwargs)
        if "added" in self.kept:
            return x + self.kept.pop("added")
        for block in self.inner[1:]:
            x = block(x, *args, **kwargs)
        self.kept["added"] = x - first
        return x


def together(model: nn.Module, saved: Callable) -> Callable:
    """While the model runs, a list of blocks has one module with all, as cache-dit does it: their paths are gone."""
    lists = [(module, name, {}) for module in model.modules() for name in ("blocks", "transformer_blocks")
             if isinstance(getattr(module, name, None), nn.ModuleList)]  # fmt: skip

    def together(*args: Any, **kwargs: Any) -> Any:
        blocks = [getattr(module, name) for module, name, _ in lists]
        for (module, name, kept), inner in zip(lists, blocks, strict=True):
            setattr(module, name, nn.ModuleList([Together(inner, kept)]))
        try:
            return saved(*args, **kwargs)
        finally:
            for (module, name, _), inner in zip(lists, blocks, strict=True):
                setattr(module, name, inner)

    return together


def of_a_side(tokens: torch.Tensor) -> torch.Tensor:
    """Leave nothing right of the middle, as a LoRA for a region does; the number of tokens tells where that is."""
    count, side = tokens.shape[1], round(tokens.shape[1] ** 0.5)
    return tokens * (torch.arange(count) % side < side / 2)[:, None]


def regional(module: nn.Module, saved: Callable) -> Callable:
    return lambda *args, **kwargs: of_a_side(saved(*args, **kwargs))


_DEEPER = tuple(path for path in PARTS if path not in ("attn1", "attn2"))
_REASONS = {Masking: "mask", MapsOfTheFirst: "calls no attention function", KeysOfTheFirst: "other tokens than the"}
BELOW = {
    **{f"self-attention: {kind.__name__}": Thing(
        processor("attn1", kind), BY_NAME if kind in _REASONS else frozenset(), _REASONS.get(kind, "nothing"),
        has_processors) for kind in PROCESSORS},
    **{f"cross-attention: {kind.__name__}": Thing(processor("attn2", kind), fits=has_processors)
       for kind in PROCESSORS},
    "hooks below blocks": Thing(each(below(*_DEEPER), hook), fits=is_deep),
    "wrappers below blocks": Thing(wrapper(below(*_DEEPER)), fits=is_deep),
    # attentions that were not run may be named
    "blocks put together": Thing(wrapper(model, together), None, "another program",
                                 lambda beside: is_deep(beside) or beside.name == "Wan"),
}  # fmt: skip
# a hook on each path alone: test_stretches.py
BELOW |= {f"wrappers on {path}": Thing(wrapper(below(path), regional), fits=is_deep) for path in _DEEPER}
# those that others stand for in a quick run
RARE = [name for name in BELOW if " on " in name or re.search("cross.*First|Grid|Keys", name)]
