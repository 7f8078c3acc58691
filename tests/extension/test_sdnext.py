"""SD.Next: which passes merge, and that nothing stays, in its order of calls around real pipelines of diffusers' UNet.

The doubles stand for facts of SD.Next of July 2026: no hook before the hires pass, a new pipeline and scheduler for
each pass around one UNet, errors of a pass caught by the webui, `after_process` whatever happened.
"""

from __future__ import annotations

import types

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler
from torch import nn

from tests import transformer_pipelines, webui_doubles
from tests.models import TEXT, unet
from tests.webui_doubles import FREE, ON, Webui, custom, merges

STEPS = 3
PROMPT = torch.randn(1, 7, TEXT, generator=torch.Generator().manual_seed(0))


class Pipeline:
    """A diffusers pipeline's loop, with guidance in one batch."""

    def __init__(self, unet, scheduler):
        self.unet, self.scheduler = unet, scheduler

    @torch.no_grad()
    def __call__(self, x):
        self.scheduler.set_timesteps(STEPS)
        x = x * self.scheduler.init_noise_sigma
        for t in self.scheduler.timesteps:
            both = self.scheduler.scale_model_input(torch.cat([x, x]), t)
            halves = torch.cat([torch.zeros_like(PROMPT), PROMPT]).repeat_interleave(len(x), 0)
            uncond, cond = self.unet(both, t, halves).sample.chunk(2)
            x = self.scheduler.step(uncond + 2 * (cond - uncond), t, x).prev_sample
        return x


class Transformer:
    """One of diffusers' pipelines without a UNet, by its own call."""

    def __init__(self, pipe, call):
        self.pipe, self.call, self.transformer, self.scheduler = pipe, call, pipe.transformer, DDIMScheduler()

    def __call__(self, x):
        return transformer_pipelines.draw(self.pipe, self.call)


class Processing(webui_doubles.Processing):
    """StableDiffusionProcessingTxt2Img: it keeps the pipeline that it began with, and learns its hires size late."""

    size = 16
    hr_upscale_to_x = hr_upscale_to_y = 0
    sd_model = get_token_merging_ratio = None  # it has no such method

    def init_hr(self, scale=None, upscaler=None, force=False):
        self.hr_upscale_to_x = self.hr_upscale_to_y = 192


class SdNext(Webui):
    """modules.processing and modules.processing_diffusers. fails: the pass that raises, "base" or "hires"."""

    fails = unet = None

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch, "sdnext")
        self.unet = unet().eval()
        self.shared.sd_model = Pipeline(self.unet, DDIMScheduler())

    def process(self, p):
        done = types.SimpleNamespace(latents=[], firsts=[], infotexts=[], comments="", extra_generation_params={})
        self.hook("before_process", p)
        try:
            self.hook("process", p)
            for n in range(p.n_iter):
                p.seeds = p.all_seeds[n * p.batch_size : (n + 1) * p.batch_size]
                self.hook("process_batch", p, batch_number=n)
                self._sample(p, done)
                self.hook("postprocess_batch", p, images=done.latents[-1], batch_number=n)
                done.infotexts.append(dict(p.extra_generation_params))
            self.hook("postprocess", p, done)
        except RuntimeError:
            done.infotexts = None  # SD.Next reports it, and makes no picture
        finally:
            p.is_hr_pass = False
            self.call("after_process", p)
        return done

    def _sample(self, p, done):
        x = torch.cat([torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in p.seeds])
        x = self._pass("base", DDIMScheduler(), x)
        done.firsts.append(x)
        if p.enable_hr:
            p.is_hr_pass = True
            p.init_hr(1.5, "Latent", force=True)
            x = self._pass("hires", EulerDiscreteScheduler(), nn.functional.interpolate(x, scale_factor=1.5))
            p.is_hr_pass = False
        done.latents.append(x)

    def _pass(self, name, scheduler, x):
        if isinstance(self.shared.sd_model, Pipeline):
            self.shared.sd_model = Pipeline(self.unet, scheduler)
        out = self.shared.sd_model(x)
        if self.fails == name:
            raise RuntimeError("out of memory")
        return out


@pytest.fixture
def webui(monkeypatch):
    webui = SdNext(monkeypatch).start()
    yield webui
    assert not webui.errors
    assert is_clean(webui), "something was left on the model"
    webui.call("script_unloaded")


def is_clean(webui):
    return not merges(webui.unet) and not webui.unet._forward_hooks


def draw(webui, *args, **more):
    """The finished job, all its latents, and what API callers are told."""
    done = webui.process(Processing(webui, args, sd_model=webui.shared.sd_model, **more))
    return done, torch.cat(done.latents), done.extra_generation_params.get("ToMe report")


def test_off_is_bit_identical_to_no_extension_also_after_a_merged_picture(webui):
    with_us, webui.script = webui.script, object()
    expected = draw(webui, enable_hr=True)[1]
    webui.script = with_us
    assert not torch.equal(draw(webui, *ON, enable_hr=True)[1], expected)
    for args in ((False,), (custom(0.0),), (True, 9.0)):
        assert torch.equal(draw(webui, *args, enable_hr=True)[1], expected)


def test_each_choice_of_where_and_the_steps_of_each_pass(webui):
    plain, *_ = draw(webui, False, enable_hr=True)
    names = ("first pass", "hires pass")
    for where, passes in (("everywhere", names), *((name, (name,)) for name in names)):
        done, _, report = draw(webui, custom(where=where), enable_hr=True)
        assert torch.equal(done.firsts[0], plain.firsts[0]) != ("first pass" in passes)
        lines = [f"{name}: {f'{STEPS} steps, 73% of attention left out' if name in passes else 'left alone'}"
                 for name in names]  # fmt: skip
        assert report["line"] == "; ".join(["strength 0.5, own settings", *lines])


def test_equal_seeds_give_equal_pictures_whatever_ran_before(webui):
    _, first, report = draw(webui, FREE, n_iter=2, batch_size=2)  # which keeps its matches from step to step
    draw(webui, *ON)
    assert torch.equal(draw(webui, FREE, n_iter=2, batch_size=2)[1], first) and report["merged"]


@pytest.mark.parametrize("name", ["base", "hires"])
def test_a_pass_that_fails_leaves_nothing(webui, name):
    expected = draw(webui, False)[1]
    webui.fails = name
    assert webui.process(Processing(webui, ON, sd_model=webui.shared.sd_model, enable_hr=True)).infotexts is None
    assert is_clean(webui)
    webui.fails = None
    assert torch.equal(draw(webui, False)[1], expected)


@pytest.mark.parametrize(("settings", "lines"), [
    ({"token_merging_method": "ToMe", "tome_ratio": 0.5}, ["SD.Next's own token merging (ToMe 0.5) is on"] * 2),
    ({"token_merging_method": "ToDo", "todo_ratio": 0.3}, ["SD.Next's own token merging (ToDo 0.3) is on"] * 2),
    ({"token_merging_method": "ToMe", "tome_ratio": 0.0}, ["73%", "73%"]),
    ({"hypertile_unet_enabled": True}, ["HyperTile is on"] * 2),
    ({"hypertile_unet_enabled": True, "hypertile_hires_only": True}, ["73%", "HyperTile is on"]),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_it_steps_aside_for_the_webuis_own_that_is_on(webui, settings, lines):
    webui.shared.opts.data.update(settings)
    done, _, report = draw(webui, *ON, enable_hr=True)
    _, first, second = report["line"].split("; ", 2)
    assert lines[0] in first and lines[1] in second
    assert report["merged"] is ("73%" in lines) is (done.infotexts != [{}])


@pytest.mark.parametrize("is_known", [True, False])
def test_a_transformer_that_the_engine_knows_merges_by_its_own_strengths_and_another_is_told(webui, is_known):
    pipe, call = transformer_pipelines.make("Flux")
    webui.shared.sd_model = model = Transformer(pipe, call)
    webui.unet = model.transformer
    if not is_known:
        model.transformer = nn.Linear(2, 2)
    plain = draw(webui, False)[1]
    done, latents, report = draw(webui, FREE)
    assert report["merged"] is (done.infotexts != [{}]) is (not torch.equal(latents, plain)) is is_known
    assert webui.part("host").layout() == "transformer" if is_known else "BasicTransformerBlock" in report["line"]
    assert torch.equal(draw(webui, False)[1], plain)


def test_the_infotext_does_not_take_the_name_of_its_own_setting(webui):
    webui.put("modules.infotext", mapping=[("ToMe", "tome_ratio")])
    (written,) = draw(webui, FREE)[0].infotexts
    assert written == {"ToMe strength": "0.5; only_if_it_pays=False"}
    value = webui.part("infotext").Paste().value
    assert value("enabled", written) is True and value("strength", written) == 0.5
    assert value("enabled", {"ToMe": "0.5"}) is True, "of another webui"


def test_the_page_knows_the_webuis_controls_by_its_own_names_and_its_hires_size(webui):
    webui.script.ui(False)
    followed = []
    webui.part("ui")._waiting["txt2img"] = types.SimpleNamespace(follow=followed.append)
    for name in ("width", "height", "enable_hr", "scale", "resize_width", "resize_height"):
        webui.part("script").on_component(name, elem_id=f"txt2img_{name}")
    assert followed == [{"width": "width", "height": "height", "hr-checkbox": "enable_hr", "hr_scale": "scale",
                         "hr_resize_x": "resize_width", "hr_resize_y": "resize_height"}]  # fmt: skip
    webui.put("modules.processing", StableDiffusionProcessingTxt2Img=Processing)
    assert webui.part("host").hires_size(128, 128, 1.5, 0, 0) == (192, 192)
