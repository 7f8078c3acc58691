"""Launches of compiled kernels without Triton's work in Python for each launch, which takes the host longer.

At each launch, Triton binds some twenty arguments by name, specialises them and looks the compiled variant up. Here the
variant is found by what Triton specialises on, and launched as Triton does. If anything is not as known from Triton 3.0
to 3.9, Triton launches.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

_log = logging.getLogger(__name__)
_MOST = 4096  # variants of a kernel, about 4 MB; new pictures' sizes make new ones
_BACKENDS = ("cuda", "hip")  # Triton's compilers of which it is known what they specialise on
_COUNTS_SIZES = torch.version.hip is not None  # AMD's compiler has variants for memory below 2 GiB
_hooks = triton.knobs.runtime if hasattr(triton, "knobs") else triton.compiler.CompiledKernel
why_off = ""  # the reason why Triton launches all kernels until the process ends


class Direct:
    """A decorator of a kernel, which is then launched as one of Triton: ``kernel[grid](*arguments, **constants)``.

    `arguments` are tensors or None, then numbers; `constants` are the kernel's constants and Triton's options. All
    tensors have to be on the current device. A variant's first launch is direct too, so the check of a kernel's first
    result checks the launch as well. While a profiler has hooks on launches, or on this kernel, Triton launches it. Its
    settings are those of a variant's first launch.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.variants, self.tensors = kernel, {}, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Return a function that launches the kernel on a grid of programs with 1 to 3 axes."""
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if why_off or _is_watched() or self.kernel.pre_run_hooks:
            self.kernel[grid](*arguments, **constants)
            return
        split = self.tensors = self.tensors or sum(each is None or isinstance(each, Tensor) for each in arguments)
        tensors, numbers = arguments[:split], arguments[split:]
        places = [each if each is None else each.data_ptr() for each in tensors]
        # Numbers are compared with their types, for 1 and 1.0 are equal. 16 bytes are the alignment that counts.
        key = (numbers, tuple(map(type, numbers)), tuple(constants.items()), tuple([
            each if each is None else (place & 15, each.dtype, each.get_device())
            for each, place in zip(tensors, places)  # noqa: B905 - lists of one length, and each launch waits
        ]))  # fmt: skip
        if _COUNTS_SIZES:
            key += (tuple([each is not None and each.untyped_storage().nbytes() < 2**31 for each in tensors]),)
        variant = self.variants.get(key)
        if variant is None:
            self._launch_first(key, grid, arguments, constants)
        else:
            _run(variant, grid, tensors[0].get_device(), (*places, *numbers))

    def _launch_first(self, key: tuple, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]) -> None:
        """Compile a variant, launch it as Triton does, and keep it as `key`. If this fails, Triton launches.

        If Triton does not fail, it launches all kernels from then on: `why_off` says why. `arguments` have tensors, not
        their addresses, so that Triton sees the alignment.
        """
        global why_off
        try:
            variant = self._variant(grid, arguments, constants)
            _run(variant, grid, arguments[0].get_device(), arguments)
        except Exception as error:
            self.kernel[grid](*arguments, **constants)  # an error that is not of the direct way is raised here again
            why_off = f"{type(error).__name__}: {error}"
            _log.debug("Triton launches its kernels, which takes longer: %s", why_off)
            return
        if len(self.variants) >= _MOST:
            self.variants.clear()
        self.variants[key] = variant

    def _variant(self, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]) -> tuple:
        """Return Triton's compiled kernel, what launches it, and the constants that this takes after the arguments."""
        compiled = self.kernel.warmup(*arguments, grid=grid, **constants)
        if compiled.metadata.target.backend not in _BACKENDS:
            raise NotImplementedError(f"a backend that is not known: {compiled.metadata.target.backend}")
        names, taken = self.kernel.arg_names, len(compiled.src.signature)
        if taken not in (len(arguments), len(names)):
            raise NotImplementedError(f"the launcher takes {taken} of {len(names)} arguments")
        rest = [constants[name] for name in names[len(arguments) : taken]]  # Triton 3.3 and newer take constants too
        return compiled, compiled.run, compiled.function, compiled.packed_metadata, rest


def direct(kernel: Any) -> Any:
    """Return a `Direct` of a kernel that Triton compiles, else the kernel: Triton's interpreter compiles none."""
    return Direct(kernel) if isinstance(kernel, JITFunction) else kernel


def _is_watched() -> bool:
    """Return whether a profiler has a hook on launches. Else hooks are None or, in Triton 3.5 and newer, no calls."""
    enter, leave = _hooks.launch_enter_hook, _hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _run(variant: tuple, grid: tuple[int, ...], device: int, arguments: tuple) -> None:
    """Launch a variant on the device's current stream, as Triton does; tensors may be addresses."""
    _, run, function, packed, rest = variant
    stream = driver.active.get_current_stream(device)
    run(*(*grid, 1, 1)[:3], stream, function, packed, None, None, None, *arguments, *rest)
