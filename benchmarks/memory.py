"""Peak memory of one call, and why a call failed."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

_MIB = 2**20
OUT_OF_MEMORY = "out of memory"
_SAID_SO = (OUT_OF_MEMORY, "can't allocate memory", "not enough memory")


class CallFailed(RuntimeError):
    """Of a call in another process; the message is its `reason`."""


def reason(error: BaseException) -> str:
    """Why a call failed, in a few words: ``out of memory``, or the error."""
    text = str(error).strip()
    if isinstance(error, MemoryError) or any(words in text.lower() for words in _SAID_SO):
        return OUT_OF_MEMORY
    if isinstance(error, CallFailed):
        return text
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"[:200]


def free(device: str) -> None:
    """Give back what nobody uses any more."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def cuda_peak(run: Callable[[], Any]) -> float:
    """Peak MiB of tensors on a GPU beyond those that were there before the call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / _MIB


def process_peak(run: Callable[[], Any], small: Callable[[], Any]) -> float | None:
    """Peak MiB of a process beyond what it had before the call; None except on Linux.

    The call is made in a fork, which starts with a peak of its own. small: a call that makes the libraries allocate
    what they allocate once. Raises CallFailed where it fails, also where the system ends the fork.
    """
    if sys.platform != "linux":
        return None
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls have freed would be used again, unseen
    forks = multiprocessing.get_context("fork")
    answer, answers = forks.Pipe(duplex=False)
    fork = forks.Process(target=_answer, args=(answers, run, small))
    fork.start()
    answers.close()
    try:
        told = answer.recv()
        fork.join()
    except EOFError:
        fork.join()
        told = OUT_OF_MEMORY if fork.exitcode == -signal.SIGKILL else f"its process ended with {fork.exitcode}"
    if isinstance(told, str):
        raise CallFailed(told)
    return told


def _answer(answers: Connection, run: Callable[[], Any], small: Callable[[], Any]) -> None:
    """In the fork: measure, tell, end; nothing of the parent's may run on here."""
    import resource  # which Windows has not

    try:
        small()
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        run()
        before = int(pages) * os.sysconf("SC_PAGE_SIZE")
        told = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / _MIB
    except BaseException as error:
        told = reason(error)
    answers.send(told)
    os._exit(0)
