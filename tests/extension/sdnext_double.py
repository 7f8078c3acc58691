"""SD.Next's order of calls around diffusers' own pipelines.

It stands for facts of SD.Next of July 2026: no hook before the hires pass, a new pipeline and scheduler for each pass
around one UNet, errors of a pass caught by the webui, `after_process` whatever happened.
"""

from __future__ import annotations

import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, StableDiffusionPipeline

from tests import models, transformer_pipelines, webui_doubles
from tests.webui_doubles import PROMPT

TEXTS = {"prompt_embeds": PROMPT, "negative_prompt_embeds": torch.zeros_like(PROMPT), "num_inference_steps": 3}


def pipeline(unet, is_hires=False):
    """A new pipeline around this UNet, with a new scheduler."""
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
    kind, settings = (EulerDiscreteScheduler, {}) if is_hires else (DDIMScheduler, {"clip_sample": False})
    parts |= {"unet": unet, "scheduler": kind(steps_offset=1, **settings)}
    pipe = StableDiffusionPipeline(**parts, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


class Processing(webui_doubles.Processing):
    """StableDiffusionProcessingTxt2Img: it keeps the pipeline that it began with, and learns its hires size late."""

    size = 16
    hr_upscale_to_x = hr_upscale_to_y = 0
    sd_model = get_token_merging_ratio = None  # it has no such method

    def __init__(self, webui, args, **more):
        super().__init__(webui, args, sd_model=webui.shared.sd_model, **more)

    def init_hr(self, scale=None, upscaler=None, force=False):
        self.hr_upscale_to_x = self.hr_upscale_to_y = 192


class SdNext(webui_doubles.Webui):
    """modules.processing and modules.processing_diffusers.

    given: a transformer's call. failing_pass: the value of is_hr_pass in the pass that raises.
    """

    processing, given, failing_pass = Processing, None, None

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch, "sdnext")
        self.shared.sd_model = pipeline(models.unet().eval())

    @property
    def unet(self):
        return getattr(self.shared.sd_model, "unet", None) or self.shared.sd_model.transformer

    def infotext(self, p):
        return ", ".join(f"{key}: {value}" for key, value in p.extra_generation_params.items())

    def process(self, p):
        try:
            return super().process(p)
        except RuntimeError:  # SD.Next reports it, and makes no picture
            return None
        finally:
            p.is_hr_pass = False
            self.call("after_process", p)

    def run_pass(self, p, x):
        if p.is_hr_pass:
            p.init_hr(1.5, "Latent", force=True)
        given = self.given
        if given is None:
            given = {**TEXTS, "latents": x, "num_images_per_prompt": len(x)}
            self.shared.sd_model = pipeline(self.unet, p.is_hr_pass)
        out = transformer_pipelines.draw(self.shared.sd_model, given)
        if self.failing_pass is p.is_hr_pass:
            raise RuntimeError("out of memory")
        return out
