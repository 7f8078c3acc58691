"""The rows of ``benchmarks.gpu``: the device and its attention functions, laws, the kernels' tests, and times."""

import importlib
import importlib.util
import itertools
import math
import statistics
import subprocess  # noqa: TID251 - the project's own tests of its kernels run in a process of their own
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tome_core
from benchmarks import models, timing
from benchmarks.results import ROOT
from benchmarks.timing import Run
from tome_core.merging import kernels
from tome_core.patching import curve_of

UNMERGED, TOMESD, STRENGTHS, STEPS = "unmerged", "tomesd", ("balanced", "max"), 20
ALONE, ON_AND_OFF = "attention alone", "put on and off"  # ways of `balanced`
# match -> timesteps of calls, in turn; all below 760, where `balanced` merges SDXL's whole blocks too
WHEN = {"new": (700.0,), "renewed": (700.0, 620.0), "kept": (700.0, 690.0)}
HOW = {"cudagraphs": "reduce-overhead", "compiled": None}  # modes of torch.compile; "" as a key: not compiled
ROW = "the row"  # the name of a row that failed as a whole among its failures
_BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
KERNEL_LAWS = "tests/kernels/laws.py"


class OutOfTime(Exception):
    """The error for a row that would not end before `Bench.end`."""


class Patched:
    """A network, patched in place and compiled as `HOW` says. way: `UNMERGED`; `TOMESD` at half the tokens of the
    finest level with attention; a strength's name; or `balanced` without whole blocks (`ALONE`), or put on before each
    call and taken off after it (`ON_AND_OFF`): our ComfyUI node does, though it looks through the model only once.
    `handle`: the engine's patch or None; `network`: the callable.
    """

    def __init__(self, network: nn.Module, way: str, how: str = "") -> None:
        self.handle, self._is_put_on = None, way == ON_AND_OFF
        if way == TOMESD:
            finest = 2 if hasattr(network, "label_emb") else 1  # SDXL has no attention at the latent's own size
            as_ldms = nn.Module()
            as_ldms.model = nn.Module()
            as_ldms.model.diffusion_model = network
            importlib.import_module("tomesd").apply_patch(as_ldms, ratio=0.5, max_downsample=finest)
        elif way != UNMERGED:
            self.handle = tome_core.patch(network, _settings(network, way), host_clock=True)
            self.handle.pays = None  # coarser levels go by their tokens on every card, without an estimate
        self.network = torch.compile(network, dynamic=False, mode=HOW[how]) if how else network

    def call(self, arguments: tuple, times: tuple[float, ...] = WHEN["new"]) -> Run:
        """Make a function that calls the network once with these arguments, at `times` in turn: timesteps as in `WHEN`.
        Its first call makes a match of tokens; later calls make a new match, each in a sampling of its own, if there is
        one timestep; else all are in one sampling. `times` change nothing without the engine's patch."""
        numbers, sampling = itertools.count(), object()
        return lambda: self._step(arguments, times[next(numbers) % len(times)], sampling if times[1:] else object())

    def steps(self, arguments: tuple) -> Run:
        """Make a function, each call a new sampling: `STEPS` equal network calls; the patch gets falling timesteps."""
        def run() -> None:
            sampling = object()
            for number in range(STEPS):
                self._step(arguments, 999.0 - 1000 / STEPS * number, sampling)

        return run

    def _step(self, arguments: tuple, timestep: float, sampling: object) -> Any:
        """Tell the engine's patch, if any, the timestep and the sampling's object; return what the network gives."""
        if self.handle is not None:
            self.handle.set_time(timestep=timestep, sampling=sampling, pictures=1)
        if self._is_put_on:
            self.handle.install().pays = None
        answer = self.network(*arguments)
        if self._is_put_on:
            self.handle.uninstall()
        return answer

    def said(self) -> str:
        """Return the report of the engine's patch on one line, without its settings."""
        report = replace(self.handle.report(), settings=())
        return "; ".join([report.headline, *(" ".join(line.split()) for line in report.lines()[1:])])


def _settings(network: nn.Module, way: str) -> tome_core.MergeConfig:
    """Return the settings of a way that merges, but the finest level and whole blocks merge however few their tokens
    are: whether that pays is the question. The error of random weights, which is larger than that of trained ones, is
    not bounded."""
    config = replace(tome_core.preset(way if way in STRENGTHS else STRENGTHS[0], curve_of(network)), max_error=None)
    attention, *blocks = config.rules
    at_finest = replace(attention, max_downsample=None, only_if_it_pays=False)
    blocks = [replace(rule, only_if_it_pays=False) for rule in blocks if way != ALONE]
    return replace(config, rules=(at_finest, attention, *blocks))


class Bench:
    """A device, "cuda" in float16 or "cpu" in float32 with tiny networks, and one network with its patched copies. end:
    the ``time.monotonic`` when work must end."""

    def __init__(self, device: str, end: float) -> None:
        self.device, self.end, self.tiny = device, end, device == "cpu"
        self.dtype = torch.float32 if self.tiny else torch.float16
        self._networks: dict[Any, Any] = {}  # the network in memory by its name, its twins by (how, way)

    @property
    def left(self) -> float:
        """The seconds until the end of all work, negative after it."""
        return self.end - time.monotonic()

    def network(self, name: str) -> nn.Module:
        """Return the unpatched network of this name of `models.NAMES`; a new name frees the last one and its copies."""
        if name not in self._networks:
            self._networks.clear()
            timing.free(self.device)
            self._networks[name] = models.make(name, self.device, self.dtype, self.tiny)
        return self._networks[name]

    def inputs(self, name: str, pixels: int) -> tuple[torch.Tensor, ...]:
        """Draw `models.inputs`, always the same: x for a picture `pixels` a side, twice; times, prompts, a vector."""
        return models.inputs(name, pixels, self.device, self.dtype, self.tiny)

    def patched_copy(self, name: str, how: str, way: str) -> Patched:
        """Return a weight-sharing copy of a network, patched in a `way` of `Patched`, kept as long as the network."""
        network, key = self.network(name), (how, way)
        if key not in self._networks:
            self._networks[key] = Patched(models.copy_sharing_weights(network), way, how)
        return self._networks[key]

    def compare(self, makers: dict[str, Callable[[], Run]], single: bool = False) -> dict[str, Any]:
        """Time several runs in turns; raise OutOfTime if these would not end in time.

        makers: name -> a function that makes the run. single: a turn is one timed run; else an untimed run, then the
        mean of 1 to 10. Returns ``of``: name -> a dict of ``ms`` of a run (the median of the turns), ``least`` and
        ``most``, on a GPU without `single` also what `timing.card_work` gives and ``peak_mib``; and ``failed``: name ->
        the reason why its first run failed. A failed name is in ``failed`` alone.
        """
        runs, failed, once = {}, {}, 0.0
        for name, make in makers.items():
            try:
                run = make()
                if not single:
                    run()
                spent = timing.seconds(run, self.device)
                runs[name] = run
            except Exception as error:
                failed[name] = timing.reason(error)
            if name in failed:  # outside of the handler, whose traceback keeps the tensors of the failed call alive
                timing.free(self.device)
            elif not once:
                once = spent
                if once * len(makers) * (3 if single else 8) > self.left:
                    raise OutOfTime
        calls = 1 if single or self.tiny else max(1, min(10, int(0.3 / max(once, 1e-3))))

        def turn(run: Run) -> float:
            if not single:  # the variant before may have replaced what was kept for this one
                run()
            return timing.seconds(run, self.device, calls)

        rounds = 2 if single else 3 if self.tiny or once > 0.3 else 5  # long runs differ little
        times = timing.in_turns(runs, rounds, turn, self.end)
        figures = {name: {"ms": 1e3 * statistics.median(taken), "least": 1e3 * min(taken), "most": 1e3 * max(taken)}
                   for name, taken in times.items()}  # fmt: skip
        if not (single or self.tiny):
            for name, run in runs.items():
                figures[name] |= {**timing.card_work(run), "peak_mib": timing.cuda_peak(run)}
        return {"of": figures, "failed": failed}


def calls(bench: Bench, name: str, pixels: int, how: str = "", more: tuple[str, ...] = ()) -> dict[str, Any]:
    """Time calls of a network, for a picture `pixels` a side, in turns; return what `_in_turns` gives.

    Its names: "unmerged"; "tomesd" if not compiled; and by ``balanced`` "renewed" and "kept", see `Patched.call`. For
    each other way in `more` there are two such names, as "max, kept". how: a key of `HOW`, or "".
    """
    arguments = bench.inputs(name, pixels)
    if how:
        torch.compiler.reset()  # or graphs of earlier rows stay in memory
    variants = {way: (way, "new") for way in (UNMERGED, *(() if how else (TOMESD,)))}
    for way in (STRENGTHS[0], *more):
        before = "" if way == STRENGTHS[0] else f"{way}, "
        variants |= {f"{before}{when}": (way, when) for when in ("renewed", "kept")}
    return _in_turns(bench, name, how, {row: (way, lambda patched, when=when: patched.call(arguments, WHEN[when]))
                                        for row, (way, when) in variants.items()})  # fmt: skip


def sampling(bench: Bench, name: str, pixels: int) -> dict[str, Any]:
    """Time samplings of `STEPS` calls, "unmerged", "balanced" and "max"; return what `_in_turns` gives."""
    arguments = bench.inputs(name, pixels)
    ways = {way: (way, lambda patched: patched.steps(arguments)) for way in (UNMERGED, *STRENGTHS)}
    return _in_turns(bench, name, "", ways, single=True)


def _in_turns(bench: Bench, name: str, how: str, variants: dict[str, tuple[str, Callable[[Patched], Run]]],
              single: bool = False) -> dict[str, Any]:  # fmt: skip
    """Return what `Bench.compare` gives for variants of a network: name -> (way, what makes the patched one's run); and
    ``merging``: way -> its report. With CUDA graphs also ``graphs skipped``, the graphs that torch ran without them."""
    merged, counters = {}, torch._dynamo.utils.counters["inductor"] if how else Counter()
    before = counters["cudagraph_skips"]

    def make(way: str, run_of: Callable[[Patched], Run]) -> Run:
        patched = bench.patched_copy(name, how, way)
        if patched.handle is not None:
            patched.handle.reset_counts()
            merged[way] = patched
        return run_of(patched)

    row = bench.compare({key: partial(make, *variant) for key, variant in variants.items()}, single)
    row["merging"] = {way: patched.said() for way, patched in merged.items()}
    if HOW.get(how):
        row["graphs skipped"] = counters["cudagraph_skips"] - before
    return row


def device(bench: Bench) -> dict[str, Any]:
    """Describe what the device offers, and time torch's attention functions on it.

    Returns ``triton``, a version or None; ``capability``, as ``9.0``, None on a CPU; ``kernels``, a text on the
    engine's kernels; and ``attention, ms``: function -> the least ms, or why it fails.
    """
    tokens = {"cpu": 256, "cuda": 4096}[bench.device]
    qkv = [torch.randn(2, 8, tokens, 64, device=bench.device, dtype=bench.dtype) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each backend says at length what it cannot do
        attention = {f"torch {name.lower()}": _attempt(name, qkv, bench.device) for name in _BACKENDS}
    in_use = kernels.available(torch.device(bench.device))
    return {"triton": importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None,
            "capability": ".".join(map(str, torch.cuda.get_device_capability())) if bench.device != "cpu" else None,
            "kernels": "; ".join(kernels.notes()) or ("in use" if in_use else "none for this device"),
            "attention, ms": attention}  # fmt: skip


def _attempt(name: str, qkv: list[torch.Tensor], device: str) -> float | str:
    """Return the least ms of torch's attention of q, k, v ``[B, H, N, d]`` by one of `_BACKENDS`, or why it fails."""
    try:
        with sdpa_kernel(getattr(SDPBackend, name)):
            return 1e3 * min(timing.seconds(partial(F.scaled_dot_product_attention, *qkv), device) for _ in range(4))
    except Exception as error:
        return timing.reason(error)


def kernel_laws(bench: Bench) -> dict[str, Any]:
    """Run the project's tests of its kernels by pytest. Raises OutOfTime if they last until `Bench.end`.

    Returns ``hold``, a bool, ``said``, pytest's last line, and if tests fail ``log``, the end of the output; but
    without kernels or pytest ``skipped``, the reason.
    """
    if not kernels.available(torch.device(bench.device)):
        return {"skipped": "; ".join(kernels.notes()) or "no kernels for this device"}
    if importlib.util.find_spec("pytest") is None:
        return {"skipped": "pytest is not installed: pip install pytest"}
    try:
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", KERNEL_LAWS], cwd=ROOT,
                              capture_output=True, text=True, check=False, timeout=max(1.0, bench.left))  # fmt: skip
    except subprocess.TimeoutExpired:
        raise OutOfTime from None
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
    log = {"log": done.stdout[-4000:]} if done.returncode else {}
    return {"hold": done.returncode == 0, "said": lines[-1], **log}


def laws(bench: Bench, name: str, pixels: int) -> dict[str, Any]:
    """Check laws of calls of a network that ``balanced`` merges; return a value for each law, by a name that states it.

    A value is True if the statement holds, else False. But "a kept step waits" has the traceback of a wait for the GPU,
    or False; and names with "change" have the relative distance of two results that `_share` gives.
    """
    network, arguments = bench.network(name), bench.inputs(name, pixels)
    expected = network(*arguments)
    with sdpa_kernel(SDPBackend.MATH):
        otherwise = _share(network(*arguments), expected, expected)
    merged = Patched(models.copy_sharing_weights(network), "balanced")
    new, kept = merged.call(arguments), merged.call(arguments, WHEN["kept"])
    answers = [new() for _ in range(10)]
    with kernels.kernels_off():
        without = new()
    kept()
    kept()
    waits = _waits(kept, bench.device)
    merged.handle.remove()
    return {"equal bits in ten runs": all(torch.equal(answer, answers[0]) for answer in answers),
            "a kept step waits": waits,
            "removed, the bits of the unmerged call": torch.equal(merged.network(*arguments), expected),
            "finite": bool(torch.isfinite(answers[0]).all()), "merging changes": _share(answers[0], expected, expected),
            "kernels change": _share(answers[0], without, expected),
            "another attention function of torch's changes": otherwise}  # fmt: skip


def _share(answer: torch.Tensor, other: torch.Tensor, whole: torch.Tensor) -> float | str:
    """Return the norm of ``answer - other`` over the norm of `whole`, as text, such as ``nan``, if it is not finite."""
    share = ((answer.float() - other.float()).norm() / whole.float().norm()).item()
    return share if math.isfinite(share) else str(share)  # JSON has no number for it


def _waits(run: timing.Run, device: str) -> str | bool:
    """Return the end of the traceback of the line at which a run waits for the GPU; False if it does not wait.

    A CPU never waits. Any other RuntimeError of the run, also on a CPU, is returned in the same way.
    """
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError:
        return traceback.format_exc()[-600:]
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return False
