"""What merging gains in a real webui, by the times of its pictures with merging and without."""

from __future__ import annotations

from tests.hosts.webui.running import HALF
from tome_core.reporting.gains import Gains


def test_three_pictures_of_both_kinds_say_it_or_keep_silent_where_they_vary(webui, without):
    # large enough for a gain that is clear on a busy CPU as well, which slows both kinds alike if they take turns
    job, off, start = {"width": 448, "height": 448, "steps": 7, "cfg_scale": 1}, [], len(webui.said())
    for _ in range(4):
        off.append(webui.draw(**job).pixels)
        webui.draw(HALF, **job)
    assert off == [without.draw(**job).pixels] * 4
    known = Gains()
    known.load(webui.log.parent / "cache" / "tome_core_gains.json")
    print(known.pictures, *webui.told(start), sep="\n")
    plain, merged = sorted((case for case, times in known.pictures.items() if len(times) == 4), key=lambda one: one[2])
    assert plain[:2] == merged[:2] and plain[2:] == ("", "") != merged[2:], "alike but for what merged"
    told = known.told(merged[0], *merged[2:])
    assert (told or "of attention left out") in webui.told(start)[-1]
    assert not told or told.endswith("from your own pictures (4 with merging, 4 without)")
