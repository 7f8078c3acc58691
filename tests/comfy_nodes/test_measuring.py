"""In ComfyUI a switch asks what merging gains: measured after a sampling, once, and never at a picture's cost."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from comfy_nodes import host
from comfy_nodes.nodes import ApplyToMe, RemoveToMe, ToMePreview, ToMeSettings
from comfy_nodes.slot import SLOT
from tests import comfy_attention
from tests.comfy_doubles import Guider, Server, checkpoint
from tests.comfy_transformer import FlowGuider, transformer
from tests.traces import traces
from tome_core.engine.state import State
from tome_core.hosting import gains
from tome_core.measuring import measured

SIZE = (16, 16)  # 256 tokens, which the table leaves alone


@pytest.fixture
def server(server, monkeypatch, tmp_path):
    """ComfyUI, as far as it is asked."""
    paths = SimpleNamespace(get_user_directory=lambda: str(tmp_path))
    monkeypatch.setitem(sys.modules, "folder_paths", paths)
    gains.load(host.gains_file())
    yield server
    gains.KNOWN.forget()


@pytest.fixture
def costs(monkeypatch):
    """Says what a merged call takes, an unmerged one 1; keeps the measurements."""
    made, plain = [], measured.time_calls

    def say(merged):
        def time_calls(*args, clock=None, **more):
            saved = plain(*args[:3], steps=2, rounds=1, clock=clock or args[5])[3]
            made.append(args)
            return 1.0, merged, 0.0, saved

        monkeypatch.setattr(measured, "time_calls", time_calls)
        return made

    return say


def drawn(patcher=None, measure=True, **options):
    (applied,) = ApplyToMe().apply(patcher or checkpoint(), strength=0.75, measure=measure, unique_id="5")
    return Guider(applied).sample(steps=3, size=SIZE, **options)


def last(server: Server) -> list[str]:
    return [line.strip() for line in server.texts[-1][1].split("\n")]


def test_nothing_is_measured_unasked(server, costs, tmp_path):
    made = costs(0.5)
    drawn(measure=False)
    assert not made and not list(tmp_path.iterdir())


def test_what_pays_merges_from_the_next_sampling_on_and_after_a_restart(server, costs, tmp_path, caplog):
    made = costs(0.5)
    patcher = checkpoint()
    plain = Guider(RemoveToMe().remove(patcher)[0]).sample(steps=3, size=SIZE)
    assert torch.equal(drawn(patcher=patcher), plain), "a picture is not changed by what is measured after it"
    assert "measured: 128x128: about 2.0x faster" in last(server)
    with caplog.at_level("INFO"):
        after = drawn(patcher=patcher)
    assert not torch.equal(after, plain) and len(made) == 1, "once"
    (line,) = [one.getMessage() for one in caplog.records]
    assert line == "ToMe #5: strength 0.75, 3 steps, about 2.0x faster (measured here)"
    assert last(server) == [line.replace(" #5", "")]
    gains.KNOWN.forget()
    assert torch.equal(drawn(patcher=patcher), plain) and len(made) == 2
    gains.KNOWN.forget()
    gains.load(host.gains_file())
    assert [file.name for file in tmp_path.iterdir()] == ["tome_core_gains.json"]
    assert torch.equal(drawn(patcher=patcher), after) and len(made) == 2


def test_what_merges_is_said_to_gain_in_the_report_on_that_sampling(server, costs):
    costs(0.8)
    (settings,) = ToMeSettings().settings(only_if_it_pays=False)
    (applied,) = ApplyToMe().apply(checkpoint(), settings=settings, measure=True, unique_id="5")
    latent = Guider(applied).sample(steps=3, size=SIZE)
    assert last(server)[0] == "ToMe: own settings, 3 steps, about 1.2x faster (measured here)"
    shown = ToMePreview().preview(applied, latent={"samples": latent}, unique_id="9")
    assert shown["ui"]["tome_report"][0]["gains"][0]["ratio"] == 1.25


@pytest.mark.parametrize("beside", ["attn1_patch", "patches_replace", "easycache"])
def test_no_gain_is_told_where_something_beside_was_not_there_when_it_was_measured(server, costs, beside):
    """HyperTile and TomePatchModel are such patches."""
    costs(0.5)
    patcher = checkpoint()
    for _ in range(2):
        drawn(patcher=patcher)
    assert "about 2.0x faster" in last(server)[0]
    options = patcher.model_options["transformer_options"]
    what = {"attn1_patch": ("patches", {"attn1_patch": [lambda q, k, v, extra: (q, k, v)]}),
            "patches_replace": ("patches_replace", {"attn1": {("middle", 0): lambda q, k, v, extra: v}}),
            "easycache": ("easycache", SimpleNamespace(name="EasyCache"))}  # fmt: skip
    name, value = what[beside]
    options[name] = value
    drawn(patcher=patcher)
    assert "faster" not in last(server)[0] and "of attention left out" in last(server)[0]


def test_weights_may_wait_elsewhere_than_where_their_layers_run(server, costs):
    """As ComfyUI keeps them on a card: in main memory, and each comes with its layer's call."""
    made, patcher = costs(0.5), checkpoint()
    for layer in patcher.model.diffusion_model.modules():
        if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d)):
            weights = dict(layer._parameters)
            away = {name: torch.nn.Parameter(one.to("meta")) for name, one in weights.items() if one is not None}
            layer._parameters.update(away)
            layer.register_forward_pre_hook(lambda layer, args, weights=weights: layer._parameters.update(weights))
            layer.register_forward_hook(lambda layer, args, out, away=away: layer._parameters.update(away))
    drawn(patcher=patcher)
    assert made and "measured: 128x128: about 2.0x faster" in last(server)


@pytest.mark.parametrize(("weights", "casts"), [(torch.float16, None), (torch.uint8, torch.float16)])
def test_it_is_measured_in_the_precision_in_which_the_model_computes(server, monkeypatch, weights, casts):
    """The host samples in another, and may compute in another than that of the weights."""
    seen, begin, patcher = [], State.begin, checkpoint()
    monkeypatch.setattr(State, "begin", lambda self, t, latent, *more: seen.append(latent.dtype) or begin(
        self, t, latent, *more))  # fmt: skip
    patcher.model.get_dtype, patcher.model.manual_cast_dtype = lambda: weights, casts
    drawn(patcher=patcher, measure=False)
    assert seen == [torch.float16] * 3


def test_a_stopped_sampling_is_not_measured(server, costs):
    made = costs(0.5)

    def stop(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drawn(stop=stop)
    assert not made


def test_cancelling_ends_the_measurement_and_no_picture(server, costs, monkeypatch):
    costs(0.5)
    management = SimpleNamespace(processing_interrupted=lambda: True)
    monkeypatch.setitem(sys.modules, "comfy.model_management", management)
    assert drawn().isfinite().all()
    assert "the gain was not measured: it was cancelled" in last(server)
    assert not gains.KNOWN


def test_what_fails_costs_no_picture_and_leaves_nothing_on_the_model(server, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(measured, "time_calls", fails)
    patcher = checkpoint()
    before = traces(patcher.model)
    assert drawn(patcher=patcher).isfinite().all()
    assert "the gain was not measured: out of memory" in last(server) and traces(patcher.model) == before


def test_a_measurement_leaves_nothing_on_the_model(server, costs):
    made, patcher = costs(0.5), checkpoint()
    before = traces(patcher.model)
    drawn(patcher=patcher)
    assert made and traces(patcher.model) == before


def test_a_sampling_inside_another_is_not_measured(server, costs):
    made = costs(0.5)
    (applied,) = ApplyToMe().apply(checkpoint(), strength=0.75, measure=True, unique_id="5")
    Guider(applied).sample(steps=1, size=SIZE, stop=lambda step: Guider(applied).sample(steps=1, size=(8, 8)))
    (args,) = made
    assert args[2].shape[-2:] == SIZE


def test_of_a_transformer_nothing_is_measured_and_that_is_said(server, costs):
    made = costs(0.5)
    (applied,) = ApplyToMe().apply(transformer(), measure=True, unique_id="5")
    FlowGuider(applied).sample()
    assert not made and "the gain was not measured: that is done with UNets alone" in last(server)


def test_a_gain_is_of_the_attention_in_force(server, costs, monkeypatch):
    """Be it ComfyUI's, or another node's in the slot, which the measurement asks as the sampling did."""
    made, asked, patcher = costs(0.5), [], checkpoint()

    def override(function, q, k, v, heads, **kwargs):
        asked.append(k.shape[1])
        return function(q, k, v, heads, **kwargs)

    drawn(patcher=patcher)
    monkeypatch.setattr(comfy_attention, "optimized_attention", comfy_attention.attention_basic)
    drawn(patcher=patcher)
    drawn(patcher=patcher)
    assert len(made) == 2
    patcher.model_options["transformer_options"][SLOT] = override
    drawn(patcher=patcher)
    of_sampling = sum(keys > 64 for keys in asked[: 3 * 6 * 2])
    assert len(made) == 3 and len(asked) > 3 * 6 * 2 and of_sampling
    drawn(patcher=patcher)
    assert len(made) == 3


def test_outside_of_comfyui_nothing_is_kept_in_a_file(monkeypatch):
    monkeypatch.delitem(sys.modules, "folder_paths", raising=False)
    assert host.gains_file() is None and not host.is_interrupted()
