"""A webui with doubles for gradio, and jobs in the callback orders of three webuis.

Everything here stands for a fact of A1111 1.10.1, Forge or reForge. The UNet is real (LDM's own, small).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
from typing import Any

import torch

from tests.models import TEXT, ldm_of_one_level
from tests.webui_modules import SAMPLING_HOOK, Modules
from tome_core import form

SIGMAS = (14.61, 6.0, 2.0, 0.5)
TIMESTEPS = (999.0, 800.0, 500.0, 150.0)
FLAVOURS = ("a1111", "reforge", "forge")


def custom(ratio=0.5, **values):
    """A call's arguments by name: everything at the engine's defaults, but for these."""
    return {field.name: field.default for field in form.FIELDS} | {"enabled": True, "ratio": ratio, **values}


ON = (custom(),)  # half of all tokens at every step, however small the picture
ASKED, SAVED = "strength 0.5, own settings", "75% of attention left out"  # what the report says of it
FREE = {"enabled": True, "only_if_it_pays": False}  # the strength of the settings, though pictures have few tokens


def report(done):
    """What API callers are told of a job."""
    return done.extra_generation_params["ToMe report"]


def merged_tokens(facts, name="first pass"):
    """(down-sampling, tokens, queries, keys) of each kind of call that merged in a pass, by what the API is told."""
    levels = facts["ToMe report"]["passes"].get(name, {"levels": []})["levels"]
    kinds = {(level["downsample"], kind["tokens"], kind["queries"], kind["keys"])
             for level in levels for kind in level["merged"]}  # fmt: skip
    return sorted(kinds, key=lambda kind: (kind[:3], kind[3] or 0))  # the MLP has no keys


def be_short(monkeypatch):
    """Half of the steps."""
    for name in ("SIGMAS", "TIMESTEPS"):
        monkeypatch.setattr(f"{__name__}.{name}", globals()[name][::2])


class Component(contextlib.nullcontext):
    """Any gradio component, and a context like some of them; remembers what it sets off."""

    def __init__(self, value=None, **arguments):
        super().__init__(self)
        self.value, self.followed, self.typed = value, [], []

    def click(self, **arguments):
        self.clicked = arguments

    def change(self, **arguments):
        """What any change of the value sets off; a tab's `select` is the same here."""
        self.followed.append(arguments)
        return self

    select = change

    def input(self, **arguments):
        """What a user's own change of it sets off."""
        self.typed.append(arguments)
        return self

    def then(self, **arguments):
        return self

    def get_config(self):
        """What the page starts with; the API starts with `value`."""
        return {"value": self.value}


GRADIO = ("Row", "Accordion", "Slider", "Radio", "Dropdown", "Checkbox", "Number", "Button", "HTML")


def sample_euler(model, x, sigmas, extra_args=None, callback=None, disable=None):
    """k-diffusion's: says after each step's call which it was."""
    for i, (sigma, timestep) in enumerate(zip(SIGMAS, TIMESTEPS, strict=True)):
        called = model(x / (1 + sigma) ** 0.1, sigma, timestep)
        if callback is not None:
            callback({"x": x, "i": i, "sigma": sigmas[i], "denoised": called})
        x = x - 0.2 * called
    return x


def ddim(model, x, timesteps, extra_args=None, callback=None, disable=None):
    """The webui's own: its list runs upwards, and its first is never called."""
    for i, (sigma, timestep) in enumerate(zip(SIGMAS, TIMESTEPS, strict=True)):
        x = x - 0.2 * model(x / (1 + sigma) ** 0.1, timestep, timestep)
        if callback is not None:
            callback({"x": x, "i": i, "sigma": 0, "denoised": x})
    return x


sample_euler.__module__ = "k_diffusion.sampling"
ddim.__module__ = "modules.sd_samplers_timesteps_impl"


class Sampler:
    """sd_samplers_common.Sampler: made anew for each pass, before extensions hear of it."""

    def __init__(self, func):
        self.func, self.steps = func, []

    def callback_state(self, state):
        self.steps.append(state["i"])

    def run(self, denoiser, x, place):
        """Give the function the list that it has a parameter for. place: puts a tensor where the host has it."""
        parameters, more = inspect.signature(self.func).parameters, {}
        if "sigmas" in parameters:
            more["sigmas"] = place(torch.tensor([*SIGMAS, 0.0]))
        if "timesteps" in parameters:
            more["timesteps"] = place(torch.tensor([1.0, *reversed(TIMESTEPS)]))
        return self.func(denoiser, x, extra_args={}, disable=False, callback=self.callback_state, **more)


class Denoiser:
    """CFGDenoiser: tells its listeners, then calls the model that runs now."""

    classic_ddim_eps_estimation = False

    def __init__(self, p, webui):
        self.p, self.webui, self.step = p, webui, 0

    def __call__(self, x, time, timestep):
        p, webui = self.p, self.webui
        if p.refiner is not None and self.step >= p.refiner_at:
            webui.load(p.refiner)
        sigma = webui.place(torch.full((x.shape[0],), time))
        webui.call("cfg_denoiser", types.SimpleNamespace(x=x, sigma=sigma, denoiser=self))
        p.at_step(self.step)
        self.step += 1
        return self.guided(x, timestep)

    def guided(self, x, timestep):
        halves = [self.p.text, torch.zeros_like(self.p.text)]
        if self.webui.has_uncond_first:
            halves.reverse()
        text = torch.cat([half.expand(x.shape[0], -1, -1) for half in halves])
        out = self.run(torch.cat([x, x]), timestep, text)
        uncond, cond = out.chunk(2) if self.webui.has_uncond_first else reversed(out.chunk(2))
        return uncond + 2 * (cond - uncond)

    @torch.no_grad()
    def run(self, x, timestep, text):
        return self.webui.unet(x, torch.full((x.shape[0],), timestep), text.expand(x.shape[0], -1, -1))


class CFGDenoiserTimesteps(Denoiser):
    """The same for DDIM and its like, whose time is a timestep."""


class Processing:
    """StableDiffusionProcessing, with what the test wants to happen."""

    is_hr_pass = False
    refiner = None
    refiner_at = 2
    denoiser = Denoiser
    sampler_function = None  # None: the one that goes with the denoiser
    sampler = None
    size = 8  # of the latents; 12 in the hires pass
    width = height = property(lambda self: 8 * self.size)
    hr_upscale_to_x = hr_upscale_to_y = property(lambda self: 12 * self.size)

    def __init__(self, webui, args, enable_hr=False, n_iter=1, batch_size=1, seed=7, override_settings=None, **more):
        self.override_settings = override_settings or {}
        self.webui, self.enable_hr, self.n_iter, self.batch_size = webui, enable_hr, n_iter, batch_size
        self.args = list(args)
        self.extra_generation_params: dict[str, Any] = {}
        self.all_seeds = [seed + n for n in range(n_iter * batch_size)]
        self.text = torch.randn(1, 7, TEXT, generator=torch.Generator().manual_seed(0))
        vars(self).update(more)

    @property
    def sd_model(self):
        return self.webui.shared.sd_model

    def get_token_merging_ratio(self, for_hr=False):
        return getattr(getattr(self.webui.shared, "opts", None), "token_merging_ratio", 0.0)

    def at_step(self, step):
        """Replaced by tests that interrupt, raise or look."""


class Webui(Modules):
    """One webui with our repository, and perhaps others, among its extensions."""

    place = staticmethod(lambda x: x)  # a tensor to where this webui's device is

    def __init__(self, monkeypatch, flavour="a1111"):
        super().__init__(monkeypatch.setitem, flavour)
        self.has_uncond_first = flavour in ("forge", "reforge")
        self.errors: list[Exception] = []
        components = {name: type(name, (Component,), {}) for name in GRADIO}
        self.put("gradio", update=lambda **facts: facts, **components)
        self.context = self.put("gradio.context", Context=types.SimpleNamespace(block="a group", root_block="blocks"))
        accordion = type("InputAccordion", (Component,), {"accordion": Component()})
        self.put("modules.ui_components", InputAccordion=accordion)
        if flavour != "sdnext":
            self.put("modules.processing", create_infotext=Webui.infotext)
        self.load(ldm_of_one_level())

    def load(self, model):
        """Make it the model that samples; the Forges keep it elsewhere."""
        if self.has_uncond_first:
            objects = types.SimpleNamespace(unet=types.SimpleNamespace(model=model.model))
            model = types.SimpleNamespace() if self.flavour == "forge" else model
            model.forge_objects = objects
        self.shared.sd_model = model

    @property
    def unet(self):
        objects = getattr(self.shared.sd_model, "forge_objects", None)
        return (self.shared.sd_model if objects is None else objects.unet).model.diffusion_model

    def reset_objects(self):
        """The Forges throw their patcher away before each pass, not the UNet in it."""
        objects = getattr(self.shared.sd_model, "forge_objects", None)
        if objects is not None:
            self.shared.sd_model.forge_objects = types.SimpleNamespace(unet=copy.copy(objects.unet))

    def hook(self, name, p, *front, **facts):
        """Every hook is called so: what it raises is reported, and the job goes on."""
        try:
            getattr(self.script, name, lambda *args, **facts: None)(p, *front, *p.args, **facts)
        except Exception as error:
            self.errors.append(error)

    def job(self, *args, **more):
        """process_images of a new p."""
        return self.process(Processing(self, args, **more))

    def plain(self, **more):
        """The job in a webui without the extension."""
        with_us, self.script = self.script, None
        job = self.job(**more)
        self.script = with_us
        return job

    def process(self, p):
        """process_images, in the order of this webui: a request's own settings hold from behind the first hook."""
        self.hook("before_process", p)
        data = getattr(getattr(self.shared, "opts", None), "data", {})  # without a settings tab there may be none
        before = {key: data[key] for key in p.override_settings if key in data}  # what was never saved is not put back
        data |= p.override_settings
        try:
            return self._process(p)
        finally:
            data |= before

    def _process(self, p):
        latents, infotexts, built_in = [], [], []
        if self.flavour == "a1111":
            p.get_token_merging_ratio()
        self.hook("process", p)
        for n in range(p.n_iter):
            p.seeds = p.all_seeds[n * p.batch_size : (n + 1) * p.batch_size]
            self.reset_objects()
            self.hook("process_batch", p, batch_number=n)
            built_in.append(p.get_token_merging_ratio())
            p.params_txt = self.infotext(p)
            latents.append(self._sample(p, built_in))
            self.hook("post_sample", p)
            self.hook("postprocess_batch", p, images=latents[-1], batch_number=n)
            infotexts += [self.infotext(p)] * p.batch_size
            p.at_step("postprocess_image")
        done = types.SimpleNamespace(
            latents=torch.cat(latents), infotexts=infotexts, comments="", built_in=built_in,
            extra_generation_params=p.extra_generation_params,
        )  # fmt: skip
        self.hook("postprocess", p, done)
        return done

    def _sample(self, p, built_in):
        generator = torch.Generator().manual_seed(p.seeds[0])
        x = torch.randn(p.batch_size, 4, p.size, p.size, generator=generator)
        p.sampler = self._sampler_of(p)
        self._before_sampling(p)
        x = p.first = self._steps(p, x)
        if not p.enable_hr:
            return x
        p.is_hr_pass = True
        x = torch.nn.functional.interpolate(x, scale_factor=1.5) + 0.1
        if self.flavour == "reforge":
            self.reset_objects()
        built_in.append(p.get_token_merging_ratio(for_hr=True))
        p.sampler = self._sampler_of(p)
        self.hook("before_hr", p)
        self._before_sampling(p)
        if self.flavour == "forge":
            self.reset_objects()
            self._before_sampling(p)
        x = self._steps(p, x)
        p.is_hr_pass = False
        return x

    def _before_sampling(self, p):
        self.hook(SAMPLING_HOOK, p, x=None, noise=None, c=None, uc=None)

    def _steps(self, p, x):
        # the Forges bring their list to the device, A1111 leaves it on the CPU
        return p.sampler.run(p.denoiser(p, self), x, self.place if self.has_uncond_first else lambda x: x)

    def _sampler_of(self, p):
        by_timestep = issubclass(p.denoiser, CFGDenoiserTimesteps)
        return Sampler(p.sampler_function or (ddim if by_timestep else sample_euler))

    def infotext(self, p):
        """create_infotext, the part about us."""
        pairs = dict(p.extra_generation_params)
        for key, value in pairs.items():  # a comprehension's code would be another, and ours looks into this one
            pairs[key] = value() if callable(value) else value
        pairs["Token merging ratio"] = p.get_token_merging_ratio() or None
        return ", ".join(f"{key}: {value}" for key, value in pairs.items() if value is not None)


def merges(model):
    """Does anything of ours lie on this UNet?"""
    return any("_tome_core_patch" in vars(one) or "forward" in vars(one) for one in model.modules())
