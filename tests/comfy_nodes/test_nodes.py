"""The nodes' report on a sampling, with its gain, in the graph, in the log and for programs; what ToMePreview draws."""

import asyncio
import contextlib
import json
import re

import pytest
import torch
from torch import nn

from comfy_nodes import host, nodes, picture
from comfy_nodes.branch import Outcome, facts_of
from comfy_nodes.nodes import ApplyToMe, RemoveToMe, ToMePreview
from comfy_nodes.slot_calls import SLOT
from tests.host_doubles import comfy
from tests.host_doubles.comfy import apply, checkpoint, latest, least_checkpoint, sample, sampler_of, transformer
from tests.small_models.unets import inputs
from tests.thoroughness import some_quick
from tests.watching import step_clock
from tome_core.hosting import gains


def test_the_node_shows_a_line_on_the_latest_sampling_and_the_log_has_it_too(server, caplog):
    applied = apply(least_checkpoint(), start=0.5)
    sample(applied)
    with caplog.at_level("INFO"):
        sample(applied, steps=4)
    ((node, text), (record,)) = server.texts[-1], caplog.records
    assert node == "5" and re.fullmatch(r"ToMe: own settings, 4 steps, \d+% less work", text)
    assert record.getMessage() == text.replace("ToMe", "ToMe #5")
    details = latest(applied).details
    assert details[0] == text and any("64 tokens in 32 groups" in line for line in details)
    assert "these steps stay whole, by start and end" in "\n".join(details)


def keep_values(q, k, v, options):
    return v


def test_a_second_line_is_there_if_something_was_not_as_asked(server, caplog):
    patcher = checkpoint()
    replaced = {"attn1": {("input", number, 0): keep_values for number in range(9)}}
    patcher.model_options["transformer_options"]["patches_replace"] = replaced
    with caplog.at_level("INFO"):
        sample(apply(patcher, level="up to /8"), size=(32, 32))
    # Nodes 2.0 shows Markdown, which joins lines without two spaces at their end
    first, second = server.texts[-1][1].split("  \n")
    why = f"of the work could not merge: another program runs in its place: {__name__}.keep_values"
    assert re.fullmatch(rf"\d+% {re.escape(why)}", second)
    assert caplog.records[-1].getMessage() == f"{first.replace('ToMe', 'ToMe #5')}; {second}"


class Past(comfy.Guider):
    """A guider that calls the UNet itself, as DeepCache's node does."""

    def _call(self, pair, now):
        return self.model.diffusion_model(pair, now.expand(len(pair)), context=self.text, transformer_options={})


def test_if_nothing_merged_the_first_line_says_why(server, monkeypatch):
    Past(apply(least_checkpoint())).sample(callback=lambda *args: None)
    monkeypatch.setattr("tome_core.measuring.pays.is_host_bound", lambda *_: True)
    sample(apply(least_checkpoint(), only_if_it_pays=True))
    (*_, (_, past), _, (_, waits)) = server.texts
    assert "2 steps, nothing merged: at this size the GPU waits for kernel launches" in waits
    assert "2 steps, nothing merged: another node (DeepCache is one) calls the model directly" in past


def test_a_stopped_sampling_reports_the_steps_that_it_did(server):
    def stop(step):
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(apply(least_checkpoint()), steps=5, stop=stop)
    assert server.texts[-1][1].startswith("ToMe: own settings, 2 of 5 steps, ")


def test_in_a_subgraph_the_report_is_at_the_node_and_at_each_subgraph_around_it(server):
    sample(apply(least_checkpoint(), node="12:7:5"))
    assert [node for node, _ in server.texts] == ["12:7:5", "12:7", "12"] * 2
    (text,) = {text for _, text in server.texts[3:]}
    assert text.startswith("ToMe: own settings, 2 steps")


def test_of_two_passes_in_one_queue_the_node_shows_both(server):
    applied = apply(least_checkpoint())
    for queue, steps, shown in (("one", 2, ["2 steps"]), ("one", 3, ["2 steps", "3 steps"]), ("two", 1, ["1 step"])):
        server.last_prompt_id = queue
        sample(applied, steps=steps)
        assert [line.split(", ")[1] for line in server.texts[-1][1].split(host.LINE_BREAK)] == shown


async def prompt(*nodes):
    """Run nodes as ComfyUI does: in the task of their prompt, nothing between them."""
    for node in nodes:
        node()


@pytest.mark.parametrize("runs", [(), ("first",), ("second",), ("first", "second")])
def test_a_node_that_no_sampler_used_says_so_when_its_prompt_ends_and_not_before(server, runs):
    """The first node's wrappers are lost, as those of the second model of ModelMergeSimple; a later prompt uses it."""
    branches = {}

    def put_on():
        for number, name in enumerate(("first", "second")):
            branches[name] = apply(least_checkpoint(), node=str(number))
            assert server.texts[-1] == (str(number), "ToMe: own settings, merges in samplers after this node")

    asyncio.run(prompt(put_on, *(lambda name=name: sample(branches[name], steps=1) for name in runs)))
    shown = dict(server.texts)
    for number, name in enumerate(branches):
        assert ("no sampler used this model" in shown[str(number)]) != (name in runs)
        assert ("1 step, " in shown[str(number)]) == (name in runs)
    count = len(server.texts)
    asyncio.run(prompt(lambda: sample(branches["first"], steps=1)))
    assert [text for _, text in server.texts[count:]] == [server.texts[-1][1]] and "1 step, " in server.texts[-1][1]


def test_a_host_that_does_not_tell_the_end_of_a_prompt_shows_a_text_that_is_true_for_ever(server):
    apply(least_checkpoint())
    assert server.texts == [("5", "ToMe: own settings, merges in samplers after this node")]


def test_a_model_that_is_called_outside_of_a_sampling_is_used(server):
    @torch.no_grad()
    def call():
        applied, (x, text) = apply(least_checkpoint()), inputs(4, 2, 8, 8)
        applied.model.apply_model(x, torch.ones(2), text, {"wrappers": applied.wrappers})

    asyncio.run(prompt(call))
    assert len(server.texts) == 1


class FailsFirst(nn.Module):
    """A part of a model that fails, as a model for which there is no memory does."""

    def forward(self, *args):
        raise torch.cuda.OutOfMemoryError("the test wanted this")


def failing_model():
    patcher = least_checkpoint()
    patcher.model.diffusion_model.input_blocks[0][0] = FailsFirst()
    return apply(patcher)


def failing_sampler():
    branch = apply(least_checkpoint())
    branch.wrappers["outer_sample"]["another's"] = [FailsFirst().forward]
    return branch


def of_its_own_code():
    patcher = transformer()
    patcher.model.diffusion_model.forward = lambda x, *args, **kwargs: x
    return apply(patcher)


def refused():
    patcher = transformer()
    part = patcher.model.diffusion_model.img_in
    part._compiled_call_impl = part._call_impl
    return apply(patcher)


STOPPED = "the sampling stopped before anything merged"
OUTCOMES = {  # a branch that samples, and what its node shows
    "merged": (lambda: apply(least_checkpoint()), "% less work"),
    "off": (lambda: ApplyToMe().apply(least_checkpoint(), strength=0)[0], nodes.OFF_TEXT),
    "off by settings": (lambda: apply(least_checkpoint(), sx=1, sy=1), nodes.OFF_BY_CELLS),
    "a wrong value": (lambda: apply(least_checkpoint(), start=0.7, end=0.3), "stepped aside, the model is unchanged"),
    "no number": (lambda: ApplyToMe().apply(least_checkpoint(), strength=[0.5])[0], "stepped aside"),
    "not applied": (least_checkpoint, nodes.NOT_APPLIED),
    "removed": (lambda: RemoveToMe().remove(apply(least_checkpoint()))[0], nodes.NOT_APPLIED),
    "a compiled transformer": (refused, "stepped aside: the model is compiled"),
    "a model of its own code": (of_its_own_code, "nothing merged: this model computes its attention by code of"),
    "failed in the model": (failing_model, f"nothing merged: {STOPPED}"),
    "failed before the model": (failing_sampler, f"nothing merged: {STOPPED}"),
    "too small": (lambda: apply(least_checkpoint(), only_if_it_pays=True),
                  "own settings, 2 steps, nothing merged: the picture is so small that merging would not pay"),
}  # fmt: skip


@pytest.mark.parametrize("case", OUTCOMES)
def test_the_data_have_the_same_names_whatever_happened_and_the_text_says_what(server, case):
    build, said = OUTCOMES[case]
    branch, names = build(), {*Outcome.unsampled([""], facts_of()).data}
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        sample(branch)
    ((data,), (text,)) = (ToMePreview().preview(branch, latent={"samples": torch.zeros(1, 4, 8, 8)})["ui"][name]
                          for name in ("tome_report", "text"))  # fmt: skip
    assert {*data} == names and json.loads(json.dumps(data)) == data and said in data["line"]
    assert text.partition("\n")[0] == data["line"] and ("stepped aside" in data["line"]) == bool(data["stepped_aside"])
    assert data["patched"] == bool(data["levels"]), "figures are of a model that merges"


# times: samplings of a node that is on are compared with those of a node that is off
TOLD = "2.0x faster in your pictures (3 with merging, 3 without)"


@pytest.fixture
def drawn(monkeypatch, server):
    """Sample with a node that is on or off, merged in half of the time, and return the node's last text."""
    clock, patcher = step_clock.put_on(monkeypatch), least_checkpoint()

    def draw(is_on, times=1, **more):
        applied = apply(patcher, ratio=0.5 * is_on, only_if_it_pays=False)
        clock.step = 0.5 if is_on else 1.0
        for _ in range(times):
            sample(applied, **{"steps": 7, **more})
        return server.texts[-1][1]

    draw.patcher, draw.options = patcher, patcher.model_options["transformer_options"]
    gains.KNOWN.forget()
    yield draw
    gains.KNOWN.forget()


def test_it_is_told_after_three_of_both_kinds(drawn):
    assert drawn(False, 3) == nodes.OFF_BY_RATIO
    assert "less work" in drawn(True, 2)
    assert re.fullmatch(rf"ToMe: own settings, 7 steps, \d+% less work, {re.escape(TOLD)}", drawn(True))


def test_a_branch_that_is_off_is_called_as_one_without_a_node(drawn):
    patcher, (off,), reports = drawn.patcher, ApplyToMe().apply(drawn.patcher, strength=0), []
    pictures = [sample(branch, callback=lambda *args: reports.append(args[0])) for branch in (patcher, off)]
    assert torch.equal(*pictures) and reports == [0, 1] * 2
    assert nodes.OFF_TEXT in ToMePreview().preview(off, latent={"samples": pictures[0]})["ui"]["text"]
    for clone in (RemoveToMe().remove(off)[0], apply(off)):
        assert sum(map(len, clone.wrappers.get("apply_model", {}).values())) == (host.find_attached(clone) is not None)


def passes_on(function, *args, **kwargs):
    return function(*args, **kwargs)


def controlled(run, x, t, concat, context, control, options):
    return run(x, t, concat, context, "a ControlNet", options)


@pytest.mark.parametrize("other", some_quick([
    {"size": (16, 8)}, {"sampler": sampler_of()}, "slot", "wrapper", {"batch": 2}], 4))  # fmt: skip
def test_another_sampling_or_another_node_beside_it_is_another_case(drawn, other):
    drawn(False, 3)
    if other == "slot":
        drawn.options[SLOT] = passes_on
    elif other == "wrapper":
        drawn.patcher.add_wrapper_with_key("apply_model", "another's", passes_on)
    changes = other if isinstance(other, dict) else {}
    assert "own pictures" not in drawn(True, 3, **changes)
    drawn(False, 3, **changes)
    assert TOLD.replace("3 with ", "4 with ") in drawn(True, **changes)


@pytest.mark.parametrize("is_on", [False, True])
def test_what_was_stopped_or_ran_beside_patches_or_a_controlnet_counts_for_nothing(drawn, is_on):
    def stop(step):
        if step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drawn(is_on, steps=9, stop=stop)
    drawn.options["patches"] = {"attn1_patch": [lambda q, k, v, extra: (q, k, v)]}
    drawn(is_on)
    del drawn.options["patches"]
    drawn.patcher.add_wrapper_with_key("apply_model", "control", controlled)
    drawn(is_on)
    assert not gains.KNOWN.pictures
    drawn.patcher.remove_wrappers_with_key("apply_model", "control")
    drawn(is_on)
    assert len(gains.KNOWN.pictures) == 1


def test_a_panel_has_each_group_in_its_mean_colour_and_the_picture_where_nothing_merged():
    image = torch.rand(64, 64, 3, generator=torch.Generator().manual_seed(0))
    group = torch.tensor([0, 0, 1, 2])  # the groups of the four quarters; the upper two are one group
    drawn = picture.panel(image, (2, 2), group, "")
    assert torch.allclose(drawn[28, 5], image[:32].mean((0, 1)), atol=0.01)
    assert torch.allclose(drawn[40:, 5:20], image[40:, 5:20], atol=0.01)
    assert torch.allclose(drawn[32, 5] / image[32, 5], torch.full((3,), 0.7), atol=0.05), "a border"


def test_the_preview_has_a_panel_a_level_over_a_latent_or_an_image_of_any_size(server):
    applied = apply(checkpoint(), level="up to /8")
    latent = sample(applied, batch=2)
    drawn = ToMePreview().preview(applied, latent={"samples": latent})["result"][0]
    assert drawn.shape == (2, 64, 64 * 2, 3) and drawn.min() >= 0 and drawn.max() <= 1
    assert not torch.equal(drawn[0], drawn[1])
    assert ToMePreview().preview(applied, image=torch.rand(1, 72, 90, 3))["result"][0].shape == (1, 72, 90 * 2, 3)


@pytest.mark.parametrize(("load", "size", "titles"), [
    (checkpoint, (64, 32), ["level 0 (latent /1): 2,048 tokens in 1,024 groups",
                            "level 1 (latent /2): 512 tokens in 256 groups"]),
    (transformer, (16, 16), ["level 0 (latent /2): 64 tokens in 32 groups"])])  # fmt: skip
def test_a_panel_says_in_how_many_groups_the_pictures_tokens_are(monkeypatch, load, size, titles):
    """A transformer's map has groups of text too."""
    written, plain = [], picture.panel
    monkeypatch.setattr(picture, "panel", lambda *args: written.append(args[-1]) or plain(*args))
    applied = apply(load(), level="up to /8", use_rand=False)
    ToMePreview().preview(applied, latent={"samples": sample(applied, steps=1, size=size)})
    assert written == titles


def test_the_preview_has_the_report_for_the_history_of_the_queue_as_text_and_for_programs(server):
    applied = apply(least_checkpoint())
    shown = ToMePreview().preview(applied, latent={"samples": sample(applied)}, unique_id="9")
    (report,), (data,) = shown["ui"]["text"], shown["ui"]["tome_report"]
    assert report == shown["result"][1] == "\n".join(latest(applied).details) and ToMePreview.OUTPUT_NODE
    assert server.texts[-1] == ("9", report.replace("\n", host.LINE_BREAK))
    same = latest(applied).report.as_data()
    assert {**data, **same, "format": str(same["format"])} == data == json.loads(json.dumps(data))
    assert data["patched"] and (data["steps"], data["strength"], data["start"], data["end"]) == (2, None, 0.0, 1.0)
    assert data["stepped_aside"] == data["unknown"] == [] and data["line"] == report.partition("\n")[0]


def test_the_preview_says_why_there_is_no_map_and_what_to_do(server):
    plain, latent = least_checkpoint(), {"latent": {"samples": torch.zeros(1, 4, 16, 16)}}
    applied, off, aside = apply(plain), apply(plain, ratio=0.9, sx=1, sy=1), apply(plain, start=0.7, end=0.3)
    for model, given, why in (
        (plain, latent, nodes.NOT_APPLIED), (RemoveToMe().remove(applied)[0], latent, nodes.NOT_APPLIED),
        (applied, {}, nodes.NOT_WAITING), (applied, latent, nodes.FROM_CACHE),
        (off, latent, "sx=1, sy=1"), (aside.clone(), latent, "lies after end=0.3"),
        (apply(aside), latent, nodes.FROM_CACHE), (RemoveToMe().remove(aside)[0], {}, nodes.NOT_APPLIED),
    ):  # fmt: skip
        shown = ToMePreview().preview(model, unique_id="9", **given)
        text, image = shown["ui"]["text"][0], shown["result"][0]
        assert why in text and server.texts[-1] == ("9", text)
        assert shown["ui"]["tome_report"][0]["line"] and image.isfinite().all()
