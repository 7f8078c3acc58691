"""What merging gains in a real ComfyUI, by the times of samplings with Apply ToMe on and at strength 0."""

from __future__ import annotations

from tests.hosts.comfyui.graphs import Graph, bytes_of, report_of
from tome_core.reporting.gains import Gains


def test_three_samplings_of_both_kinds_say_it_or_keep_silent_where_they_vary(comfy, base):
    pictures = []
    # large enough for a gain that is clear on a busy CPU as well, which slows both kinds alike if they take turns
    for strength in (0.0, 1.0) * 4:
        graph = Graph(size=(448, 448), steps=7)
        settings = graph.add("ToMeSettings", only_if_it_pays=False, ratio=0.9 * strength)
        applied = graph.strength(settings=settings)
        graph.sample("drawn", applied, cfg=1.0)
        seen = comfy.good(graph.graph)
        print(report_of(seen, applied).splitlines()[:1] if strength else "")
    known = Gains()
    known.load(base / "user" / "tome_core_gains.json")
    cases = [case for case, times in known.pictures.items() if len(times) == 4]
    (off, on) = sorted(cases, key=lambda case: case[2])
    print(known.pictures)
    assert off[:2] == on[:2] and off[2:] == ("", "") != on[2:], "alike but for what merged"
    told = known.told(on[0], *on[2:])
    assert (told or "of attention left out") in report_of(seen, applied)
    assert not told or told.endswith("from your own pictures (4 with merging, 4 without)")
    for model in ("off", "plain"):
        graph = Graph(size=(128, 128), steps=7)
        graph.sample(model, graph.strength(strength=0.0) if model == "off" else graph.model, seed=3)
        pictures.append(bytes_of(comfy.good(graph.graph), model))
    assert pictures[0] == pictures[1]
