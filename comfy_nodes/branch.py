"""What an ApplyToMe node puts on its branch of the graph: merging while this branch samples, and only then.

Branches of a graph share one UNet. So nothing is patched when the node runs: while this branch samples, wraps that
merge nothing are on the UNet, and each of this branch's own calls of the model turns them to its settings. A
transformer gets nothing at all: each call carries a function for its attentions to ask.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import attentions, host, measuring, transformers
from .engine import tome_core
from .percent import flow_time, relative_sigma
from .sampling import Sampling, steps_text

# places among the arguments of outer_sample(noise, latent_image, sampler, sigmas, denoise_mask, callback, ...)
_NOISE, _SAMPLER, _SIGMAS, _CALLBACK = 0, 2, 3, 5
_TITLE = "ToMe"
_OPTIONS = 5  # of transformer_options among those of apply_model(x, t, c_concat, c_crossattn, control, ...)


class Asked(NamedTuple):
    """What the previews of a branch ask for. maps: what merged, to be drawn; gain: what it gains, to be measured."""

    maps: bool = False
    gain: bool = False


class BranchMerging:
    """The two wrappers of one ApplyToMe: around each sampling, and around each call of the model.

    config: the settings. node_id: where the report is shown. home: the branch's own UNet. beside: what the report is
    to say of the node's inputs. asked: what for, when sampling starts.

    Patches are made once for each UNet and kept as long as it lives, which they do not lengthen. Their wraps come
    onto it with the first call of a sampling, and off when the outermost sampling ends. So are a transformer's handles,
    which have no wraps.
    """

    def __init__(
        self, config: Any, node_id: Any, home: Any, beside: Sequence[str] = (),
        asked: Callable[[], Asked] = Asked,
    ) -> None:  # fmt: skip
        self.config = config
        self.node_id = node_id
        self._beside = tuple(beside)
        self._home = weakref.ref(home)
        self._ask = asked
        self._asked = Asked()
        self._has_range = config.uses_percent
        self._sampling: Sampling | None = None  # the innermost that goes on
        self._patches: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by UNet
        self._attached: dict[int, Any] = {}  # id of a model -> its patch, whose wraps are on
        self._called: dict[Any, dict] = {}  # patches of this sampling -> what their calls are told of the attention
        self._measured: list[str] = []  # sentences
        self._strangers: dict[int, str] = {}
        self._times: dict[float, bool] = {}  # sigma -> was merging on
        self._steps = ""  # of the latest sampling
        self._slot = transformers.Slot()
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict) -> BranchMerging:
        # nodes that copy a model's options mean the settings, not a second UNet
        return self

    def apply_model(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Around BaseModel.apply_model: this call of the model's UNet merges."""
        if self._sampling is not None:
            return self._merged(executor, *args, **kwargs)
        try:
            return self._merged(executor, *args, **kwargs)
        finally:
            self._take_off(id(executor.class_obj))  # copies of the model may be called in other threads

    def outer_sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Around a whole sampling: counts begin before it, and the report follows."""
        self._begin()
        named = ((_SAMPLER, "sampler"), (_SIGMAS, "sigmas"), (_NOISE, "noise"))
        sampling = Sampling(*(_argument(place, name, args, kwargs) for place, name in named))
        callback = sampling.hear(_argument(_CALLBACK, "callback", args, kwargs))
        outer, self._sampling = self._sampling, sampling
        stopped = False
        try:
            if len(args) > _CALLBACK:
                return executor(*args[:_CALLBACK], callback, *args[_CALLBACK + 1 :], **kwargs)
            return executor(*args, **{**kwargs, "callback": callback})
        except BaseException:  # an interrupt is one
            stopped = True
            raise
        finally:
            self._sampling = outer
            for handle in {*self._attached.values(), *self._called}:
                handle.set_time()
            if outer is None:
                self._take_off(*self._attached)
                if self._asked.gain and not stopped:
                    self._measure()
            done, computed = sampling.steps_done, sampling.steps_computed
            self._steps = steps_text(done, _steps(*args, **kwargs), stopped, computed)
            host.say("\n".join(self.lines()), self.node_id, self._line())

    def maps(self) -> dict[int, tuple[int, Any]]:
        """Level -> (down-sampling, latest map) of this branch's own UNet; empty where no preview asked."""
        home = self._home()
        handle = None if home is None else self._patches.get(home)
        if handle is None:
            return {}
        levels = handle.report().levels
        return {level: (levels[level].downsample, one) for level, one in sorted(handle.maps().items())}

    def report(self) -> Any:
        """The engine's `Report` on the latest sampling, of all models that were called in it."""
        return tome_core.Report.joined(handle.report() for handle in self._called)

    def lines(self) -> list[str]:
        """The report for people, ten lines at most."""
        if not self._called:
            return [f"{_TITLE}: {line}" for line in self._strangers.values()] or [f"{_TITLE}: the model was not called"]
        beside = [*self._measured, *self._range_lines(), *self._strangers.values(), *self._beside]
        return self.report().lines(_TITLE, [self._steps], beside)

    def _line(self) -> str:
        """The report for the log."""
        if not self._called:
            return self.lines()[0]
        return f"{_TITLE}: {', '.join(filter(None, [self._steps, self.report().headline]))}"

    def _range_lines(self) -> list[str]:
        live = sum(self._times.values())
        return [f"between start and end at {live} of {len(self._times)} noise levels"] if self._times else []

    def _measure(self) -> None:
        found = (measuring.measure(handle, told) for handle, told in self._called.items())
        self._measured = [sentence for sentence in found if sentence]

    def _begin(self) -> None:
        self._called = {}
        self._times = {}
        self._strangers = {}
        self._slot = transformers.Slot()
        self._measured = []
        self._asked = self._ask()
        for handle in list(self._patches.values()):
            handle.reset_counts()
            handle.keep_maps(self._asked.maps)

    def _merged(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        model, options = executor.class_obj, _argument(_OPTIONS, "transformer_options", args, kwargs) or {}
        handle = self._patch_of(model, options)
        if handle is None:
            return executor(*args, **kwargs)
        if handle.run.wants_time:
            self._tell_time(handle, model.model_sampling, *args, **kwargs)
        if transformers.is_handle(handle):
            x, t = _argument(0, "x", args, kwargs), _argument(1, "t", args, kwargs)
            changed = transformers.options_with(handle, model.diffusion_model, x, t, options, self._slot)
            if len(args) > _OPTIONS:
                args = (*args[:_OPTIONS], changed, *args[_OPTIONS + 1 :])
            else:
                kwargs = {**kwargs, "transformer_options": changed}
            answer = executor(*args, **kwargs)
        else:
            with handle.merging():
                answer = executor(*args, **kwargs)
        if self._sampling is not None:
            self._sampling.note_call(options)
        return answer

    def _patch_of(self, model: Any, options: dict) -> Any | None:
        """The patch of the UNet in this model, not always `home`, with its wraps on; a transformer's handle; None where
        it is neither. options: transformer_options of the call."""
        try:
            unet = tome_core.model.families.find_unet(model.diffusion_model)
            with self._lock:  # several GPUs sample in threads
                handle = self._patches.get(unet) or self._make(unet)
                if transformers.is_handle(handle) and transformers.is_compiled(model.diffusion_model, options):
                    raise tome_core.UnsupportedModelError("the model is compiled")
                if hasattr(handle, "attach") and self._attached.get(id(model)) is not handle:
                    self._attached[id(model)] = handle  # first: an interrupt may fall in between
                    handle.attention_function = attentions.function_in_force(unet, options)
                    handle.attach()
                if handle not in self._called:
                    self._called[handle] = attentions.told(options)
                return handle
        except (tome_core.UnsupportedModelError, TypeError) as error:
            self._strangers[id(model)] = f"stepped aside: {error}"
            return None

    def _make(self, unet: Any) -> Any:
        try:
            handle = tome_core.patch(unet, self.config, host_clock=True)
            handle.uninstall()
        except tome_core.UnsupportedModelError:
            if transformers.unsupported(unet):
                raise
            handle = transformers.make(unet, self.config)
        handle.keep_maps(self._asked.maps)
        self._patches[unet] = handle
        return handle

    def _take_off(self, *models: int) -> None:
        """Let go of these models' UNets, and of what an interrupt left on them."""
        for model in models:
            handle = self._attached.get(model)
            if handle is None:
                continue
            try:
                handle.detach()
            except BaseException:  # an interrupt fell into it, so again; detaching twice does nothing
                handle.detach()
                raise
            finally:
                self._attached.pop(model, None)

    def _tell_time(self, handle: Any, model_sampling: Any, *args: Any, **kwargs: Any) -> None:
        """From apply_model(x, t, ..., transformer_options), whose ``t`` is a sigma for each sample."""
        sampling = self._sampling or Sampling()
        t = _argument(1, "t", args, kwargs)
        options = _argument(_OPTIONS, "transformer_options", args, kwargs) or {}
        sigma = sampling.sigma(t, options)
        if not 0 <= sigma < math.inf:  # nobody's picture should depend on how we take it
            handle.set_time()
            return
        percent = sampling.percent(sigma, model_sampling) if self._has_range else None
        flows = transformers.is_handle(handle)
        time = flow_time(sigma, model_sampling) if flows else None
        relative = relative_sigma(sigma, model_sampling) if time is None else None
        pictures = sampling.pictures_in(_argument(0, "x", args, kwargs), options)
        timesteps = sampling.timesteps(model_sampling, options, flows)
        handle.set_time(percent=percent, timestep=time, sigma=relative, sampling=self._sampling, pictures=pictures,
                        timesteps=timesteps)  # fmt: skip
        if self._has_range:
            self._times[sigma] = bool(handle.run.live)


def unsupported(model: Any) -> str | None:
    """Why this model cannot merge; None where it can."""
    try:
        unet = tome_core.model.families.find_unet(model)
        tome_core.model.families.find_blocks(unet)
    except TypeError as error:
        return str(error)
    except tome_core.UnsupportedModelError as error:
        return str(error) if transformers.unsupported(unet) else None
    return None


def layout_of(model: Any) -> str:
    """Whose strengths a model that is not `unsupported` has, see `tome_core.strength`."""
    try:
        return tome_core.model.families.layout_of(tome_core.model.families.find_unet(model))
    except (TypeError, tome_core.UnsupportedModelError):
        return "transformer"


def _argument(place: int, name: str, args: tuple, kwargs: dict) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _steps(*args: Any, **kwargs: Any) -> int | None:
    """Steps of a sampling, from outer_sample(noise, latent_image, sampler, sigmas, ...)."""
    sigmas = _argument(_SIGMAS, "sigmas", args, kwargs)
    return len(sigmas) - 1 if hasattr(sigmas, "__len__") and len(sigmas) else None
