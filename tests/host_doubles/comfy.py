"""Doubles of what the nodes use of ComfyUI, by its contract; tests/hosts/comfyui tests the real thing alike."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from comfy_nodes import host
from comfy_nodes.inputs import TIMES
from comfy_nodes.nodes import ApplyToMe, ToMeSettings
from tests.host_doubles.comfy_models import Body, unet, unet_of_one_level
from tests.small_models.unets import fixed, inputs
from tests.watching.on_device import plain
from tome_core.settings.schedule import STABLE_DIFFUSION


class Executor:
    """A chain of wrappers: a call runs the first one, which calls the others, and ``original`` is the last."""

    def __init__(self, original: Any, class_obj: Any, wrappers: list) -> None:
        self.original, self.class_obj, self.wrappers = original, class_obj, wrappers

    @classmethod
    def of(cls, kind: str, options: dict, original: Any, class_obj: Any) -> Executor:
        return cls(original, class_obj, [wrap for many in options["wrappers"].get(kind, {}).values() for wrap in many])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.wrappers:
            return self.original(*args, **kwargs)
        first, *others = self.wrappers
        return first(Executor(self.original, self.class_obj, others), *args, **kwargs)


class DiscreteSampling:
    """Stable Diffusion's sigmas, with ComfyUI's sentinels beyond both ends of the scale."""

    sigma = staticmethod(STABLE_DIFFUSION.sigma_of)

    def percent_to_sigma(self, percent: float) -> float:
        """The sigma at this share: 999999999.9 up to 0, and 0 from 1 on."""
        if percent <= 0:
            return 999999999.9
        return 0.0 if percent >= 1 else self.sigma((1 - percent) * 999)

    def timestep(self, sigma: torch.Tensor) -> torch.Tensor:
        return torch.tensor([round(STABLE_DIFFUSION.timestep_of_sigma(level)) for level in plain(sigma).tolist()])


class BaseModel(nn.Module):
    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.diffusion_model = unet
        self.model_sampling = DiscreteSampling()
        self.latent_format = SimpleNamespace(latent_rgb_factors=[[0.3, 0.2, 0.1]] * 4)

    def apply_model(self, x: Any, t: Any, c_crossattn: Any, transformer_options: dict) -> torch.Tensor:
        executor = Executor.of("apply_model", transformer_options, self._apply_model, self)
        return executor(x, t, None, c_crossattn, None, transformer_options)

    def _apply_model(self, x: Any, t: Any, concat: Any, context: Any, control: Any, options: dict,
                     **more: Any) -> torch.Tensor:  # fmt: skip
        # blocks write into the options, whose values the calls of one sampling share
        timesteps = self.model_sampling.timestep(t).float()
        return self.diffusion_model(x, timesteps, context=context, transformer_options=dict(options), **more)

    def get_dtype(self) -> torch.dtype:
        return torch.float32


class ModelPatcher:
    """A branch: clones share the model, and copy the lists of wrappers but not their elements."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.model_options: dict = {"transformer_options": {}}
        self.wrappers: dict[str, dict[str, list]] = {}

    def clone(self) -> ModelPatcher:
        other = ModelPatcher(self.model)
        other.model_options = _copied(self.model_options)
        other.wrappers = _copied(self.wrappers)
        return other

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Any) -> None:
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, kind: str, key: str) -> None:
        """Remove all wrappers with this key; the kind stays, empty."""
        self.wrappers.get(kind, {}).pop(key, None)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def sampler_of(name: str = "sample_euler", module: str = "comfy.k_diffusion.sampling") -> SimpleNamespace:
    """A KSAMPLER that says which function it runs; `Guider` does the steps."""
    return SimpleNamespace(sampler_function=SimpleNamespace(__name__=name, __qualname__=name, __module__=module))


class Guider:
    """The sampling of a branch by plain Euler steps, both prompts in one call."""

    place = staticmethod(lambda levels: levels)  # puts noise levels on a device

    def __init__(self, patcher: ModelPatcher, model: BaseModel | None = None) -> None:
        self.patcher = patcher
        self.model = model or patcher.model

    def sample(self, steps: int = 2, batch: int = 1, size: tuple[int, int] = (8, 8), stop: Any = None, seed: int = 0,
               sampler: Any = None, callback: Any = None) -> torch.Tensor:  # fmt: skip
        """The latent after all steps. stop: called with each step's number, and may raise."""
        noise, text = inputs(4, 2 * batch, *size, seed)
        sigmas = self.place(torch.tensor(self.sigmas(steps)))
        self.options = {**self.patcher.model_options["transformer_options"], "sample_sigmas": sigmas,
                        "wrappers": _copied(self.patcher.wrappers), "uuids": ["negative", "positive"]}  # fmt: skip
        self.text, self.stop = text, stop
        executor, noise = Executor.of("outer_sample", self.options, self._outer_sample, self), noise[:batch]
        with torch.no_grad():
            return executor(noise, torch.zeros_like(noise), sampler, sigmas, None, callback, True, seed)

    def sigmas(self, steps: int) -> list[float]:
        return [self.model.model_sampling.sigma(999 * (1 - step / steps)) for step in range(steps)] + [0.0]

    def _outer_sample(self, noise: Any, latent: Any, sampler: Any, sigmas: torch.Tensor, *args: Any) -> torch.Tensor:
        x, callback = noise, args[1]
        for step, (now, then) in enumerate(itertools.pairwise(plain(sigmas))):
            out = self._call(torch.cat([x, x]), now)
            if self.stop is not None:
                self.stop(step)
            if callback is not None:
                callback(step, out, x, len(sigmas) - 1)
            negative, positive = out.chunk(2)
            guided = negative + 7 * (positive - negative)
            x = x + 0.01 * guided * (then - now) / now.clamp(min=1)
        return x

    def _call(self, pair: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        now = self.place(now)
        options = {**self.options, "sigmas": now[None], "cond_or_uncond": [1, 0]}
        return self.model.apply_model(pair, now.expand(len(pair)), self.text, options)


def sample(patcher: ModelPatcher, **options: Any) -> torch.Tensor:
    """A branch's latent after two steps, unless the options say otherwise."""
    return Guider(patcher).sample(**options)


class Server:
    """ComfyUI's module `server` and its PromptServer in one. `texts`: (node, text) of all that was shown."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, str]] = []
        self.PromptServer = SimpleNamespace(instance=self)

    def send_progress_text(self, text: str, node_id: str) -> None:
        self.texts.append((node_id, text))


def apply(patcher: ModelPatcher, node: str = "5", **values: Any) -> Any:
    """An ApplyToMe after a model, with a ToMeSettings of these values; `start` and `end` are ApplyToMe's."""
    times = {name: values.pop(name) for name in TIMES if name in values}
    (settings,) = ToMeSettings().settings(**values)
    return ApplyToMe().apply(patcher, settings=settings, unique_id=node, **times)[0]


def latest(patcher: ModelPatcher) -> Any:
    return host.find_attached(patcher).latest


def checkpoint() -> ModelPatcher:
    """A loader's output: a small UNet with ComfyUI's blocks, of two levels."""
    return ModelPatcher(BaseModel(unet()))


def least_checkpoint() -> ModelPatcher:
    return ModelPatcher(BaseModel(unet_of_one_level()))


class CONST:
    """A flow model's levels, from 1 to 0; ComfyUI's have a base of this name."""

    def sigma(self, timestep: float) -> float:
        return timestep / 999

    def timestep(self, sigma: torch.Tensor) -> torch.Tensor:
        return sigma

    def percent_to_sigma(self, percent: float) -> float:
        return 1.0 - percent


def transformer(name: str = "Flux", **attributes: Any) -> ModelPatcher:
    """A loader's output: a flow model; its name says where a picture's tokens lie."""
    base = BaseModel(fixed(type(name, (Body,), attributes)()))
    base.model_sampling = CONST()
    return ModelPatcher(base)
