"""Pictures to choose by, and others to show: a setting that was picked on the pictures of a table flatters itself.

The two share nothing that is drawn: held-out scenes, noise, prompts, seeds of pictures and of methods.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.results import Record, ResultError
from demo import prompt

CHOOSE, SHOW = "choose", "show"


class Purpose(NamedTuple):
    """What is drawn from what. scenes: seed of held-out scenes, and the next one of those that img2img starts from;
    no training sees either (torch reads 32 bits of a seed, so they differ in those); noise: of the noise added to
    scenes at time 0; first: of the first whole picture, and added to the seed of whatever a method draws; prompts: of
    whole pictures, in turn.
    """

    scenes: int
    noise: int
    first: int
    prompts: tuple[str, ...]


PURPOSES = {
    CHOOSE: Purpose(600_011_771, 7_000, 0, prompt.PROMPTS),
    SHOW: Purpose(600_023_993, 17_000, 2**20, (
        "dawn sea hills right yellow box",
        "storm desert peaks left blue ball",
        "night meadow hills left white tree",
        "sunset snow flat right green cone",
        "day desert peaks right red tree",
        "dawn snow peaks left yellow ball",
    )),
}  # fmt: skip


def check(record: Record, wanted: str, name: str) -> None:
    """Raise ResultError where the record's pictures are for the other purpose.

    One that does not say is from before there were two, and passes as either.
    """
    has = record["settings"].get("for", wanted)
    if has != wanted:
        raise ResultError(f"{name} was measured on the pictures for '{has}'; give a result of "
                          f"python -m benchmarks.quality --for {wanted}")
