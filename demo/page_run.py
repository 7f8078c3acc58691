"""What the page does when it is asked for a picture: the picture twice, without merging and with, told step by step."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from PIL import Image

import tome_core
from demo import page_hosts, sheet
from demo.clock import told_times
from demo.likeness import psnr
from demo.page_code import Wanted
from demo.source import Source

WARMING, PLAIN, MERGED, DONE = "Warming up", "Without merging", "With merging", "Done"


class Cancelled(Exception):
    """Nobody waits for the picture any more."""


@dataclass(frozen=True)
class Shot:
    """How far it is. doing: one of the words above; step: of `steps` in it; pictures uint8 [H, W, 3] once there."""

    doing: str
    step: int
    steps: int
    unfinished: np.ndarray | None = None
    plain: np.ndarray | None = None
    merged: np.ndarray | None = None
    seconds: tuple[float, ...] = ()  # without merging, and with
    report: str = ""
    maps: tuple[tuple[str, np.ndarray], ...] = field(default=())  # (what it shows, picture), the finest level first

    @property
    def share(self) -> float:
        """0..1 of both pictures."""
        before = {WARMING: 0.0, PLAIN: 0.0, MERGED: 0.5, DONE: 1.0}[self.doing]
        return before + (0.5 * self.step / self.steps if self.doing in (PLAIN, MERGED) else 0.0)

    @property
    def difference(self) -> np.ndarray:
        """Eight times the difference of the finished pictures."""
        return sheet.difference(self.plain, self.merged)

    @property
    def figures(self) -> str:
        """Times, speed-up and PSNR in one line."""
        plain, merged = self.seconds
        distance = psnr(self.plain, self.merged)
        alike = "the same picture, bit for bit" if math.isinf(distance) else f"PSNR {distance:.1f} dB"
        return f"{plain:.2f} s without merging, {merged:.2f} s with: {plain / merged:.2f} times as fast; {alike}"


Tell = Callable[[Shot], None]


class Studio:
    """Makes pictures with one model, one at a time."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._free = threading.Lock()

    def make(self, wanted: Wanted, stop: threading.Event) -> Iterator[Shot]:
        """Shots, the last one DONE; fewer where `stop` is set or the caller leaves, which both end it within a step.

        When it ends, the model is unpatched and free. Whatever goes wrong in between is raised here.
        """
        told: queue.SimpleQueue[Shot | Exception | None] = queue.SimpleQueue()

        def tell(shot: Shot) -> None:
            if stop.is_set():
                raise Cancelled
            told.put(shot)

        def work() -> None:
            try:
                with self._free:
                    _compare(self.source, wanted, tell)
            except Cancelled:
                pass
            except Exception as error:
                told.put(error)
            finally:
                told.put(None)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            while (shot := told.get()) is not None:
                if isinstance(shot, Exception):
                    raise shot
                yield shot
        finally:
            stop.set()
            thread.join()


def _compare(source: Source, wanted: Wanted, tell: Tell) -> None:
    """The picture without merging, then with it; both have run a step before they are timed."""
    config = wanted.config
    _one(source, replace(wanted, steps=1), Shot(WARMING, 0, 1), tell)
    plain, took = _one(source, wanted, Shot(PLAIN, 0, wanted.steps), tell)
    with tome_core.patch(source.target, config, host_clock=True) as merging:
        shot = Shot(MERGED, 0, wanted.steps, plain=plain, seconds=(took,))
        merging.keep_maps()
        # what a first call makes ready is none of the picture's time
        _one(source, replace(wanted, steps=1), shot, lambda _: tell(shot), merging)
        merging.reset_counts()
        merged, took_merged = _one(source, wanted, shot, tell, merging)
        report, maps = str(merging.report()), _drawn(merged, merging.maps(), source.prompt_row)
    tell(Shot(DONE, wanted.steps, wanted.steps, None, plain, merged, (took, took_merged), report, maps))


def _one(source: Source, wanted: Wanted, shot: Shot, tell: Tell, merging: tome_core.Patch | None = None):
    """A picture and its seconds by the clock; `shot` is told with every step."""
    latest = [None]
    step = 0

    def on_step() -> None:
        nonlocal step
        step += 1
        tell(replace(shot, step=step, unfinished=latest[0]))

    def on_picture(picture: np.ndarray) -> None:
        latest[0] = picture

    heard = on_step if merging is None else told_times(source, wanted.steps, merging, on_step)
    began = time.perf_counter()
    made = source.picture(wanted.prompt, wanted.seed, wanted.steps, heard, on_picture)
    return made, time.perf_counter() - began


def enlarged(picture: np.ndarray) -> np.ndarray:
    """The picture as the page shows it: small ones by whole multiples, large ones as they are."""
    height, width = picture.shape[:2]
    times = max(1, sheet.LARGEST // max(height, width))
    return np.array(Image.fromarray(picture).resize((width * times, height * times), Image.Resampling.NEAREST))


def _drawn(picture: np.ndarray, maps: dict[int, tome_core.run.MergeMap], row: int):
    """Each level's map over the picture; row: the prompt's in the model's batch."""
    canvas = torch.from_numpy(enlarged(picture)).float() / 255
    drawn = []
    for level, found in sorted(maps.items()):
        group = found.group[row if len(found.group) > 1 else 0]
        panel = page_hosts.merge_map().panel(canvas, tuple(found.grid), group, f"level {level}")
        title = f"Level {level}: {len(group)} tokens became {found.num_groups}"
        drawn.append((title, (panel.clamp(0, 1) * 255).round().to(torch.uint8).numpy()))
    return tuple(drawn)
