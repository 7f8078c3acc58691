"""What the page does when it is asked for pictures: one without merging, then each with it, told step by step."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

import tome_core
from demo import page_map
from demo.clock import tell_times
from demo.likeness import gradient_energy, psnr, squared_error
from demo.page_code import Wanted
from demo.page_curve import Point
from demo.sheet import LARGEST
from demo.source import Source
from tome_core.engine.decision import MergeMap

WARMING, PLAIN, MERGED, DONE = "Warming up", "Without merging", "With merging", "Done"
_TICK = 1 / 64  # s; Windows counts processor time so coarsely, and nothing is made in none


class Cancelled(Exception):
    """Nobody waits for the picture any more."""


@dataclass(frozen=True)
class Made:
    """A finished picture, uint8 [H, W, 3], and its seconds: of processor time where a CPU makes it, else by the clock.

    maps: (what it shows, picture) of each level that merged, the finest first.
    """

    picture: np.ndarray
    seconds: float
    on_cpu: bool
    report: str = ""
    maps: tuple[tuple[str, np.ndarray], ...] = ()

    @property
    def time(self) -> str:
        """The seconds, and what clock counted them."""
        return f"{self.seconds:.2f} s{' of processor time' * self.on_cpu}"

    def figures(self, plain: Made) -> str:
        """Speed-up, PSNR and detail beside the unmerged picture."""
        speed, distance = f"{plain.seconds / self.seconds:.2f} times as fast", psnr(plain.picture, self.picture)
        if math.isinf(distance):
            return f"{speed}; the same picture, bit for bit"
        energy = gradient_energy(plain.picture)
        detail = f", detail {gradient_energy(self.picture) / energy:.0%}" if energy else ""
        return f"{speed}; PSNR {distance:.1f} dB{detail}"

    def point(self, plain: Made, strength: float | None) -> Point:
        """Where it is on the plot of error over time saved."""
        return Point(strength, 1 - self.seconds / plain.seconds, math.sqrt(squared_error(plain.picture, self.picture)))


@dataclass(frozen=True)
class Shot:
    """How far it is. doing: one of the words above; step: of `steps` in it; ways: how many pictures are merged.

    plain and merged: the finished pictures so far.
    """

    doing: str
    step: int
    steps: int
    ways: int = 1
    unfinished: np.ndarray | None = None
    plain: Made | None = None
    merged: tuple[Made, ...] = ()

    @property
    def share(self) -> float:
        """0..1 of all pictures."""
        finished = (self.plain is not None) + len(self.merged)
        begun = self.step / self.steps if self.doing in (PLAIN, MERGED) else 0.0
        return (finished + begun) / (1 + self.ways)


Tell = Callable[[Shot], None]
Configs = tuple[tome_core.MergeConfig, ...]


class Studio:
    """Makes pictures with one model, one at a time."""

    def __init__(self, source: Source) -> None:
        self.source, self._free = source, threading.Lock()

    def make(self, wanted: Wanted, stop: threading.Event, configs: Configs = ()) -> Iterator[Shot]:
        """Shots, the last one DONE; fewer where `stop` is set or the caller leaves, which both end it within a step.

        configs: ways to merge, one picture each, instead of the one that is wanted. When it ends, the model is
        unpatched and free. Whatever goes wrong in between is raised here.
        """
        told: queue.SimpleQueue[Shot | Exception | None] = queue.SimpleQueue()

        def tell(shot: Shot) -> None:
            if stop.is_set():
                raise Cancelled
            told.put(shot)

        def work() -> None:
            try:
                with self._free, suppress(Cancelled):
                    _compare(self.source, wanted, configs or (wanted.config,), tell)
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


def _compare(source: Source, wanted: Wanted, configs: Configs, tell: Tell) -> None:
    """The picture without merging, then with it in each way; all have run a step before they are timed."""
    warming = Shot(WARMING, 0, 1, len(configs))
    _one(source, replace(wanted, steps=1), warming, tell)
    plain = _one(source, wanted, replace(warming, doing=PLAIN, steps=wanted.steps), tell)
    shot = Shot(MERGED, 0, wanted.steps, len(configs), plain=plain)
    for config in configs:
        shot = replace(shot, merged=(*shot.merged, _merge(source, wanted, config, shot, tell)))
    tell(replace(shot, doing=DONE, step=wanted.steps))


def _merge(source: Source, wanted: Wanted, config: tome_core.MergeConfig, shot: Shot, tell: Tell) -> Made:
    with tome_core.patch(source.target, config, host_clock=True) as merging:
        merging.keep_maps()
        # what a first call makes ready is none of the picture's time
        _one(source, replace(wanted, steps=1), shot, lambda _: tell(shot), merging)
        merging.reset_counts()
        made = _one(source, wanted, shot, tell, merging)
        maps = tuple(_draw(made.picture, merging.maps(), source.prompt_row))
        return replace(made, report=str(merging.report()), maps=maps)


def _one(source: Source, wanted: Wanted, shot: Shot, tell: Tell, merging: tome_core.Patch | None = None) -> Made:
    """A picture and its seconds; `shot` is told with every step.

    A CPU is shared with other programs, which hardly disturb processor time; the measured curve is of it, too.
    """
    latest, steps = deque([None], maxlen=1), count(1)

    def on_step() -> None:
        tell(replace(shot, step=next(steps), unfinished=latest[0]))

    heard = on_step if merging is None else tell_times(source, wanted.steps, merging, on_step)
    on_cpu = source.device.type == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter
    began = clock()
    made = source.picture(wanted.prompt, wanted.seed, wanted.steps, heard, latest.append)
    return Made(made, max(clock() - began, _TICK), on_cpu)


def enlarge(picture: np.ndarray) -> np.ndarray:
    """The picture as the page shows it: small ones by whole multiples, large ones as they are."""
    times = max(1, LARGEST // max(picture.shape[:2]))
    return picture.repeat(times, 0).repeat(times, 1)


def _draw(picture: np.ndarray, maps: dict[int, MergeMap], row: int):
    """Each level's map; row: the prompt's in the model's batch."""
    for level, found in sorted(maps.items()):
        group = found.group[row if len(found.group) > 1 else 0]
        title = f"Level {level}: {len(group)} tokens became {found.num_groups}"
        yield title, page_map.mosaic(enlarge(picture), found.grid[:2], group.cpu().numpy())
