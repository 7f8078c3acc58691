"""``python -m benchmarks.merged_blocks``: what a UNet's pictures lose if MLPs of its coarsest level see fewer tokens.

It draws pictures of `demo/scenes-sdxl-deep.safetensors` by each variant, keeps PSNR and detail as JSON below
benchmarks/results/, goes on if it was stopped, and writes the table. Times are modelled: those of a call of SDXL at
1024 px in float16, by multiplications and bytes, on an RTX 3060 and an RTX 4090.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tome_core
from benchmarks import models, report, results
from benchmarks.subjects import SceneSubject
from benchmarks.variants import engine, strength
from demo.metrics import gradient_energy, psnr, ssim
from tome_core.models.unet_blocks import find_blocks

MODEL = results.ROOT / "demo" / "scenes-sdxl-deep.safetensors"
RIDGE = 0.1  # of the samples' mean square


class Steps:
    """The solver step and timestep of a UNet's call, and the tokens that MLPs computed, of all that they were given."""

    step, timestep, computed, given, skipped = -1, 1000.0, 0, 0, 0


def group(x: Tensor, ratio: float, draw: torch.Generator, random: bool, cell: int = 2) -> tuple[Tensor, Tensor]:
    """Merge a share of tokens ``[N, C]`` to their nearest of one token a 2x2 cell; return groups ``[N]`` and sizes."""
    tokens, side = len(x), math.isqrt(len(x))
    many = cell * cell
    cells = torch.arange(tokens).view(side // cell, cell, side // cell, cell).permute(0, 2, 1, 3)
    cells = cells.reshape(tokens // many, many)
    kept = cells.gather(1, torch.randint(many, (tokens // many, 1), generator=draw)).flatten()
    others = torch.ones(tokens, dtype=torch.bool).index_fill(0, kept, False).nonzero().flatten()
    if random:
        far, nearest = torch.rand(len(others), generator=draw), torch.randint(len(kept), others.shape, generator=draw)
    else:
        far, nearest = torch.cdist(x[others], x[kept]).min(1)
    merged = far.topk(min(round(ratio * tokens), len(others)), largest=False).indices
    target = torch.arange(tokens).index_copy(0, others[merged], kept[nearest[merged]])
    _, groups, sizes = target.unique(return_inverse=True, return_counts=True)
    return groups, sizes


def correct(out: Tensor, moved: Tensor, places: Tensor, exact: Tensor) -> Tensor:
    """Add to `out` a ridge fit, by `moved`, of what it lacks at `places`, where it then is `exact`. ``[B, N, C]``."""
    samples = moved[:, places]
    gram = samples @ samples.mT
    penalty = RIDGE * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] + 1e-8
    answers = torch.linalg.solve(gram + penalty * torch.eye(len(places)), exact - out[:, places])
    return (out + moved @ samples.mT @ answers).index_copy(1, places, exact)


class MergedMlp:
    """An MLP on the means of groups of tokens. fit: the share of tokens that are exact, to which a map is fitted."""

    def __init__(self, original: Callable, ratio: float | Callable, fit: float | Callable = 0.0, random: bool = False,
                 keep: int = 1, cell: int = 2, block: str = "", of_block: bool = False):  # fmt: skip
        self.original, self.ratio, self.fit, self.random = original, ratio, fit, random
        self.keep, self.draw, self.made = keep, torch.Generator().manual_seed(0), None
        self.cell = cell

    def __call__(self, x: Tensor) -> Tensor:
        ratio = self.ratio(Steps.timestep) if callable(self.ratio) else self.ratio
        fit = self.fit(Steps.timestep) if callable(self.fit) else self.fit
        if not ratio:
            Steps.computed += x.shape[1]
            return self.original(x)
        if self.made is None or not 0 <= Steps.step - self.made[0] < self.keep:  # of the prompt's half for both
            cell = self.cell(Steps.timestep) if callable(self.cell) else self.cell
            self.made = (Steps.step, *group(x[0], ratio, self.draw, self.random, cell))
        _, groups, sizes = self.made
        means = x.new_zeros(len(x), len(sizes), x.shape[2]).index_add_(1, groups, x) / sizes[:, None]
        places = (sizes[groups] > 1).nonzero().flatten()
        count = min(round(fit * x.shape[1]), len(places))
        places = places[torch.arange(count) * len(places) // max(1, count)]
        out = self.original(torch.cat([means, x[:, places]], 1))
        Steps.computed += out.shape[1]
        full = out[:, groups]
        return correct(full, x - means[:, groups], places, out[:, len(sizes):]) if count else full


class KeptMlp:
    """An MLP computed for the tokens that changed most since the last step; a map fitted to these does the others."""

    def __init__(self, original: Callable, share: float):
        self.original, self.share, self.x = original, share, None

    def __call__(self, x: Tensor) -> Tensor:
        if self.x is None or Steps.step == 0:
            Steps.computed += x.shape[1]
            self.x, self.out = x, self.original(x)
            return self.out
        change = x - self.x
        places = change.square().sum((0, 2)).topk(round(self.share * x.shape[1])).indices
        exact = self.original(x[:, places])
        Steps.computed += len(places)
        few = slice(None, None, max(1, len(places) // 128))
        out = correct(self.out, change, places[few], exact[:, few]).index_copy(1, places, exact)
        self.x, self.out = x, out
        return out


class SoftMlp:
    """An MLP on a share of tokens, with merging and unmerging by weights like attention's: ToMA by its abstract."""

    def __init__(self, original: Callable, share: float):
        self.original, self.every = original, round(1 / share)

    def __call__(self, x: Tensor) -> Tensor:
        places = torch.arange(0, x.shape[1], self.every)
        y = F.normalize(x, dim=-1)
        weights = (y @ y[:, places].mT / 0.1).softmax(-1)
        Steps.computed += len(places)
        return weights @ self.original((weights / weights.sum(1, keepdim=True)).mT @ x)


def constant(kind: str) -> Callable:
    """Make a control: an MLP that gives zeros ("zero"), or the output of the mean token to all ("mean")."""
    def make(original: Callable) -> Callable:
        return torch.zeros_like if kind == "zero" else lambda x: original(x.mean(1, keepdim=True)).expand_as(x)
    return make


@contextmanager
def mlps(unet: nn.Module, make: Callable[[Callable], Callable]) -> Iterator[None]:
    """Replace the MLPs of the UNet's coarsest level while the context lasts. make: a forward -> what stands for it."""
    places = find_blocks(unet)
    chosen = [place.block.ff for place in places if place.halvings == max(place.halvings for place in places)]
    Steps.step, Steps.computed, Steps.given = -1, 0, 0

    def begin(unet: nn.Module, args: tuple, kwargs: dict) -> None:
        Steps.step, Steps.timestep = Steps.step + 1, float(args[1])

    def put(mlp: nn.Module) -> None:
        merged = make(mlp.forward)

        def forward(x: Tensor, *rest: Any, **more: Any) -> Tensor:
            Steps.given += x.shape[1]
            return merged(x)
        mlp.forward = forward

    hook = unet.register_forward_pre_hook(begin, with_kwargs=True)
    for mlp in chosen:
        put(mlp)
    try:
        yield
    finally:
        hook.remove()
        for mlp in chosen:
            del mlp.forward


@contextmanager
def tomesd(unet: nn.Module, downsample: int, attention: bool, mlp: bool) -> Iterator[None]:
    """Patch a UNet by tomesd at ratio .5 in the levels down to `downsample`."""
    import tomesd as package

    with torch.random.fork_rng():
        torch.manual_seed(1)
        package.apply_patch(unet, ratio=0.5, max_downsample=downsample, merge_attn=attention, merge_mlp=mlp)
        try:
            yield
        finally:
            package.remove_patch(unet)
            for module in unet.modules():
                vars(module).pop("_tome_info", None)


@contextmanager
def extrapolated(unet: nn.Module, every: int) -> Iterator[None]:
    """Extrapolate the UNet's whole output, from its last two, in one of `every` steps from the fourth on."""
    original, past, step = unet.forward, [], 0

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor]:
        nonlocal step
        step += 1
        if step > 3 and (step - 3) % every == 0:
            (before, old), (last, new) = past[-2:]
            return (new + (new - old) * ((step - last) / (last - before)),)
        past.append((step, original(*args, **kwargs)[0]))
        return (past[-1][1],)

    unet.forward = forward
    try:
        yield
    finally:
        del unet.forward


def grows(*stages: tuple[float, float]) -> Callable[[float], float]:
    """Make a function of the timestep: the value of the last stage (timestep, value) that is above it, else 0."""
    return lambda t: next((value for until, value in reversed(stages) if t < until), 0.0)




class PartOnMeans:
    """A self- or cross-attention whose queries are means of groups, with a fit: q and out see fewer tokens."""

    def __init__(self, original: Callable, ratio: float, fit: float, own: bool):
        self.original, self.ratio, self.fit, self.own = original, ratio, fit, own
        self.draw = torch.Generator().manual_seed(0)

    def __call__(self, x: Tensor, encoder_hidden_states: Tensor | None = None, **more: Any) -> Tensor:
        if Steps.timestep >= FIRST:
            return self.original(x, encoder_hidden_states=encoder_hidden_states, **more)
        context = x if self.own else encoder_hidden_states
        groups, sizes = group(x[0], self.ratio, self.draw, False)
        means = x.new_zeros(len(x), len(sizes), x.shape[2]).index_add_(1, groups, x) / sizes[:, None]
        places = (sizes[groups] > 1).nonzero().flatten()
        count = min(round(self.fit * x.shape[1]), len(places))
        places = places[torch.arange(count) * len(places) // max(1, count)]
        out = self.original(torch.cat([means, x[:, places]], 1), encoder_hidden_states=context, **more)
        full = out[:, groups]
        return correct(full, x - means[:, groups], places, out[:, len(sizes):]) if count else full


class KeptPart:
    """A part whose output of an earlier step is used from a timestep on: T-GATE's cross-attention."""

    def __init__(self, original: Callable, below: float):
        self.original, self.below, self.out = original, below, None

    def __call__(self, x: Tensor, *args: Any, **more: Any) -> Tensor:
        if self.out is None or Steps.timestep >= self.below or self.out.shape != x.shape:
            self.out = self.original(x, *args, **more)
        return self.out


class Pruned:
    """AT-EDM by its abstract: after a transformer's first block the less important tokens skip the other blocks.

    Importance is attention's weights, followed as a graph's (PageRank); a pruned token gets the output of the most
    similar one that stayed. In early steps nothing is pruned.
    """

    def __init__(self, blocks: list[nn.Module], share: float):
        self.blocks, self.share, self.kept = blocks, share, None
        self.originals = [block.forward for block in blocks]
        blocks[0].forward, blocks[1].forward, blocks[-1].forward = self.first, self.second, self.last

    def first(self, x: Tensor, **more: Any) -> Tensor:
        self.kept, block = None, self.blocks[0]
        if Steps.timestep < FIRST:
            h, heads = block.norm1(x[:1]), block.attn1.heads
            q, k = (part(h).unflatten(2, (heads, -1)).transpose(1, 2) for part in (block.attn1.to_q, block.attn1.to_k))
            weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1).mean((0, 1))
            rank = torch.full((len(weights),), 1 / len(weights))
            for _ in range(5):
                rank = rank @ weights
            self.kept = rank.topk(round(self.share * len(rank))).indices.sort().values
        return self.originals[0](x, **more)

    def second(self, x: Tensor, **more: Any) -> Tensor:
        if self.kept is not None:
            y = F.normalize(x, dim=-1)
            self.nearest = (y @ y[:, self.kept].mT).argmax(2)
            x = x[:, self.kept]
        return self.originals[1](x, **more)

    def last(self, x: Tensor, **more: Any) -> Tensor:
        out = self.originals[-1](x, **more)
        if self.kept is None:
            return out
        return out.gather(1, self.nearest[..., None].expand(-1, -1, out.shape[2]))


@contextmanager
def watched(unet: nn.Module) -> Iterator[list]:
    """Count steps while the context lasts; give the blocks of the coarsest level, with their transformers."""
    places = find_blocks(unet)
    Steps.step, Steps.computed, Steps.given = -1, 0, 0

    def begin(unet: nn.Module, args: tuple, kwargs: dict) -> None:
        Steps.step, Steps.timestep = Steps.step + 1, float(args[1])

    hook = unet.register_forward_pre_hook(begin, with_kwargs=True)
    chosen = [place for place in places if place.halvings == max(place.halvings for place in places)]
    try:
        yield chosen
    finally:
        hook.remove()
        for place in places:
            for module in (place.block, place.block.attn1, place.block.attn2):
                vars(module).pop("forward", None)


@contextmanager
def parts(unet: nn.Module, name: str, make: Callable) -> Iterator[None]:
    """Replace a part ("attn1", "attn2") of the coarsest level's blocks."""
    with watched(unet) as places:
        for place in places:
            part = getattr(place.block, name)
            part.forward = make(part.forward)
        yield


@contextmanager
def stacks_of(unet: nn.Module, make: Callable[[list[nn.Module]], Any]) -> Iterator[None]:
    """Call `make` with the blocks of each transformer of the coarsest level."""
    with watched(unet) as places:
        stacks: dict[int, list[nn.Module]] = {}
        for place in places:
            stacks.setdefault(id(place.transformer), []).append(place.block)
        for blocks in stacks.values():
            make(blocks)
        yield


@contextmanager
def easycache(unet: nn.Module, threshold: float) -> Iterator[None]:
    """EasyCache by its abstract: reuse (output - input) while the change that is expected since adds up to little."""
    original, state = unet.forward, {"rate": None, "sum": 0.0}

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor]:
        x = args[0]
        if state.get("x") is not None and state["rate"] is not None:
            state["sum"] += state["rate"] * float((x - state["x"]).abs().mean() / state["out"].abs().mean())
            if state["sum"] < threshold:
                state["x"] = x
                state["skipped"] = state.get("skipped", 0) + 1
                return (x + state["apart"],)
        out = original(*args, **kwargs)[0]
        if state.get("x") is not None:
            moved = float((x - state["last_x"]).abs().mean())
            state["rate"] = float((out - state["out"]).abs().mean()) / max(moved, 1e-9)
        state.update(x=x, last_x=x, out=out, apart=out - x, sum=0.0)
        return (out,)

    unet.forward = forward
    try:
        yield
    finally:
        del unet.forward
        Steps.skipped = state.get("skipped", 0)


def by_engine(rules: tuple, base: float = 0.0) -> Callable:
    """Make a variant: the engine with these rules, and attention's rules of a strength, if any."""
    @contextmanager
    def make(unet: nn.Module) -> Iterator[None]:
        attention = replace(tome_core.strength(base, "sdxl"), only_if_it_pays=False) if base else None
        config = engine(rules=((attention.rules[0],) if attention else ()) + rules,
                        **({"early_ratio": attention.early_ratio, "early_until": attention.early_until}
                           if attention else {}))  # fmt: skip
        with config(unet, 1):
            yield
    return make


def rule(ratio: float, below: float, cell: int = 2, **more: Any) -> tome_core.MergeRule:
    """Return a rule for the coarsest level's MLPs."""
    return tome_core.MergeRule(**{"merge_attn": False, "merge_mlp": True, "ratio": ratio, "sx": cell, "sy": cell,
                                  "side": "kv", "use_rand": False, "keep": 60.0, "min_downsample": 4,
                                  "max_timestep": below, **more})  # fmt: skip


def merged(ratio: float, **more: Any) -> Callable:
    """Make a variant: a UNet -> a context manager in which its MLPs are `MergedMlp`."""
    return lambda unet: mlps(unet, lambda original: MergedMlp(original, ratio, **more))


class Stack:
    """A transformer's blocks after the first: they add nothing, or the mean token's change, or random partners'."""

    def __init__(self, blocks: list[nn.Module], kind: str):
        self.blocks, self.kind = blocks[1:], kind
        self.originals = [block.forward for block in self.blocks]
        self.draw = torch.Generator().manual_seed(0)
        for number, block in enumerate(self.blocks):
            block.forward = self.make(number)

    def make(self, number: int) -> Callable:
        def forward(x: Tensor, **more: Any) -> Tensor:
            if self.kind == "zero":
                return x
            if number == 0:
                partners = torch.randperm(x.shape[1], generator=self.draw)
                count = 1 if self.kind == "mean" else x.shape[1] // 4
                groups = torch.empty(x.shape[1], dtype=torch.long)
                groups[partners] = torch.arange(x.shape[1]) % count
                means = x.new_zeros(len(x), count, x.shape[2]).index_add_(1, groups, x) / (x.shape[1] / count)
                self.kept, x = (x, groups, means), means
            out = self.originals[number](x, **more)
            if number < len(self.blocks) - 1:
                return out
            x, groups, means = self.kept
            return x + (out - means)[:, groups]
        return forward


def blocks(ratio: float, below: float = 1001, **more: Any) -> Callable:
    """Make a variant: the engine merges whole blocks of the coarsest level."""
    return by_engine((rule(ratio, below, 4, merge_mlp=False, merge_blocks=True, **more),))


FIRST = 760.0  # from this timestep on, a step is one of the first
# by variant: (how to put it on; shares of tokens and of samples, and the limit, of whole blocks, or None)
Work = tuple[float, float, float]
VARIANTS: dict[str, tuple[Callable[[nn.Module], AbstractContextManager], Work | None]] = {
    **{f"whole blocks: {name} (control)": (
        lambda unet, kind=kind: stacks_of(unet, lambda blocks: Stack(blocks, kind)), (share, 0, 1001))
       for name, kind, share in (("they add nothing", "zero", 0), ("the mean token's change", "mean", 0),
                                 ("a quarter of the tokens, random partners", "random", 0.25))},
    "whole blocks on a quarter of the tokens, in all steps": (blocks(0.75), (0.25, 1 / 32, 1001)),
    **{f"whole blocks on {share:g} of the tokens below 760": (blocks(1 - share, 760), (share, 1 / 32, 760))
       for share in (0.5, 0.25, 0.125, 0.0625)},
    **{f"whole blocks on {share:g} of the tokens below 760, no fit": (
        blocks(1 - share, 760, correction=False), (share, 0, 760)) for share in (0.25, 0.0625)},
    **{f"whole blocks on {share:g} of the tokens below 900": (blocks(1 - share, 900), (share, 1 / 32, 900))
       for share in (0.25, 0.0625)},
    **{f"strength {value:g}": (lambda unet, value=value: strength(value)(unet, 1),
                               (16**-value, 1 / 32, 760 + max(0, 4 * value - 3) * 140))
       for value in (0.25, 0.5, 0.75, 1)},
    **{f"strength {value:g}, attention alone": (by_engine((), value), None) for value in (0.25, 0.5, 0.75, 1)},
    "AT-EDM by its abstract, half of the tokens below 760": (
        lambda unet: stacks_of(unet, lambda blocks: Pruned(blocks, 0.5)), (0.5, 0, 760)),
    "AT-EDM by its abstract, a quarter of the tokens below 760": (
        lambda unet: stacks_of(unet, lambda blocks: Pruned(blocks, 0.25)), (0.25, 0, 760)),
    "tomesd .5, attention of the finest level": (lambda unet: tomesd(unet, 2, True, False), None),
    "tomesd .5, attention and MLPs of both levels": (lambda unet: tomesd(unet, 4, True, True), None),
    **{f"every {name} output extrapolated": (lambda unet, every=every: extrapolated(unet, every), None)
       for name, every in (("second", 2), ("third", 3), ("fourth", 4))},
    **{f"EasyCache by its abstract, {threshold:g}": (lambda unet, threshold=threshold: easycache(unet, threshold), None)
       for threshold in (0.05, 0.1, 0.2)},
}  # fmt: skip


# --- modelled time ----------------------------------------------------------------------------------------------------

CARDS = {"3060": (25.6e12, 0.36e12), "4090": (165e12, 0.92e12)}  # float16 products with float32 sums; bytes; a second
SHARES = {"gemm": 0.9, "conv": 0.75, "attention": 0.9}  # of these, that libraries reach
BYTES, LAUNCH = 0.85, 2e-6
SAMPLES, TOKENS, CHANNELS, BLOCKS = 2, 1024, 1280, 60  # SDXL's coarsest level at 1024 px, with guidance
VIEWS = {"view", "_unsafe_view", "expand", "transpose", "t", "permute", "unsqueeze", "squeeze", "slice", "select",
         "as_strided", "split", "chunk", "unbind", "split_with_sizes", "empty", "empty_like", "empty_strided", "alias",
         "detach"}  # fmt: skip


def seconds(kind: str, products: float, moved: float, card: str) -> float:
    """Return a kernel's modelled time. products: multiply-adds, twice. moved: bytes. kind: of `SHARES`, or ""."""
    rate, bandwidth = CARDS[card]
    return max(LAUNCH, products / (rate * SHARES.get(kind, 1)), moved / (bandwidth * BYTES))


class Trace(TorchDispatchMode):
    """The kernels of a call on the meta device: kind, products and bytes of each."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[str, float, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        flat = [t for value in (*args, out) for t in (value if isinstance(value, (list, tuple)) else [value])
                if torch.is_tensor(t)]  # fmt: skip
        products, kind = 0, ""
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            a, b = flat[-3:-1]
            products, kind = 2 * a.numel() * b.shape[-1], "gemm"
        elif name == "convolution":
            products, kind = 2 * out.numel() * args[1][0].numel(), "conv"
        if name not in VIEWS:
            self.kernels.append((kind, products, sum(t.numel() * t.element_size() for t in flat)))
        return out


def call_kernels() -> list[tuple[str, float, float]]:
    """Return the kernels of a call of SDXL at 1024 px, of one picture with its prompt and without."""
    trace, original = Trace(), F.scaled_dot_product_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> Tensor:  # as one kernel, unlike on "meta"
        trace.kernels.append(("attention", 4 * q.numel() * k.shape[-2], 4 * (q.numel() + k.numel())))
        return torch.empty_like(q)

    F.scaled_dot_product_attention = attend
    try:
        _call_sdxl(trace)
    finally:
        F.scaled_dot_product_attention = original
    return trace.kernels


def _call_sdxl(trace: Trace) -> None:
    """Call SDXL's UNet on the meta device in float16."""
    with torch.device("meta"), torch.no_grad():
        unet = models.UNet(models.SHAPES[models.SDXL]).half()
        sides = (4, 128, 128), (77, 2048), (2816,)
        latent, words, vector = (torch.empty(2, *side, dtype=torch.half) for side in sides)
        time = torch.empty(2)
        with trace:
            unet(latent, time, words, vector)


def mlp_kernels(rows: float) -> list[tuple[str, float, float]]:
    """Return the kernels of one MLP of the coarsest level (GEGLU, four times as wide) on so many tokens."""
    n, c = SAMPLES * rows, CHANNELS
    return [("gemm", 16 * n * c * c, 2 * (9 * n * c + 8 * c * c)), ("", 0, 16 * n * c), ("", 0, 24 * n * c),
            ("gemm", 8 * n * c * c, 2 * (5 * n * c + 4 * c * c))]  # fmt: skip


def added_kernels(groups: int, fit: int, matches: float) -> list[tuple[str, float, float]]:
    """Return what merging adds to an MLP. groups: 0 for none. fit: number of exact tokens. matches: new ones a call."""
    n, c, b = TOKENS, CHANNELS, SAMPLES
    kernels = []
    if groups:  # norms, similarities, best of a row, two sorts; means; copies to the members
        kernels = [("", 0, 4 * n * c * matches), ("gemm", n // 2 * (n - n // 4) * c * matches, 2 * n * c * matches),
                   *[("", 0, 9e6 * matches)] * 3, ("", 0, 4 * b * (n + 2 * groups) * c), ("", 0, 4 * b * groups * c),
                   ("", 0, 2 * b * (groups + n) * c)]  # fmt: skip
    if fit:  # differences, samples' products, an inverse by nine steps of Newton's iteration, two thin products, a sum
        kernels += [("", 0, 6 * b * n * c), *[("gemm", 2 * b * fit * fit * c, 4 * b * fit * c)] * 2,
                    *[("gemm", 2 * 8 * b * fit**3, 12 * b * fit * fit)] * 18,  # in float32, an eighth as fast
                    *[("gemm", 2 * b * n * fit * c, 2 * b * n * (c + fit))] * 2, ("", 0, 6 * b * n * c)]  # fmt: skip
    return kernels


@cache
def times_as_fast(share: float, groups: int, fit: int, matches: float) -> dict[str, float]:
    """Return the modelled gain of a whole call by card, if MLPs compute `share` of the tokens."""
    gains, call = {}, call_kernels()
    for card in CARDS:
        whole = sum(seconds(*kernel, card) for kernel in call)
        before, after = (BLOCKS * sum(seconds(*kernel, card) for kernel in kernels) for kernels in (
            mlp_kernels(TOKENS), (mlp_kernels(share * TOKENS) if share else []) + added_kernels(groups, fit, matches)))
        gains[card] = whole / (whole - before + after)
    return gains


def block_kernels(rows: float, queries: float | None = None, cross: float | None = None) -> list:
    """Return the kernels of a block of the coarsest level on `rows` tokens, with other numbers of queries or of
    cross-attention's tokens.
    """
    n, c, b = rows, CHANNELS, SAMPLES
    q, x = queries or rows, cross or rows

    def linear(tokens: float) -> tuple:
        return ("gemm", 2 * b * tokens * c * c, 2 * (2 * b * tokens * c + c * c))

    return [linear(q), linear(n), linear(n), ("attention", 4 * b * q * n * c, 4 * b * (q + n) * c), linear(q),
            linear(x), ("attention", 4 * b * x * 77 * c, 4 * b * x * c), linear(x), *mlp_kernels(rows),
            *[("", 0, 4 * b * n * c)] * 6]  # fmt: skip


def steps_below(steps: int, timestep: float) -> float:
    """Return the share of a picture's steps that are below a timestep."""
    times = [999 - 1000 * step / steps for step in range(steps)]
    return sum(time < timestep for time in times) / steps


def modelled(name: str, steps: int, record: dict) -> dict[str, float] | None:
    """Return the modelled gain of a variant, by card; None if it is not modelled."""
    call = call_kernels()
    whole = {card: sum(seconds(*kernel, card) for kernel in call) for card in CARDS}

    def blocks_saved(before: list, after: list, blocks: int, share: float) -> dict[str, float]:
        saved = {card: blocks * (sum(seconds(*k, card) for k in before) - sum(seconds(*k, card) for k in after))
                 for card in CARDS}  # fmt: skip
        return {card: whole[card] / (whole[card] - share * saved[card]) for card in CARDS}

    if "extrapolated" in name:
        every = {"second": 2, "third": 3, "fourth": 4}[name.split()[1]]
        skipped = sum((step - 3) % every == 0 for step in range(4, steps + 1))
        return dict.fromkeys(CARDS, steps / (steps - skipped))
    if "EasyCache" in name:
        return dict.fromkeys(CARDS, steps / (steps - record["skipped"]))
    if name.endswith("steps, unmerged"):
        return dict.fromkeys(CARDS, steps / int(name.split()[0]))
    work = VARIANTS[name][1]
    if work is None:
        return None
    share, samples, below = work
    plain = [kernel for _ in range(9) for kernel in block_kernels(TOKENS)]
    merged = [kernel for _ in range(9) for kernel in block_kernels(TOKENS * (share + samples))] if share else []
    if share:
        merged += added_kernels(round(share * TOKENS), round(samples * TOKENS), 1.0 if steps <= 8 else 0.5)
    return blocks_saved(plain, merged, BLOCKS // 10, steps_below(steps, below))


# --- command ----------------------------------------------------------------------------------------------------------


def table(record: dict[str, Any]) -> str:
    """Make the Markdown table of a result: means over pictures, and modelled times."""
    lines = []
    for name in dict.fromkeys(row["variant"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["variant"] == name]
        mean = {key: sum(row[key] for row in rows) / len(rows) for key in ("psnr", "ssim", "detail", "share")}
        gain = modelled(name, record["settings"]["steps"], rows[0])
        lines.append([name, f"{mean['psnr']:.1f}", f"{min(row['psnr'] for row in rows):.1f}", f"{mean['ssim']:.3f}",
                      f"{mean['detail']:.2f}",
                      *(report.ABSENT if gain is None else f"{gain[card]:.2f}" for card in CARDS)])  # fmt: skip
    heads = ("variant", "PSNR dB", "least", "SSIM", "detail", *(f"times, {card}" for card in CARDS))
    settings = record["settings"]
    return (f"{settings['steps']} steps, {settings['pictures']} pictures of {settings['model']}, against the same "
            f"steps unmerged; commit {record['commit']}.\n\n{report.markdown(heads, lines, 1)}\n")


def main() -> int:
    """Draw what is missing, keep it, and write and print the table."""
    command = argparse.ArgumentParser(prog="python -m benchmarks.merged_blocks")
    command.add_argument("--steps", type=int, default=8)
    command.add_argument("--pictures", type=int, default=2)
    command.add_argument("--fewer", type=int, nargs="*", default=[], help="also draw in so many steps, unmerged")
    command.add_argument("--variants", nargs="*", help="numbers of variants, from 0 (default: all)", type=int)
    command.add_argument("--model", type=Path, default=MODEL)
    command.add_argument("--output", type=Path, required=True)
    options = command.parse_args()
    torch.set_num_threads(1)
    subject = SceneSubject(options.model, torch.device("cpu"))
    names = [name for place, name in enumerate(VARIANTS) if options.variants is None or place in options.variants]
    names += [f"{steps} steps, unmerged" for steps in options.fewer]
    settings = {"steps": options.steps, "pictures": options.pictures, "model": options.model.name}
    record = {"kind": "merged-blocks", "settings": settings, **results.describe("cpu"), "rows": []}
    if options.output.exists():
        record["rows"] = json.loads(options.output.read_text(encoding="utf-8"))["rows"]
    done = {(row["variant"], row["picture"]) for row in record["rows"]}
    with torch.inference_mode():
        for number in range(options.pictures):
            plain = None
            for name in names:
                if (name, number) in done:
                    continue
                plain = subject.picture(number, options.steps) if plain is None else plain
                Steps.given = Steps.skipped = 0
                steps = int(name.split()[0]) if name.endswith("steps, unmerged") else options.steps
                with VARIANTS[name][0](subject.network) if name in VARIANTS else nullcontext():
                    picture = subject.picture(number, steps)
                share = Steps.computed / Steps.given if Steps.given else 1.0
                record["rows"].append({
                    "variant": name, "picture": number, "psnr": round(min(psnr(plain, picture), 99), 2),
                    "ssim": round(ssim(plain, picture), 4), "share": round(share, 4),
                    "detail": round(gradient_energy(picture) / gradient_energy(plain), 4),
                    "skipped": Steps.skipped})  # fmt: skip
                results.save(record, options.output)
                print(*record["rows"][-1].values(), flush=True)
    text = table(record)
    options.output.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
