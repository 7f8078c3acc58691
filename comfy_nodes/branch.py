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
from .layouts import patch_of
from .percent import flow_time, relative_sigma
from .sampling import HostSampling, steps_text

SequenceMerging = tome_core.sequence.SequenceMerging
# arguments of outer_sample(noise, latent_image, sampler, sigmas, denoise_mask, callback, ...), by place and name
_NOISE, _SAMPLER, _SIGMAS, _CALLBACK = (0, "noise"), (2, "sampler"), (3, "sigmas"), (5, "callback")
# of apply_model(x, t, c_concat, c_crossattn, control, transformer_options, ...); t: a sigma for each sample
_X, _T, _OPTIONS = (0, "x"), (1, "t"), (5, "transformer_options")
_TITLE = "ToMe"


class Previews(NamedTuple):
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
        asked: Callable[[], Previews] = Previews,
    ) -> None:  # fmt: skip
        self.config = config
        self.node_id = node_id
        self._beside = tuple(beside)
        self._home = weakref.ref(home)
        self._ask = asked
        self._asked = Previews()
        self._has_range = config.uses_percent
        self._sampling: HostSampling | None = None  # the innermost that goes on
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
            return self._merge(executor, *args, **kwargs)
        try:
            return self._merge(executor, *args, **kwargs)
        finally:
            self._take_off(id(executor.class_obj))  # copies of the model may be called in other threads

    def outer_sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Around a whole sampling: counts begin before it, and the report follows."""
        self._begin()
        sigmas = _argument(*_SIGMAS, args, kwargs)
        sampling = HostSampling(_argument(*_SAMPLER, args, kwargs), sigmas, _argument(*_NOISE, args, kwargs))
        args, kwargs = _replace(*_CALLBACK, sampling.hear(_argument(*_CALLBACK, args, kwargs)), args, kwargs)
        outer, self._sampling = self._sampling, sampling
        stopped = False
        try:
            return executor(*args, **kwargs)
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
                    found = [measuring.measure(handle, told) for handle, told in self._called.items()]
                    self._measured = [sentence for sentence in found if sentence]
            planned = len(sigmas) - 1 if hasattr(sigmas, "__len__") and len(sigmas) else None
            self._steps = steps_text(sampling.steps_done, planned, stopped, sampling.steps_computed)
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
        return tome_core.Report.join(handle.report() for handle in self._called)

    def lines(self) -> list[str]:
        """The report for people, ten lines at most."""
        if not self._called:
            return [f"{_TITLE}: {line}" for line in self._strangers.values()] or [f"{_TITLE}: the model was not called"]
        live, known = sum(self._times.values()), len(self._times)
        times = [f"between start and end at {live} of {known} noise levels"] if known else []
        beside = [*self._measured, *times, *self._strangers.values(), *self._beside]
        return self.report().lines(_TITLE, [self._steps], beside)

    def _line(self) -> str:
        """The report for the log."""
        if not self._called:
            return self.lines()[0]
        return f"{_TITLE}: {', '.join(filter(None, [self._steps, self.report().headline]))}"

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

    def _merge(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        model, options = executor.class_obj, _argument(*_OPTIONS, args, kwargs) or {}
        x, t = _argument(*_X, args, kwargs), _argument(*_T, args, kwargs)
        handle = self._patch_of(model, options)
        if handle is None:
            return executor(*args, **kwargs)
        if handle.run.wants_time:
            self._tell_time(handle, model.model_sampling, x, t, options)
        if isinstance(handle, SequenceMerging):
            changed = transformers.options_with(handle, model.diffusion_model, x, t, options, self._slot)
            args, kwargs = _replace(*_OPTIONS, changed, args, kwargs)
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
                if isinstance(handle, SequenceMerging):
                    if transformers.is_compiled(model.diffusion_model, options):
                        raise tome_core.UnsupportedModelError("the model is compiled")
                elif self._attached.get(id(model)) is not handle:
                    self._attached[id(model)] = handle  # first: an interrupt may fall in between
                    handle.attention_function = attentions.function_in_force(unet, options)
                    handle.attach()
                if handle not in self._called:
                    self._called[handle] = attentions.tell(options)
                return handle
        except (tome_core.UnsupportedModelError, TypeError) as error:
            self._strangers[id(model)] = f"stepped aside: {error}"
            return None

    def _make(self, unet: Any) -> Any:
        try:
            handle = tome_core.patch(unet, self.config, host_clock=True)
            handle.uninstall()
        except tome_core.UnsupportedModelError:
            patch = patch_of(unet)
            if patch is None:
                raise
            handle = SequenceMerging(self.config, downsample=patch[2])
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

    def _tell_time(self, handle: Any, model_sampling: Any, x: Any, t: Any, options: dict) -> None:
        sampling = self._sampling or HostSampling()
        sigma = sampling.sigma(t, options)
        if not 0 <= sigma < math.inf:  # nobody's picture should depend on how we take it
            handle.set_time()
            return
        percent = sampling.percent(sigma, model_sampling) if self._has_range else None
        flows = isinstance(handle, SequenceMerging)
        time = flow_time(sigma, model_sampling) if flows else None
        relative = relative_sigma(sigma, model_sampling) if time is None else None
        handle.set_time(percent=percent, timestep=time, sigma=relative, sampling=self._sampling,
                        pictures=sampling.pictures_in(x, options),
                        timesteps=sampling.timesteps(model_sampling, options, flows))  # fmt: skip
        if self._has_range:
            self._times[sigma] = bool(handle.run.now.live)


def layout_of(model: Any) -> str:
    """Whose strengths a model has, see `tome_core.strength`. Raises TypeError or ValueError where it cannot merge."""
    unet = tome_core.model.families.find_unet(model)
    try:
        return tome_core.model.families.layout_of(unet)
    except tome_core.UnsupportedModelError:
        if patch_of(unet) is None:
            raise
        return "transformer"


def _argument(place: int, name: str, args: tuple, kwargs: dict) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _replace(place: int, name: str, value: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments with this one instead, where it was: by place, else by name."""
    if len(args) > place:
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}
