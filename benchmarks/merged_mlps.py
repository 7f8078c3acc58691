"""``python -m benchmarks.merged_mlps``: what a UNet's pictures lose if MLPs of its coarsest level see fewer tokens.

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
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import models, report, results
from benchmarks.subjects import SceneSubject
from benchmarks.variants import strength
from demo.metrics import gradient_energy, psnr, ssim
from tome_core.models.unet_blocks import find_blocks

MODEL = results.ROOT / "demo" / "scenes-sdxl-deep.safetensors"
RIDGE = 0.1  # of the samples' mean square


class Steps:
    """The solver step and timestep of a UNet's call, and the tokens that MLPs computed, of all that they were given."""

    step, timestep, computed, given = -1, 1000.0, 0, 0


def group(x: Tensor, ratio: float, draw: torch.Generator, random: bool) -> tuple[Tensor, Tensor]:
    """Merge a share of tokens ``[N, C]`` to their nearest of one token a 2x2 cell; return groups ``[N]`` and sizes."""
    tokens, side = len(x), math.isqrt(len(x))
    cells = torch.arange(tokens).view(side // 2, 2, side // 2, 2).permute(0, 2, 1, 3).reshape(tokens // 4, 4)
    kept = cells.gather(1, torch.randint(4, (tokens // 4, 1), generator=draw)).flatten()
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

    def __init__(self, original: Callable, ratio: float, fit: float = 0.0, random: bool = False,
                 when: Callable[[float], bool] = lambda timestep: True, keep: int = 1):  # fmt: skip
        self.original, self.ratio, self.fit, self.random = original, ratio, fit, random
        self.when, self.keep, self.draw, self.made = when, keep, torch.Generator().manual_seed(0), None

    def __call__(self, x: Tensor) -> Tensor:
        if not self.when(Steps.timestep):
            Steps.computed += x.shape[1]
            return self.original(x)
        if self.made is None or not 0 <= Steps.step - self.made[0] < self.keep:  # of the prompt's half for both
            self.made = (Steps.step, *group(x[0], self.ratio, self.draw, self.random))
        _, groups, sizes = self.made
        means = x.new_zeros(len(x), len(sizes), x.shape[2]).index_add_(1, groups, x) / sizes[:, None]
        places = (sizes[groups] > 1).nonzero().flatten()
        count = min(round(self.fit * x.shape[1]), len(places))
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


def late(timestep: float) -> bool:
    """Tell whether a step is in the less noisy half of the schedule."""
    return timestep < 500


def merged(ratio: float, **more: Any) -> Callable:
    """Make a variant: a UNet -> a context manager in which its MLPs are `MergedMlp`."""
    return lambda unet: mlps(unet, lambda original: MergedMlp(original, ratio, **more))


VARIANTS: dict[str, Callable[[nn.Module], AbstractContextManager]] = {
    "MLPs set to zero (control)": lambda unet: mlps(unet, constant("zero")),
    "the mean token's output for all (control)": lambda unet: mlps(unet, constant("mean")),
    "half merged, random partners (control)": merged(0.5, random=True),
    "half merged": merged(0.5), "half merged, in late steps": merged(0.5, when=late),
    **{f"{name} merged, fit on 1/{parts}": merged(ratio, fit=1 / parts)
       for name, ratio in (("a quarter", 0.25), ("half", 0.5), ("three quarters", 0.75)) for parts in (64, 16, 8)},
    "three quarters merged": merged(0.75),
    "three quarters merged, fit on 1/16, match kept for 2 steps": merged(0.75, fit=1 / 16, keep=2),
    **{f"{share} of the tokens computed, those that changed most, fit on these": (
        lambda unet, share=share: mlps(unet, lambda original: KeptMlp(original, share)))
       for share in (0.125, 0.25, 0.5)},
    "ToMA by its abstract, half": lambda unet: mlps(unet, lambda original: SoftMlp(original, 0.5)),
    "tomesd .5, attention of the finest level": lambda unet: tomesd(unet, 2, True, False),
    "tomesd .5, MLPs of both levels": lambda unet: tomesd(unet, 4, False, True),
    "tomesd .5, attention and MLPs of both levels": lambda unet: tomesd(unet, 4, True, True),
    **{f"attention by strength {value:g}": lambda unet, value=value: strength(value)(unet, 1)
       for value in (0.25, 0.5, 0.75, 1)},
    **{f"every {name} output extrapolated": lambda unet, every=every: extrapolated(unet, every)
       for name, every in (("second", 2), ("third", 3), ("fourth", 4))},
}  # fmt: skip


@contextmanager
def both(unet: nn.Module, value: float, make: Callable) -> Iterator[None]:
    """Merge attention by a strength, and MLPs by a variant of `merged`."""
    with strength(value)(unet, 1), make(unet):
        yield


VARIANTS |= {
    f"attention by strength {value:g}, and {name}": (
        lambda unet, value=value, name=name: both(unet, value, VARIANTS[name]))
    for value, name in ((0.5, "half merged, fit on 1/16"), (0.5, "three quarters merged, fit on 1/16"),
                        (0.75, "three quarters merged, fit on 1/16"), (1, "three quarters merged, fit on 1/64"))
}


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


def modelled(name: str, share: float) -> dict[str, float] | None:
    """Return `times_as_fast` of a variant of the MLPs alone, by its name and the share that it computed; else None."""
    if any(word in name for word in ("tomesd", "attention", "extrapolated", "ToMA", "unmerged", "late")):
        return None
    parts = int(name.split("fit on 1/")[1].split(",")[0]) if "fit on 1/" in name else 0
    kept = "computed" in name
    fit = 128 if kept else TOKENS // parts if parts else 0
    groups = 0 if kept or "control" in name else round(share * TOKENS) - fit
    return times_as_fast(share, groups, fit, 0.5 if "kept" in name else 1.0)


# --- command ----------------------------------------------------------------------------------------------------------


def table(record: dict[str, Any]) -> str:
    """Make the Markdown table of a result: means over pictures, and modelled times."""
    lines = []
    for name in dict.fromkeys(row["variant"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["variant"] == name]
        mean = {key: sum(row[key] for row in rows) / len(rows) for key in ("psnr", "ssim", "detail", "share")}
        gain = modelled(name, mean["share"])
        lines.append([name, f"{mean['psnr']:.1f}", f"{min(row['psnr'] for row in rows):.1f}", f"{mean['ssim']:.3f}",
                      f"{mean['detail']:.2f}", f"{mean['share']:.2f}",
                      *(report.ABSENT if gain is None else f"{gain[card]:.2f}" for card in CARDS)])  # fmt: skip
    heads = ("variant", "PSNR dB", "least", "SSIM", "detail", "MLP tokens", *(f"times, {card}" for card in CARDS))
    settings = record["settings"]
    return (f"{settings['steps']} steps, {settings['pictures']} pictures of {settings['model']}, against the same "
            f"steps unmerged; commit {record['commit']}.\n\n{report.markdown(heads, lines, 1)}\n")


def main() -> int:
    """Draw what is missing, keep it, and write and print the table."""
    command = argparse.ArgumentParser(prog="python -m benchmarks.merged_mlps", description=__doc__.partition("\n\n")[0])
    command.add_argument("--steps", type=int, default=8)
    command.add_argument("--pictures", type=int, default=2)
    command.add_argument("--fewer", type=int, nargs="*", default=[], help="also draw in so many steps, unmerged")
    command.add_argument("--variants", nargs="*", help="numbers of variants, from 0 (default: all)", type=int)
    command.add_argument("--output", type=Path, required=True)
    options = command.parse_args()
    torch.set_num_threads(1)
    subject = SceneSubject(MODEL, torch.device("cpu"))
    names = [name for place, name in enumerate(VARIANTS) if options.variants is None or place in options.variants]
    names += [f"{steps} steps, unmerged" for steps in options.fewer]
    settings = {"steps": options.steps, "pictures": options.pictures, "model": MODEL.name}
    record = {"kind": "merged-mlps", "settings": settings, **results.describe("cpu"), "rows": []}
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
                Steps.given = 0
                steps = int(name.split()[0]) if name.endswith("steps, unmerged") else options.steps
                with VARIANTS[name](subject.network) if name in VARIANTS else nullcontext():
                    picture = subject.picture(number, steps)
                share = Steps.computed / Steps.given if Steps.given else 1.0
                record["rows"].append({
                    "variant": name, "picture": number, "psnr": round(psnr(plain, picture), 2),
                    "ssim": round(ssim(plain, picture), 4), "share": round(share, 4),
                    "detail": round(gradient_energy(picture) / gradient_energy(plain), 4)})  # fmt: skip
                results.save(record, options.output)
                print(record["rows"][-1], flush=True)
    text = table(record)
    options.output.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
