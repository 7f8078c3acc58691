"""A webui with doubles for gradio and small real UNets; jobs in the callback orders of four webuis (A1111 1.10.1)."""

import contextlib
import inspect
import types
from types import MappingProxyType

import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, StableDiffusionPipeline

from tests.host_doubles.webui_modules import SAMPLING_HOOK, Modules
from tests.small_models import transformer_pipelines, unets
from tests.small_models.unets import TEXT, ldm_of_one_level
from tome_core import form

SIGMAS = (14.61, 6.0, 2.0, 0.5)
TIMESTEPS = (999.0, 800.0, 500.0, 150.0)
FLAVOURS = ("a1111", "forge", "reforge")
PROMPT = torch.randn(1, 7, TEXT, generator=torch.Generator().manual_seed(0))


def custom(ratio=0.5, **values):
    """A call's arguments by name: all at the engine's defaults, except these."""
    return {field.name: field.default for field in form.FIELDS} | {"enabled": True, "ratio": ratio, **values}


ON = (custom(),)  # half of all tokens at every step, however small the picture
ASKED, SAVED = "strength 0.5, own settings", "4% less work"  # the report's words for these settings
FREE = {"enabled": True, "only_if_it_pays": False}  # the settings' strength, although pictures have few tokens


def report(done):
    return done.extra_generation_params["ToMe report"]


def merged_tokens(facts, name="first pass"):
    """(down-sampling, tokens, queries, keys) of each kind of call that merged in a pass, by the API's report."""
    levels = facts["ToMe report"]["passes"].get(name, {"levels": []})["levels"]
    kinds = {(level["downsample"], kind["tokens"], kind["queries"], kind["keys"])
             for level in levels for kind in level["merged"]}  # fmt: skip
    return sorted(kinds, key=lambda kind: (kind[:3], kind[3] or 0))  # the MLP has no keys


def be_short(monkeypatch):
    """Take half of the steps."""
    monkeypatch.setattr(f"{__name__}.SIGMAS", SIGMAS[::2])
    monkeypatch.setattr(f"{__name__}.TIMESTEPS", TIMESTEPS[::2])


class Component(contextlib.nullcontext):
    """Any gradio component or page, and a context like some of them. `followed` lists handlers of its events."""

    def __init__(self, value=None, label="", **arguments):
        super().__init__(self)
        self.value, self.label, self.followed = value, label, []

    def change(self, **arguments):
        self.followed.append(arguments)
        return self

    click = select = load = change
    input = then = lambda self, **arguments: self

    def get_config(self):
        """The value and label with which the page starts; the API starts with `value`."""
        return {"value": self.value, "label": self.label}


GRADIO = ("Row", "Accordion", "Slider", "Radio", "Dropdown", "Checkbox", "Number", "HTML")


def sample_euler(model, x, sigmas, extra_args=None, callback=None, disable=None):
    """k-diffusion's sampler, which reports the step after each step's call."""
    for i, (sigma, timestep) in enumerate(zip(SIGMAS, TIMESTEPS, strict=True)):
        called = model(x / (1 + sigma) ** 0.1, sigma, timestep)
        callback({"x": x, "i": i, "sigma": sigma, "denoised": called})
        x = x - 0.2 * called
    return x


def ddim(model, x, timesteps, extra_args=None, callback=None, disable=None):
    """The webui's own sampler: its list runs upwards, its first is never called, and its time is the timestep."""
    return sample_euler(lambda x, sigma, timestep: model(x, timestep, timestep), x, (), callback=callback)


sample_euler.__module__ = "k_diffusion.sampling"
ddim.__module__ = "modules.sd_samplers_timesteps_impl"


class Interrupted(Exception):
    """sd_samplers_common.InterruptedException, which ends a pass and not the job."""


class Sampler:
    """sd_samplers_common.Sampler: made for each pass, before extensions learn of it. place: puts a tensor on the
    lists' device."""

    def __init__(self, func, denoiser, place):
        self.func, self.denoiser, self.place, self.steps = func, denoiser, place, []

    def callback_state(self, state):
        self.steps.append(state["i"])

    def sample(self, p, x):
        """Give the function the list for its parameter, and the denoiser the number of steps that were asked for."""
        lists = {"sigmas": [*SIGMAS, 0.0], "timesteps": [1.0, *reversed(TIMESTEPS)]}
        more = {name: self.place(torch.tensor(lists[name])) for name in inspect.signature(self.func).parameters
                if name in lists}  # fmt: skip
        self.denoiser.steps = p.steps or len(SIGMAS)
        try:
            return self.func(self.denoiser, x, extra_args={}, disable=False, callback=self.callback_state, **more)
        except Interrupted:
            return x

    def sample_img2img(self, p, x):
        return Sampler.sample(self, p, x)


class Denoiser:
    """CFGDenoiser, which calls its listeners, then the current model."""

    def __init__(self, p, webui):
        self.p, self.webui, self.step, self.steps = p, webui, 0, None

    def __call__(self, x, time, timestep):
        p, webui = self.p, self.webui
        if p.refiner is not None and self.step >= 2:
            webui.load(p.refiner)
        sigma = webui.place(torch.full((x.shape[0],), time))
        webui.call("cfg_denoiser", types.SimpleNamespace(x=x, sigma=sigma, denoiser=self))
        p.at_step(self.step)
        self.step += 1
        return self.guided(x, timestep)

    def guided(self, x, timestep):
        texts = torch.cat([PROMPT] * len(x) + [torch.zeros_like(PROMPT)] * len(x))
        cond, uncond = self.run(torch.cat([x, x]), timestep, texts).chunk(2)
        return uncond + 2 * (cond - uncond)

    @torch.no_grad()
    def run(self, x, timestep, text):
        return self.webui.unet(x, torch.full((x.shape[0],), timestep), text.expand(x.shape[0], -1, -1))


class CFGDenoiserTimesteps(Denoiser):
    """The denoiser of DDIM and similar samplers, whose time is a timestep."""


class Processing:
    """StableDiffusionProcessing; a test sets any attribute by its name."""

    is_hr_pass = enable_hr = False
    n_iter = batch_size = 1
    seed = 7
    override_settings = MappingProxyType({})
    refiner = sampler = None
    steps = None  # that are asked for; None: as many as there are
    denoiser = Denoiser
    sampler_function = None  # None: the sampler that goes with the denoiser
    size = 8  # the latents' size; 12 in the hires pass
    width = height = property(lambda self: 8 * self.size)
    hr_upscale_to_x = hr_upscale_to_y = property(lambda self: 12 * self.size)

    def __init__(self, webui, args, **more):
        self.webui, self.args, self.extra_generation_params = webui, [*args], {}
        vars(self).update(more)
        self.all_seeds = [self.seed + n for n in range(self.n_iter * self.batch_size)]

    @property
    def sd_model(self):
        return self.webui.shared.sd_model

    def get_token_merging_ratio(self, for_hr=False):
        return self.webui.shared.opts.token_merging_ratio

    def sample(self):
        """Replaced by scripts that sample by themselves."""
        return self.webui.sample(self)

    def at_step(self, step):
        """Replaced by tests that interrupt, raise or look."""

    def at(self, place):
        """The same between the hooks and the sampling."""


class Webui(Modules):
    """One webui with our repository, and perhaps others, among its extensions."""

    processing = Processing
    place = staticmethod(lambda x: x)  # puts a tensor on this webui's device

    def __init__(self, monkeypatch, flavour="a1111"):
        super().__init__(monkeypatch.setitem, flavour)
        self.is_forge = flavour in ("forge", "reforge")
        self.errors: list[Exception] = []
        components = {name: type(name, (Component,), {}) for name in GRADIO}
        self.put("gradio", update=lambda **facts: facts, **components)
        page = Component()
        self.context = self.put("gradio.context", Context=types.SimpleNamespace(block="a group", root_block=page))
        if flavour != "sdnext":
            self.put("modules.processing", create_infotext=Webui.infotext)
            self.load(ldm_of_one_level())

    def load(self, model):
        """Make this the model that samples; the Forges keep its UNet elsewhere."""
        if self.is_forge:
            unet = types.SimpleNamespace(model=model.model)
            model = types.SimpleNamespace(forge_objects=types.SimpleNamespace(unet=unet))
        self.shared.sd_model = model

    @property
    def unet(self):
        model = self.shared.sd_model
        return (model.forge_objects.unet if self.is_forge else model).model.diffusion_model

    def hook(self, name, p, *front, **facts):
        """Call a hook; its error is reported, and the job goes on."""
        try:
            getattr(self.script, name, lambda *args, **facts: None)(p, *front, *p.args, **facts)
        except Exception as error:
            self.errors.append(error)

    def job(self, *args, **more):
        return self.process(self.processing(self, args, **more))

    def plain(self, **more):
        with_us, self.script = self.script, None
        job = self.job(**more)
        self.script = with_us
        return job

    def process(self, p):
        """process_images, in the order of this webui: a request's own settings hold after the first hook."""
        self.hook("before_process", p)
        data = self.shared.opts.data
        before = {key: data[key] for key in p.override_settings if key in data}  # unsaved ones are not put back
        data |= p.override_settings
        try:
            return self._process(p)
        finally:
            data |= before

    def _process(self, p):
        latents, infotexts, p.built_in = [], [], []
        if self.flavour == "a1111":
            p.get_token_merging_ratio()
        self.hook("process", p)
        for n in range(p.n_iter):
            p.seeds = p.all_seeds[n * p.batch_size : (n + 1) * p.batch_size]
            self.hook("process_batch", p, batch_number=n)
            p.params_txt = self.infotext(p)
            latents.append(p.sample())
            p.at("decode")
            self.hook("post_sample", p)
            self.hook("postprocess_batch", p, images=latents[-1], batch_number=n)
            infotexts += [self.infotext(p)] * p.batch_size
            p.at_step("postprocess_image")
        done = types.SimpleNamespace(latents=torch.cat(latents), infotexts=infotexts, comments="", built_in=p.built_in,
                                     extra_generation_params=p.extra_generation_params)  # fmt: skip
        self.hook("postprocess", p, done)
        return done

    def sample(self, p):
        generator = torch.Generator().manual_seed(p.seeds[0])
        x = p.first = self.run_pass(p, torch.randn(p.batch_size, 4, p.size, p.size, generator=generator))
        if p.enable_hr:
            p.is_hr_pass = True
            p.at("upscale")
            x = self.run_pass(p, torch.nn.functional.interpolate(x, scale_factor=1.5) + 0.1)
            p.is_hr_pass = False
        return x

    def run_pass(self, p, x):
        p.built_in.append(p.get_token_merging_ratio(for_hr=p.is_hr_pass))
        by_timestep = issubclass(p.denoiser, CFGDenoiserTimesteps)
        # the Forges bring their list to the device, A1111 leaves it on the CPU
        place = self.place if self.is_forge else lambda x: x
        p.sampler = Sampler(p.sampler_function or (ddim if by_timestep else sample_euler), p.denoiser(p, self), place)
        if p.is_hr_pass:
            self.hook("before_hr", p)
        for _ in range(2 if p.is_hr_pass and self.flavour == "forge" else 1):
            self.hook(SAMPLING_HOOK, p, x=None, noise=None, c=None, uc=None)
        p.at("conditioning")
        return (p.sampler.sample_img2img if p.is_hr_pass else p.sampler.sample)(p, x)

    def infotext(self, p):
        pairs = dict(p.extra_generation_params)
        for key, value in pairs.items():  # no comprehension: our code looks into this frame
            pairs[key] = value() if callable(value) else value
        pairs["Token merging ratio"] = p.get_token_merging_ratio() or None
        return ", ".join(f"{key}: {value}" for key, value in pairs.items() if value is not None)


TEXTS = {"prompt_embeds": PROMPT, "negative_prompt_embeds": torch.zeros_like(PROMPT), "num_inference_steps": 3}


def pipeline(unet, is_hires=False):
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
    kind, settings = (EulerDiscreteScheduler, {}) if is_hires else (DDIMScheduler, {"clip_sample": False})
    parts |= {"unet": unet, "scheduler": kind(steps_offset=1, **settings)}
    pipe = StableDiffusionPipeline(**parts, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


class SdNextProcessing(Processing):
    """SD.Next's job, which keeps its first pipeline, and learns its hires size late."""

    size = 16
    hr_upscale_to_x = hr_upscale_to_y = 0
    sd_model = get_token_merging_ratio = None  # SD.Next has no such method

    def __init__(self, webui, args, **more):
        super().__init__(webui, args, sd_model=webui.shared.sd_model, **more)

    def init_hr(self, scale=None, upscaler=None, force=False):
        self.hr_upscale_to_x = self.hr_upscale_to_y = 192


class SdNext(Webui):
    """SD.Next of July 2026: no hook before the hires pass, a new pipeline for each pass around one UNet, caught errors,
    and `after_process` always. given: a transformer's call. failing_pass: is_hr_pass in the pass that raises."""

    processing, given, failing_pass = SdNextProcessing, None, None

    def __init__(self, monkeypatch, flavour="sdnext"):
        super().__init__(monkeypatch, flavour)
        self.shared.sd_model = pipeline(unets.unet().eval())

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


def merges(model):
    return any("_tome_core_patch" in vars(module) or "forward" in vars(module) or module._forward_hooks
               for module in model.modules())  # fmt: skip
