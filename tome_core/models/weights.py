"""The weights of a model by which each of its tokens is multiplied, for the share of its work that merging leaves out.

Layers are counted by their sizes, not by their tensors, so a quantised layer counts as a whole one. What runs once for
a picture (times, modulations) or on the text (keys and values of attention to it, the text's own layers in a
transformer of two streams) is a few percent of a model's work, and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

from torch import nn

from .unet_blocks import FAMILIES, walk

_LEAST_OF_LIST = 0.02
TEXT = 77  # tokens of a prompt, to which each token of a UNet attends
_NOT_OF_TOKENS = re.compile(
    # once a picture, and GLIGEN's layers, which run only if boxes are given
    r"(^|[._])(mod|modulation|adaln\w*|norm\w*|time\w*|emb\w*|vector\w*|guidance\w*|fuser\w*|position_net)([._]|$)"
    r"|attn2\.to_[kv]|_ip\b|(^|[._])(add|added|context|txt|text|caption|encoder)([._]|$)"  # of the text
)


def per_token(module: nn.Module) -> int:
    """Return the number of weights below a module by which each token is multiplied once."""
    return sum(size for path, size in sizes(module) if not _NOT_OF_TOKENS.search(path.lower()))


def of_part(part: nn.Module) -> int:
    """Return `per_token` of a block's feed-forward layer, or of its attention to a prompt, by itself at `part`."""
    of_prompt = {f"to_{name}" for name in "kv"} if hasattr(part, "to_q") else ()
    weights = sum(size for path, size in sizes(part) if path not in of_prompt)
    return weights + (2 * TEXT * part.to_q.out_features if of_prompt and hasattr(part.to_q, "out_features") else 0)


def of_block(block: nn.Module) -> int:
    """Return `per_token` of a UNet's block, with the attention to a prompt, without that between the block's tokens."""
    of_prompt = 2 * TEXT * channels_of(block) if getattr(block, "attn2", None) is not None else 0
    return per_token(block) + of_prompt


def channels_of(block: nn.Module) -> int:
    """Return the channels of a block's self-attention, all heads together; 0 if they are not known."""
    return getattr(getattr(getattr(block, "attn1", None), "to_q", None), "out_features", 0)


def outside_blocks(unet: nn.Module) -> float:
    """Return the number of weights outside a UNet's blocks by which each cell of its latent is multiplied, on average.

    A layer where the latent is halved once meets a quarter of the cells.
    """
    found, stages = 0.0, {name for family in FAMILIES for name in family[:3]}
    for path, module, halvings in walk(unet):
        holds_blocks = module._modules.get("transformer_blocks") is not None
        if holds_blocks or not any(True for _ in module.children()):
            inside = sum(size for name, size in sizes(module) if "transformer_blocks." not in name
                         and not _NOT_OF_TOKENS.search(f"{path}.{name}".lower()))  # fmt: skip
            found += inside / 4**halvings
    return found + sum(size for path, size in sizes(unet) if path.partition(".")[0] not in stages
                       and not _NOT_OF_TOKENS.search(path.lower()))  # fmt: skip


def of_lists(model: nn.Module) -> tuple[int, int]:
    """Return `per_token` of a transformer, and the number of its blocks, which are items of its lists of modules.

    Lists of a few small modules, and those of the text's own blocks, hold no blocks.
    """
    whole, blocks = per_token(model), 0
    for name, part in model.named_children():
        if isinstance(part, nn.ModuleList) and not _NOT_OF_TOKENS.search(f"{name}.".lower()):
            blocks += len(part) if per_token(part) > _LEAST_OF_LIST * whole else 0
    return whole, blocks


def sizes(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield path and number of weights of each linear layer and each convolution, `module` itself or below it.

    Layers that wrap another, such as those of LoRA, count once, as the layer inside.
    """
    for path, layer in module.named_modules():
        if any(True for _ in layer.children()):
            continue
        inside, outside = (getattr(layer, name, None) for name in ("in_features", "out_features"))
        if inside and outside:
            yield path, inside * outside
            continue
        inside, outside = (getattr(layer, name, None) for name in ("in_channels", "out_channels"))
        if inside and outside and hasattr(layer, "kernel_size"):
            yield path, inside // layer.groups * outside * prod(layer.kernel_size)
