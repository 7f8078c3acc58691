"""Level-0 self-attention of the embedded model: how it starts, how much it matters, how few keys its heads use.

A model whose heads average over everything says nothing about merging: averaging more costs it nothing.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from diffusers.models.attention_processor import Attention

from demo.model import SceneModel
from demo.training.loss import HELD_OUT_SEED, Scenes, held_out_loss, v_loss

OWN_LOGIT = 16  # of a token and itself in a sharp head at its start; unlike ones have about 0
FEW_KEYS, HEADS_WITH_FEW_KEYS, LOSS_RISE = 0.20, 0.20, 0.30
TIME = 400  # of 1000: noisy enough that looking elsewhere helps, clear enough to know where
# of the keys, what training wants sharp heads to use in the geometric mean over queries, at times below the second.
# `effective_keys` is a median, which empty skies make two to four times as much: .13 did nothing
SHARP_SHARE, CLEAR = 0.05, 500


class Gates(NamedTuple):
    """Shares of a trained UNet: of all keys those in use, by head, `effective_keys`; `loss_rise`; str() judges both."""

    keys: tuple[float, ...]
    rise: float

    def __str__(self) -> str:
        few = sum(share <= FEW_KEYS for share in self.keys) / len(self.keys)
        shares = " ".join(f"{100 * share:.0f}" for share in self.keys)
        verdicts = ["passed" if held else "MISSED" for held in (few >= HEADS_WITH_FEW_KEYS, self.rise >= LOSS_RISE)]
        return (f"{verdicts[0]} level-0 heads that use at most {FEW_KEYS:.0%} of the keys: {few:.0%}, wanted "
                f"{HEADS_WITH_FEW_KEYS:.0%} (each head, %: {shares})\n{verdicts[1]} held-out v-loss without level-0 "
                f"self-attention: {self.rise:+.0%}, wanted {LOSS_RISE:+.0%}")


def level_0(model: SceneModel) -> list[Attention]:
    """List the `attn1` modules at the finest UNet level that has attention, down blocks first; [] for a transformer."""
    if not isinstance(model, SceneModel):
        return []  # a transformer has one level, whose heads normalise queries and keys
    down, up = model.unet.down_blocks, model.unet.up_blocks
    level = next(place for place, block in enumerate(down) if hasattr(block, "attentions"))
    ends = (down[level], up[-1 - level])
    return [block.attn1 for end in ends for site in end.attentions for block in site.transformer_blocks]


@torch.no_grad()
def start_sharp(model: SceneModel) -> None:
    """For each level-0 attention, write one random matrix into query and key weights of the second half of its heads.

    Such heads attend to tokens that are alike; the first half stays free to be broad. torch's global generator draws.
    """
    for attention in level_0(model):
        width, head = attention.to_q.in_features, attention.to_q.out_features // attention.heads
        deviation = (OWN_LOGIT / (attention.scale * head * width)) ** 0.5  # 3.5 times the usual
        sharp = torch.empty_like(_sharp_half(attention.to_q)).normal_(std=deviation)
        _sharp_half(attention.to_q).copy_(sharp)
        _sharp_half(attention.to_k).copy_(sharp)


def _sharp_half(projection: torch.nn.Linear) -> torch.Tensor:
    """Return a view of the rows of the weight that belong to the second half of the heads, [out / 2, in]."""
    return projection.weight[projection.weight.shape[0] // 2:]


@contextmanager
def replace(model: SceneModel, forward: Callable[[Attention, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Run `forward(attention, x)`, x [n, tokens, channels], in place of each level-0 self-attention in the context."""
    modules = level_0(model)
    for module in modules:
        module.forward = lambda x, *_, module=module, **__: forward(module, x)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


@contextmanager
def record_breadths(model: SceneModel, keys: slice | None = None) -> Iterator[list[torch.Tensor]]:
    """Yield a list to which each level-0 self-attention that runs adds how broad its sharp heads, the second half, are.

    An entry is [n, sharp heads]: the mean over every 64th query of log(share of all keys in use), which is the entropy
    minus log(all keys). keys: the tokens that the attention itself then gets as keys and values, such as
    `slice(3, None, 8)` to save time; None for all.
    """
    breadths: list[torch.Tensor] = []

    def forward(attention: Attention, x: torch.Tensor) -> torch.Tensor:
        heads = _entropies(attention, x, 64, first=attention.heads // 2)
        breadths.append(heads.mean(-1) - math.log(x.shape[1]))
        return type(attention).forward(attention, x, None if keys is None else x[:, keys])

    with replace(model, forward):
        yield breadths


def broadness(breadths: list[torch.Tensor], times: torch.Tensor) -> torch.Tensor:
    """Compute the loss of too broad sharp heads: the mean square of the log shares' excess over log(SHARP_SHARE).

    breadths: log shares [n, sharp heads] of `record_breadths`, not empty. times: [n]; samples from CLEAR on count as 0.
    Without this loss the heads broaden within 370 steps from 5, 19 and 6 % of the keys to 18, 42 and 38 %.
    """
    clear = (times < CLEAR)[:, None]
    excess = torch.cat([(breadth - math.log(SHARP_SHARE)).clamp(min=0) for breadth in breadths], 1)
    return (excess.square() * clear.to(excess.device)).mean()


def _entropies(attention: Attention, x: torch.Tensor, every: int, first: int = 0) -> torch.Tensor:
    """Compute attention's entropies in nats, [n, heads from `first` on, queries]; each `every`-th token is a query."""
    q, k = (project(inputs).float().unflatten(-1, (attention.heads, -1)).transpose(1, 2)[:, first:]
            for project, inputs in ((attention.to_q, x[:, ::every]), (attention.to_k, x)))
    logits = q @ k.transpose(-1, -2) * attention.scale
    # of logits: entr has no slope at a probability of 0
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


@torch.no_grad()
def effective_keys(model: SceneModel, pictures: int = 4) -> tuple[float, ...]:
    """Return for each head of each `level_0` attention, in order, the share of keys in use: exp(entropy) / all keys.

    It is the median over every 16th query and the mean over held-out pictures, at timestep TIME. The model is a UNet's.
    """
    shares: list[torch.Tensor] = []

    def watch(attention: Attention, x: torch.Tensor) -> torch.Tensor:
        shares.append(_entropies(attention, x, 16).exp().median(-1).values.mean(0) / x.shape[1])
        return type(attention).forward(attention, x)

    batch = Scenes(HELD_OUT_SEED, pictures, 2 * model.side)[1]
    with replace(model, watch):
        v_loss(model, batch, torch.full((pictures,), TIME), torch.Generator().manual_seed(TIME))
    return tuple(torch.cat(shares).tolist())


def loss_rise(model: SceneModel, pictures: int = 16) -> float:
    """Return how much the held-out v-loss rises if level-0 self-attention gives zeros: 0.3 means 30 % more."""
    with_attention = held_out_loss(model, pictures)
    with replace(model, lambda attention, x: torch.zeros_like(x)):
        return held_out_loss(model, pictures) / with_attention - 1
