"""Level-0 self-attention of the embedded model: how it starts, how much it matters, how few keys its heads use.

A model whose heads average over everything says nothing about merging: averaging more costs it nothing. Hence the
gates: what training has to reach before benchmarks are run on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from diffusers.models.attention_processor import Attention

from demo.model import SceneModel
from demo.training_loss import HELD_OUT_SEED, Scenes, held_out_loss, v_loss

SHARP = 0.3  # deviation of the first query and key weights, three times the usual: a token's own logit is about 11
FEW_KEYS, HEADS_WITH_FEW_KEYS, LOSS_RISE = 0.20, 0.20, 0.30
TIME = 400  # of 1000: noisy enough that looking elsewhere helps, clear enough to know where


class Gates(NamedTuple):
    """keys: effective keys of each level-0 head, share of all; rise: of the held-out v-loss without that attention."""

    keys: tuple[float, ...]
    rise: float

    def __str__(self) -> str:
        few = sum(share <= FEW_KEYS for share in self.keys) / len(self.keys)
        shares = " ".join(f"{100 * share:.0f}" for share in self.keys)
        return (f"{_verdict(few >= HEADS_WITH_FEW_KEYS)} level-0 heads that use at most {FEW_KEYS:.0%} of the keys: "
                f"{few:.0%}, wanted {HEADS_WITH_FEW_KEYS:.0%} (each head, %: {shares})\n"
                f"{_verdict(self.rise >= LOSS_RISE)} held-out v-loss without level-0 self-attention: {self.rise:+.0%}, "
                f"wanted {LOSS_RISE:+.0%}")

    def passed(self) -> bool:
        """Whether both hold."""
        few = sum(share <= FEW_KEYS for share in self.keys)
        return few >= HEADS_WITH_FEW_KEYS * len(self.keys) and self.rise >= LOSS_RISE


def _verdict(passed: bool) -> str:
    return "passed" if passed else "MISSED"


def level_0(model: SceneModel) -> list[Attention]:
    """The self-attention modules at the picture's full token grid, in the order in which they run."""
    unet = model.unet
    ends = (unet.down_blocks[0], unet.up_blocks[-1])
    return [block.attn1 for end in ends for site in end.attentions for block in site.transformer_blocks]


@torch.no_grad()
def start_sharp(model: SceneModel) -> None:
    """New level-0 weights from torch's global generator: keys equal queries, and tell like tokens from unlike ones.

    Heads that start broad stay broad: no single key's gradient is worth anything to them.
    """
    for attention in level_0(model):
        torch.nn.init.normal_(attention.to_q.weight, std=SHARP)
        attention.to_k.weight.copy_(attention.to_q.weight)
        attention.to_v.reset_parameters()
        torch.nn.init.zeros_(attention.to_out[0].weight)  # the model starts as if it had no such attention
        torch.nn.init.zeros_(attention.to_out[0].bias)


@contextmanager
def replaced(model: SceneModel, forward: Callable[[Attention, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Within, `forward(attention, x)` runs in place of each level-0 self-attention."""
    modules = level_0(model)
    for module in modules:
        module.forward = lambda x, *_, module=module, **__: forward(module, x)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


@torch.no_grad()
def effective_keys(model: SceneModel, pictures: int = 4) -> tuple[float, ...]:
    """exp(entropy) of each level-0 head's attention over all keys: median over queries, mean over pictures."""
    shares: list[torch.Tensor] = []

    def watch(attention: Attention, x: torch.Tensor) -> torch.Tensor:
        q, k = (project(x).float().unflatten(-1, (attention.heads, -1)).transpose(1, 2)
                for project in (attention.to_q, attention.to_k))
        probability = (q[:, :, ::16] @ k.transpose(-1, -2) * attention.scale).softmax(-1)
        entropy = torch.special.entr(probability).sum(-1)
        shares.append(entropy.exp().median(-1).values.mean(0) / k.shape[2])
        return type(attention).forward(attention, x)

    scenes, tokens = Scenes(HELD_OUT_SEED, pictures, 2 * model.unet.config.sample_size)[1]
    with replaced(model, watch):
        v_loss(model, scenes, tokens, torch.full((pictures,), TIME), torch.Generator().manual_seed(TIME))
    return tuple(torch.cat(shares).tolist())


def loss_rise(model: SceneModel, pictures: int = 16) -> float:
    """Rise of the held-out v-loss, as a share, where level-0 self-attention gives zeros."""
    with_attention = held_out_loss(model, pictures)
    with replaced(model, lambda attention, x: torch.zeros_like(x)):
        return held_out_loss(model, pictures) / with_attention - 1


def gates(model: SceneModel) -> Gates:
    """Measure both; about a minute on a CPU."""
    return Gates(effective_keys(model), loss_rise(model))
