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
WHEN = {"new": (900.0,), "renewed": (900.0, 800.0), "kept": (900.0, 890.0)}  # match -> timesteps of calls, in turn
ROW = "the row"  # the name of a row that failed as a whole among its failures
_BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
KERNEL_LAWS = "tests/kernel_laws.py"


class OutOfTime(Exception):
    """The error for a row that would not end before `Bench.end`."""


class Patched:
    """A network, patched in place and compiled if `compiled`. way: `UNMERGED`, a strength's name, or `TOMESD` at half
    the tokens of the finest level with attention. `handle`: the engine's patch or None; `network`: the callable.
    """

    def __init__(self, network: nn.Module, way: str, compiled: bool = False) -> None:
        self.handle = None
        if way == TOMESD:
            finest = 2 if hasattr(network, "label_emb") else 1  # SDXL has no attention at the latent's own size
            as_ldms = nn.Module()
            as_ldms.model = nn.Module()
            as_ldms.model.diffusion_model = network
            importlib.import_module("tomesd").apply_patch(as_ldms, ratio=0.5, max_downsample=finest)
        elif way != UNMERGED:
            self.handle = tome_core.patch(network, _settings(network, way), host_clock=True)
            self.handle.pays = None  # coarser levels go by their tokens on every card, without an estimate
        if compiled:  # each variant at each size is a graph of its own; the compiler gives up after eight
            limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
            setattr(torch._dynamo.config, limit, 256)
        self.network = torch.compile(network, dynamic=False) if compiled else network

    def call(self, arguments: tuple, when: str = "new") -> Run:
        """Make a function that calls the network once with these arguments. Its first call makes a match of tokens;
        later calls make a ``new`` match, each in a sampling of its own, or in one sampling make a ``renewed`` match, or
        use the one that is there (``kept``). `when` changes nothing without the engine's patch."""
        numbers, times, sampling = itertools.count(), WHEN[when], object()
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
        return self.network(*arguments)


def _settings(network: nn.Module, way: str) -> tome_core.MergeConfig:
    """Return a strength's settings, by its name, but the finest level merges however few its tokens are: whether that
    pays is the question. The error of random weights, which is larger than that of trained ones, is not bounded."""
    config = replace(tome_core.preset(way, curve_of(network)), max_error=None)
    at_finest = replace(config.rules[0], max_downsample=None, only_if_it_pays=False)
    return replace(config, rules=(at_finest, *config.rules))


class Bench:
    """A device, "cuda" in float16 or "cpu" in float32 with tiny networks, and one network with its patched copies. end:
    the ``time.monotonic`` when work must end."""

    def __init__(self, device: str, end: float) -> None:
        self.device, self.end, self.tiny = device, end, device == "cpu"
        self.dtype = torch.float32 if self.tiny else torch.float16
        self._networks: dict[Any, Any] = {}  # the network in memory by its name, its twins by (compiled, way)

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

    def patched_copy(self, name: str, compiled: bool, way: str) -> Patched:
        """Return a weight-sharing copy of a network, patched in a `way` of `Patched`, kept as long as the network."""
        network, key = self.network(name), (compiled, way)
        if key not in self._networks:
            self._networks[key] = Patched(models.copy_sharing_weights(network), way, compiled)
        return self._networks[key]

    def compare(self, makers: dict[str, Callable[[], Run]], single: bool = False) -> dict[str, Any]:
        """Time several runs in turns; raise OutOfTime if these would not end in time.

        makers: name -> a function that makes the run. single: a turn is one timed run; else an untimed run, then the
        mean of 1 to 10. Returns ``of``: name -> a dict of ``ms`` of a run (the median of the turns), ``least`` and
        ``most``, on a GPU without `single` also ``card_ms``, ``launches`` and ``peak_mib``; and ``failed``: name -> the
        reason why its first run failed. A failed name is in ``failed`` alone.
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
                if once * len(makers) * (2 if single else 8) > self.left:
                    raise OutOfTime
        calls = 1 if single or self.tiny else max(1, min(10, int(0.3 / max(once, 1e-3))))

        def turn(run: Run) -> float:
            if not single:  # the variant before may have replaced what was kept for this one
                run()
            return timing.seconds(run, self.device, calls)

        times = timing.in_turns(runs, 3 if single or self.tiny else 5, turn, self.end)
        figures = {name: {"ms": 1e3 * statistics.median(taken), "least": 1e3 * min(taken), "most": 1e3 * max(taken)}
                   for name, taken in times.items()}  # fmt: skip
        if not (single or self.tiny):
            for name, run in runs.items():
                figures[name] |= {**timing.card_work(run), "peak_mib": timing.cuda_peak(run)}
        return {"of": figures, "failed": failed}


def calls(bench: Bench, name: str, pixels: int, compiled: bool = False) -> dict[str, Any]:
    """Time calls of a network, for a picture `pixels` a side, in turns; return what `Bench.compare` gives.

    Its names: "unmerged", "tomesd", and by ``balanced`` "new", "renewed" and "kept", see `Patched.call`.
    """
    arguments = bench.inputs(name, pixels)
    ways = {**{way: (way, "new") for way in (UNMERGED, TOMESD)}, **{when: (STRENGTHS[0], when) for when in WHEN}}
    return bench.compare({row: lambda way=way, when=when: bench.patched_copy(name, compiled, way).call(arguments, when)
                          for row, (way, when) in ways.items()})  # fmt: skip


def sampling(bench: Bench, name: str, pixels: int, compiled: bool = False) -> dict[str, Any]:
    """Time samplings of `STEPS` calls, "unmerged", "tomesd", "balanced", "max"; return what `Bench.compare` gives."""
    arguments = bench.inputs(name, pixels)
    return bench.compare({way: lambda way=way: bench.patched_copy(name, compiled, way).steps(arguments)
                          for way in (UNMERGED, TOMESD, *STRENGTHS)}, single=True)  # fmt: skip


def device(bench: Bench) -> dict[str, Any]:
    """Describe what the device offers, and time attention functions of torch and of packages on it.

    Returns ``triton``, a version or None; ``capability``, as ``9.0``, None on a CPU; ``kernels``, a text on the
    engine's kernels; and ``attention, ms``: function -> the least ms, or why it fails.
    """
    tokens = {"cpu": 256, "cuda": 4096}[bench.device]
    qkv = [torch.randn(2, 8, tokens, 64, device=bench.device, dtype=bench.dtype) for _ in range(3)]
    functions = {f"torch {name.lower()}": partial(_by_backend, name) for name in _BACKENDS} | _PACKAGES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each backend says at length what it cannot do
        attention = {name: _attempt(partial(attend, *qkv), bench.device) for name, attend in functions.items()}
    in_use = kernels.available(torch.device(bench.device))
    return {"triton": importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None,
            "capability": ".".join(map(str, torch.cuda.get_device_capability())) if bench.device != "cpu" else None,
            "kernels": "; ".join(kernels.notes()) or ("in use" if in_use else "none for this device"),
            "attention, ms": attention}  # fmt: skip


def _attempt(run: Run, device: str) -> float | str:
    """Return the least ms of three runs after an untimed one, or why it fails, such as ``not installed``."""
    try:
        run()
        return 1e3 * min(timing.seconds(run, device) for _ in range(3))
    except ImportError:
        return "not installed"
    except Exception as error:
        return timing.reason(error)


def _by_backend(name: str, *qkv: torch.Tensor) -> torch.Tensor:
    """Compute torch's attention of q, k, v ``[B, H, N, d]`` by one of `_BACKENDS`. Raises RuntimeError if it cannot."""
    with sdpa_kernel(getattr(SDPBackend, name)):
        return F.scaled_dot_product_attention(*qkv)


def _tokens_first(module: str, function: str, *qkv: torch.Tensor) -> torch.Tensor:
    """Transpose q, k, v ``[B, H, N, d]`` for a package's function, and return its result, ``[B, N, H, d]``."""
    return getattr(importlib.import_module(module), function)(*(tensor.transpose(1, 2) for tensor in qkv))


_PACKAGES = {"xformers": partial(_tokens_first, "xformers.ops", "memory_efficient_attention"),
             "flash_attn": partial(_tokens_first, "flash_attn", "flash_attn_func"),
             "sageattention": lambda *qkv: importlib.import_module("sageattention").sageattn(*qkv, tensor_layout="HND")}


def kernel_laws(bench: Bench) -> dict[str, Any]:
    """Run the project's tests of its kernels by pytest. Raises OutOfTime if they last until `Bench.end`.

    Returns ``hold``, a bool, ``said``, pytest's last line, and if tests fail ``log``, the end of the output; but
    without kernels or pytest ``skipped`` alone, the reason.
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
    new, kept = merged.call(arguments, "new"), merged.call(arguments, "kept")
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
