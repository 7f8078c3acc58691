"""What merging gains in a real webui, by the times of its pictures with merging and without."""

from __future__ import annotations

from tests.hosts.webui.running import HALF, TWICE
from tome_core.reporting.gains import Gains


def test_three_pictures_of_both_kinds_say_it_or_keep_silent_where_they_vary(webui, without):
    job = {**TWICE, "steps": 8, "cfg_scale": 1}  # large enough for a gain that is clear on a busy CPU as well
    off = [webui.draw(**job) for _ in range(4)]
    assert off[0].pixels == off[3].pixels == without.draw(**job).pixels
    start = len(webui.said())
    for _ in range(4):
        webui.draw(HALF, **job)
    known = Gains()
    known.load(webui.log.parent / "cache" / "tome_core_gains.json")
    print(known.pictures, *webui.told(start), sep="\n")
    plain, merged = sorted((case for case, times in known.pictures.items() if len(times) == 4), key=lambda one: one[2])
    assert plain[:2] == merged[:2] and plain[2:] == ("", "") != merged[2:], "alike but for what merged"
    told = known.told(merged[0], *merged[2:])
    assert (told or "of attention left out") in webui.told(start)[-1]
    assert not told or told.endswith("from your own pictures (4 with merging, 4 without)")
