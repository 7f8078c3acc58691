"""The nodes on a double of ComfyUI's contract: branches, time, reports, and what is left behind (nothing)."""

from __future__ import annotations

import copy
import gc
import json
import re
import weakref

import pytest
import torch
from torch import nn

from comfy_nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, host, picture
from comfy_nodes.nodes import (
    FROM_CACHE,
    NOT_APPLIED,
    NOT_WAITING,
    ApplyToMe,
    RemoveToMe,
    ToMePreview,
    ToMeSettings,
)  # fmt: skip
from comfy_nodes.sampling import HostSampling
from tests.comfy_doubles import BaseModel, DiscreteSampling, Guider, ModelPatcher, apply, checkpoint
from tests.nodedefs import inputs_of
from tests.traces import traces


def sample(patcher: ModelPatcher, **options) -> torch.Tensor:
    return Guider(patcher).sample(**options)


# --- branches ------------------------------------------------------------------------------------------------------


def test_only_the_branch_with_the_node_merges():
    plain = checkpoint()
    before, left = sample(plain), traces(plain.model)
    applied = apply(plain)
    removed = RemoveToMe().remove(applied)[0]
    merged = sample(applied)
    assert not torch.equal(merged, before)
    for branch in (plain, removed, plain.clone()):
        assert torch.equal(sample(branch), before)
    assert torch.equal(sample(applied), merged) and traces(plain.model) == left


def test_a_second_apply_replaces_the_first():
    plain = checkpoint()
    assert torch.equal(sample(apply(apply(plain, ratio=0.75), ratio=0.25)), sample(apply(plain, ratio=0.25)))


def test_remove_leaves_every_other_patch():
    patcher = checkpoint()
    patcher.add_wrapper_with_key("apply_model", "other", "a wrapper")
    patcher.model_options["transformer_options"]["patches"] = {"attn1_patch": ["a patch"]}
    removed = RemoveToMe().remove(apply(patcher))[0]
    assert removed.wrappers["apply_model"] == {"other": ["a wrapper"]} and not removed.wrappers["outer_sample"]
    assert removed.model_options == patcher.model_options


def test_remove_says_that_there_was_nothing_of_ours(server):
    RemoveToMe().remove(checkpoint(), unique_id="8")
    assert server.texts == [("8", "There was no Apply ToMe on this model.")]


def test_the_model_of_the_call_is_patched_and_not_the_one_of_the_node():
    """DualModelGuider runs a second model with the first one's options; a copy on another GPU is such a model too."""
    applied = apply(checkpoint())
    other = checkpoint()
    plain = sample(other)
    merged = Guider(applied, other.model).sample()
    assert torch.equal(merged, sample(apply(checkpoint()))) and not torch.equal(merged, plain)


@pytest.mark.parametrize("which", ["the node's own", "another"])
def test_a_model_that_is_dropped_is_let_go(which):
    own, other = checkpoint(), checkpoint()
    branches = {"the node's own": [apply(own)], "another": [other]}
    Guider(branches["the node's own"][0], branches[which][0].model).sample(steps=1)
    left = weakref.ref(branches[which][0].model.diffusion_model)
    del own, other, branches[which]
    gc.collect()
    assert left() is None


def test_copying_a_models_options_copies_no_model():
    applied = apply(checkpoint())
    sample(applied, steps=1)
    copied = copy.deepcopy(applied.wrappers)
    assert copied["apply_model"]["tome"][0].__self__ is applied.wrappers["apply_model"]["tome"][0].__self__


# --- time ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "end"), [(0.0, 0.5), (0.5, 1.0), (0.3, 0.6), (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)])
def test_a_range_holds_the_steps_whose_sigma_lies_in_it(start, end):
    """And those of the ends themselves, of which 0 and 1 are beyond every step."""
    sampling, levels = HostSampling(), DiscreteSampling()
    for time in (999, 749.25, 699.3, 499.5, 250, 0.001, 0):
        within = start <= 1 - time / 999 <= end and start < 1 and end > 0
        assert sampling.is_between(start, end, levels.sigma(time), levels) == within, time


def test_what_lies_outside_of_the_range_is_told(server):
    branch = apply(checkpoint(), start=0.5)
    sample(branch, steps=4)
    text = "\n".join(host.find_attached(branch).latest.details)
    assert "outside the rules' time range" in text
    assert "\n" not in server.texts[-1][1], "as it was asked for"


# --- what people read ----------------------------------------------------------------------------------------------


def test_the_node_shows_what_one_sampling_merged_and_its_first_line_says_it_all(server):
    applied = apply(checkpoint())
    sample(applied, steps=3)
    sample(applied, steps=2)
    node, text = server.texts[-1]
    first, *more = text.split("  \n")  # Nodes 2.0 reads it as Markdown, which joins lines that end otherwise
    assert "\n" not in "".join([first, *more]) and not text.endswith(" ")
    assert node == "5" and re.fullmatch(r"ToMe: own settings, 2 steps, \d+% of attention left out", first) and not more
    details = host.find_attached(applied).latest.details
    assert details[0] == first and any("256 tokens -> 128" in line for line in details)


def test_a_second_line_is_there_where_something_was_not_as_asked(server):
    """And the log has it too."""
    patcher = checkpoint()
    replaced = {"attn1": {("input", 1, 0): lambda q, k, v, extra: v}}
    patcher.model_options["transformer_options"]["patches_replace"] = replaced
    sample(apply(patcher, level="up to /8"), steps=1)
    _, second = server.texts[-1][1].split(host.LINE_BREAK)
    assert re.fullmatch(r"\d+% of attention not merged: something else runs in its place", second)


def test_the_log_has_one_line_a_sampling(caplog):
    with caplog.at_level("INFO"):
        sample(apply(checkpoint(), start=0.5), steps=4)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("ToMe #5: own settings, 4 steps, ") and "\n" not in line


def test_where_nothing_merged_the_first_line_says_why(server):
    sample(apply(checkpoint(), only_if_it_pays=True), steps=1)
    why = "nothing merged: so few tokens that merging would not pay"
    assert server.texts[-1][1].startswith(f"ToMe: own settings, 1 step, {why}")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_stopped_sampling_reports_the_steps_that_it_did(server, error):
    def stop(step):
        if step == 2:
            raise error

    with pytest.raises(error):
        sample(apply(checkpoint()), steps=5, stop=stop)
    assert server.texts[-1][1].startswith("ToMe: own settings, 2 of 5 steps, ")


def test_in_a_subgraph_the_report_is_at_the_node_and_at_each_subgraph_around_it(server):
    sample(apply(checkpoint(), node="12:7:5"), steps=1)
    (text,) = {text for _, text in server.texts[3:]}
    assert [node for node, _ in server.texts] == ["12:7:5", "12:7", "12"] * 2
    assert text.startswith("ToMe: own settings, 1 step")


def test_a_server_that_fails_breaks_no_picture(server, monkeypatch):
    monkeypatch.setattr(server, "send_progress_text", lambda *args: 1 / 0)
    assert sample(apply(checkpoint()), steps=1).isfinite().all()


def test_a_model_that_cannot_merge_passes_through_and_the_node_says_so(server):
    other = ModelPatcher(BaseModel(nn.Sequential(nn.Linear(2, 2))))
    passed = apply(other)
    assert passed is not other and not any(passed.wrappers.values())
    assert "stepped aside, the model is unchanged" in server.texts[-1][1]
    assert "is not known: no attention function" in server.texts[-1][1]


def test_a_second_model_without_such_blocks_is_sampled_as_it_is(server):
    class Flat(nn.Module):
        def forward(self, x, t, context, transformer_options):
            return x * 0.5

    other = BaseModel(Flat())
    plain = Guider(ModelPatcher(other)).sample()
    assert torch.equal(Guider(apply(checkpoint()), other).sample(), plain)
    assert "stepped aside" in server.texts[-1][1]


def test_an_old_comfyui_passes_through_and_the_node_says_so(server):
    class Old:
        def clone(self):
            return Old()

    assert isinstance(apply(Old()), Old) and "older than September 2025" in server.texts[-1][1]


# --- the classes ------------------------------------------------------------------------------------------------------


def test_what_comfyui_shows_of_every_node_is_there():
    assert set(NODE_CLASS_MAPPINGS) == set(NODE_DISPLAY_NAME_MAPPINGS) == {
        "ApplyToMe", "ToMeSettings", "RemoveToMe", "ToMePreview"}  # fmt: skip
    for node in NODE_CLASS_MAPPINGS.values():
        assert node.DESCRIPTION and node.CATEGORY and {"token merging", "tomesd"} <= set(node.SEARCH_ALIASES)
        assert len(node.OUTPUT_TOOLTIPS) == len(node.RETURN_TYPES) and hasattr(node, node.FUNCTION)
        assert all(facts["tooltip"] for _, facts in inputs_of(node).values())
        assert not hasattr(node, "IS_CHANGED")


# --- preview -------------------------------------------------------------------------------------------------------

def preview(patcher: ModelPatcher, latent: torch.Tensor) -> torch.Tensor:
    return ToMePreview().preview(patcher, latent={"samples": latent}, unique_id="9")["result"][0]


def test_a_panel_has_each_group_in_its_mean_colour_and_the_picture_where_nothing_merged():
    one = torch.rand(64, 64, 3, generator=torch.Generator().manual_seed(0))
    group = torch.tensor([0, 0, 1, 2])  # of the four quarters; the two above are one group
    drawn = picture.panel(one, (2, 2), group, "")
    assert torch.allclose(drawn[28, 5], one[:32].mean((0, 1)), atol=0.01)
    assert torch.allclose(drawn[40:, 5:20], one[40:, 5:20], atol=0.01)
    assert torch.allclose(drawn[32, 5] / one[32, 5], torch.full((3,), 0.7), atol=0.05), "a border"


def test_the_preview_shows_a_panel_a_level(server):
    applied = apply(checkpoint(), level="up to /8")
    latent = sample(applied, steps=1, batch=2)
    picture = preview(applied, latent)
    levels = 2
    assert picture.shape == (2, 128, 128 * levels, 3) and picture.min() >= 0 and picture.max() <= 1
    assert len(picture.unique()) > 50 and not torch.equal(picture[0], picture[1])


def test_the_preview_draws_over_an_image_of_any_size(server):
    applied = apply(checkpoint())
    sample(applied, steps=1)
    assert ToMePreview().preview(applied, image=torch.rand(1, 72, 90, 3))["result"][0].shape == (1, 72, 90, 3)


def test_the_preview_has_the_report_for_the_history_of_the_queue_as_text_and_for_programs(server):
    applied = apply(checkpoint())
    latent = sample(applied, steps=1)
    told = len(server.texts)
    shown = ToMePreview().preview(applied, latent={"samples": latent}, unique_id="9")
    (report,) = shown["ui"]["text"]
    assert report == shown["result"][1] and ToMePreview.OUTPUT_NODE
    assert report.startswith("ToMe: own settings, 1 step, ") and "latent /1: 256 tokens -> 128" in report
    (data,) = shown["ui"]["tome_report"]
    assert {**data, **host.find_attached(applied).latest.report.as_data()} == data == json.loads(json.dumps(data))
    assert data["patched"] and (data["steps"], data["strength"], data["start"], data["end"]) == (1, None, 0.0, 1.0)
    assert data["stepped_aside"] == data["unknown"] == [] and data["line"] == report.partition("\n")[0]
    assert server.texts[told:] == [("9", report.replace("\n", host.LINE_BREAK))]


def told(server, model, **given) -> str:
    """What a preview says, and has for programs."""
    shown = ToMePreview().preview(model, unique_id="9", **given)
    text, image = shown["ui"]["text"][0], shown["result"][0]
    assert server.texts[-1] == ("9", text) and "line" in shown["ui"]["tome_report"][0] and image.isfinite().all()
    return text


def test_the_preview_says_why_there_is_no_map_and_what_to_do(server):
    latent = {"latent": {"samples": torch.zeros(1, 4, 16, 16)}}
    applied = apply(checkpoint())
    removed = RemoveToMe().remove(applied)[0]
    assert told(server, checkpoint(), **latent) == told(server, removed, **latent) == NOT_APPLIED
    assert told(server, applied) == NOT_WAITING and told(server, applied, **latent) == FROM_CACHE
    off = apply(checkpoint(), ratio=0.9, sx=1, sy=1)
    assert "sx=1, sy=1" in told(server, off, **latent) and "sx=1, sy=1" in server.texts[-2][1]
    aside = apply(checkpoint(), start=0.7, end=0.3)
    assert "stepped aside" in told(server, aside, **latent) and "lies after end=0.3" in told(server, aside.clone())
    assert told(server, apply(aside), **latent) == FROM_CACHE
    assert told(server, RemoveToMe().remove(aside)[0]) == NOT_APPLIED


def test_a_model_that_is_called_past_us_is_named(server):
    """DeepCache's node calls the UNet itself."""

    class Past(Guider):
        def _call(self, pair, now):
            return self.model.diffusion_model(pair, now.expand(len(pair)), context=self.text, transformer_options={})

    applied = apply(checkpoint())
    Past(applied).sample(steps=2, callback=lambda *args: None)
    assert "2 steps, nothing merged: another node (DeepCache is one) calls the model past" in server.texts[-1][1]


def test_the_log_names_the_node_and_what_was_unknown_to_it(caplog):
    prompt = {"5": {"inputs": {"preset": 1}, "_meta": {"title": "second pass"}}}
    (settings,) = ToMeSettings().settings()
    (applied,) = ApplyToMe().apply(checkpoint(), settings=settings, unique_id="5", prompt=prompt)
    with caplog.at_level("INFO"):
        sample(applied, steps=1)
    line = caplog.records[-1].getMessage()
    assert line.startswith("ToMe #5 second pass: own settings, 1 step, ") and line.endswith("of the node: preset")


def test_of_two_passes_in_one_queue_the_node_shows_both(server, monkeypatch):
    monkeypatch.setattr(server, "last_prompt_id", "one", raising=False)
    applied = apply(checkpoint())
    for steps in (2, 3):
        sample(applied, steps=steps)
    assert [line.split(", ")[1] for line in server.texts[-1][1].split(host.LINE_BREAK)] == ["2 steps", "3 steps"]
    server.last_prompt_id = "two"
    sample(applied, steps=1)
    assert [line.split(", ")[1] for line in server.texts[-1][1].split(host.LINE_BREAK)] == ["1 step"]
