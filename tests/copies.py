"""What another process draws with a model that it was given, or that it has inherited."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import tome_core
from tests.families import MODELS

CAN_FORK = "fork" in multiprocessing.get_all_start_methods()


def drawn_by_spawned(pickles: dict[str, bytes]) -> Iterable[tuple[str, bytes, bool]]:
    """Of each model of `MODELS`: its name, its picture's bytes there, and whether it is patched."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as others:
        yield from others.map(_draw_pickled, *zip(*pickles.items(), strict=True))


def _draw_pickled(name: str, pickled: bytes) -> tuple[str, bytes, bool]:
    torch.set_num_threads(1)
    model = pickle.loads(pickled)
    return name, bits(MODELS[name].call(model)), tome_core.report(model).patched


def drawn_by_forked(draw: Callable[[], torch.Tensor]) -> bytes:
    """The picture's bytes."""
    forking = multiprocessing.get_context("fork")
    ours, theirs = forking.Pipe()
    child = forking.Process(target=_send, args=(theirs, draw))
    child.start()
    theirs.close()
    try:
        return ours.recv_bytes()
    finally:
        child.join()


def _send(connection: Any, draw: Callable[[], torch.Tensor]) -> None:
    torch.set_num_threads(1)  # a thread pool of the parent's is not there
    connection.send_bytes(bits(draw()))


def bits(picture: torch.Tensor) -> bytes:
    """All of a picture."""
    return picture.numpy().tobytes()


def saved(what: Any, folder: Path) -> dict[str, bytes]:
    """The files that `save_pretrained` writes, by their names."""
    what.save_pretrained(folder)
    return {str(one.relative_to(folder)): one.read_bytes() for one in sorted(folder.rglob("*")) if one.is_file()}
