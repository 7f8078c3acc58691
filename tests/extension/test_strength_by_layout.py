"""A strength stands for what the model that runs bears: SDXL's layout has a table of its own, in the panel as well."""

from __future__ import annotations

import pytest

from tests.models import ldm_of_one_level, ldm_sdxl
from tome_core import form, preset

OF = {"sd": ldm_of_one_level, "sdxl": ldm_sdxl}
FREE = {"enabled": True, "only_if_it_pays": False}  # the double's pictures have few tokens
pytestmark = pytest.mark.parametrize("flavour", ["a1111", "forge"])
each = pytest.mark.parametrize("layout", list(OF))


@pytest.fixture
def patched(webui, monkeypatch):
    """The configs that are put on, in order."""
    merging, seen = webui.part("merging"), []
    put_on = merging.patch

    def noted(model, config, **more):
        seen.append(config)
        return put_on(model, config, **more)

    monkeypatch.setattr(merging, "patch", noted)
    return seen


def shown(config):
    """What the panel says of a config, but for what a job brings along."""
    return {**form.values_of(config), "merge_seed": None, "only_if_it_pays": None}


def loaded(webui, layout):
    webui.load(OF[layout]())
    return webui


@each
def test_a_job_merges_by_the_table_of_the_model_that_is_loaded(webui, patched, layout):
    done = loaded(webui, layout).job({**FREE, "strength": 0.25})
    assert [shown(one) for one in patched] == [shown(preset("quality", layout))]
    assert done.infotexts == ["ToMe: 0.25; only_if_it_pays=False"], "the model is named beside it"


def test_each_of_two_models_of_a_job_merges_by_its_own(webui, patched):
    loaded(webui, "sd").job({**FREE, "strength": 0.25}, refiner=ldm_sdxl())
    assert [shown(one) for one in patched] == [shown(preset("quality", layout)) for layout in ("sd", "sdxl")]


@each
def test_the_panel_shows_what_strength_stands_for_on_the_model_that_is_loaded(webui, layout):
    loaded(webui, layout).script.ui(False)  # imports the panel
    ui, wish = webui.part("ui"), webui.part("wish")
    before, now = (wish.base_of(one, layout) for one in (0.5, 0.25))
    filled_for, *updates = ui.moved(0.25, False, 0.5, *before.values())
    assert filled_for == {"value": 0.25}
    moved = {name: update.get("value", before[name]) for name, update in zip(before, updates, strict=True)}
    exact = form.values_of(preset("quality", layout))
    assert moved == now == {**exact, "ratio": round(exact["ratio"], 3), "early_ratio": 0.984} != exact, "rounded"


@each
def test_what_an_expert_leaves_as_it_was_filled_in_is_no_deviation(webui, layout):
    wish = loaded(webui, layout).part("wish")
    filled = {**wish.base_of(0.25, layout), "sx": 2}
    values = (True, 0.25, wish.EVERYWHERE, True, 0.25, *filled.values())
    found = wish.read(values, webui.part("options").of_dial, layout=layout)
    assert dict(found.changes) == {"sx": 2}
    assert found.config(False, layout=layout).value("ratio") == preset("quality", layout).value("ratio"), "not rounded"
    assert webui.job(*values).infotexts == [""], "so few tokens"
    pasted = webui.part("infotext").wish_in("0.25; sx=2", layout)
    assert pasted == found


@pytest.mark.parametrize("begun, layout", [("sd", "sdxl"), ("sdxl", "sd")])
def test_fields_filled_in_before_another_model_came_are_no_deviation(webui, patched, begun, layout):
    """A webui makes its page before the model is there, and a checkpoint changes while the page is open."""
    loaded(webui, layout).script.ui(False)
    ui, wish = webui.part("ui"), webui.part("wish")
    held = wish.base_of(0.25, begun)
    untouched = (True, 0.25, wish.EVERYWHERE, True, 0.25, *held.values())
    assert not wish.read(untouched, webui.part("options").of_dial, layout=layout).changes
    named = dict(zip(wish.ARGUMENTS, untouched, strict=True))
    webui.job(*{**named, "only_if_it_pays": False}.values())
    assert [shown(one) for one in patched] == [shown(preset("quality", layout))]
    _, *updates = ui.moved(0.25, True, 0.25, *{**held, "sx": 2}.values())
    ticked = {name: update.get("value", held[name]) for name, update in zip(held, updates, strict=True)}
    assert {**ticked, "sx": None} == {**wish.base_of(0.25, layout), "sx": None}, "what was set by hand stays"
    assert updates[list(held).index("sx")] == {}
