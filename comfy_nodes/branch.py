"""What an ApplyToMe node puts on its branch of the graph: merging while this branch samples, and only then.

Branches of a graph share one UNet. So nothing is patched when the node runs: at each step this branch's own
call of the model puts the patch on, calls on and takes it off again, whatever happens in between.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from . import host
from .engine import tome_core
from .percent import percent_of


class BranchMerging:
    """The two wrappers of one ApplyToMe: around each sampling, and around each call of the model.

    config: the settings. node_id: where the report is shown. home: the branch's own UNet. wants_maps: asked when
    sampling starts, whether to keep what a preview shows.

    Patches are made once for each UNet and kept, so that a compiled model is not compiled again. A patch holds
    its UNet; so patches of other UNets (a second model sampled with this one's options, a copy on another GPU)
    are let go after sampling, and this object lives no longer than the ModelPatcher that holds both it and `home`.
    """

    def __init__(
        self, config: Any, node_id: Any, home: Any, wants_maps: Callable[[], bool] = lambda: False
    ) -> None:
        self.config = config
        self.node_id = node_id
        self._home = weakref.ref(home)
        self._wants_maps = wants_maps
        self._keeps_maps = False
        self._has_range = any(rule.uses_percent for rule in config.rules)
        self._sampling: object | None = None  # what tells the sampling that is going on from all others
        self._patches: dict[int, Any] = {}
        self._strangers: dict[int, str] = {}
        self._calls = 0
        self._times: dict[float, bool] = {}  # sigma -> was merging on
        self._inside: set[Any] = set()  # patches of calls in progress
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict) -> BranchMerging:
        # nodes that copy a model's options mean the settings, not a second UNet
        return self

    def apply_model(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Around BaseModel.apply_model: the model's UNet is patched for this call."""
        handle = self._patch_of(executor.class_obj)
        if handle is None or handle in self._inside:
            return executor(*args, **kwargs)
        self._calls += 1
        if handle.run.wants_time:
            self._tell_time(handle, executor.class_obj, *args, **kwargs)
        self._inside.add(handle)
        try:
            handle.install()
            return executor(*args, **kwargs)
        finally:
            self._inside.discard(handle)
            handle.uninstall()

    def outer_sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Around a whole sampling: counts begin before it, and the report follows."""
        self._begin()
        outer, self._sampling = self._sampling, object()
        try:
            return executor(*args, **kwargs)
        finally:
            self._sampling = outer
            self._take_off()
            host.show(self.report(_steps(*args, **kwargs)), self.node_id)
            self._let_go_of_strangers()

    def maps(self) -> dict[int, tuple[int, Any]]:
        """Level -> (down-sampling, latest map) of this branch's own UNet; empty where no preview asked."""
        handle = self._patches.get(id(self._home()))
        if handle is None:
            return {}
        levels = handle.report().levels
        return {level: (levels[level].downsample, one) for level, one in sorted(handle.maps().items())}

    def report(self, steps: int | None = None) -> str:
        """What this sampling merged, for people."""
        lines = [_text(handle.report()) for handle in self._patches.values()] if self._calls else []
        lines += self._strangers.values()
        if not lines:
            return "Token merging: the model was not called."
        return "\n".join([*lines, *self._steps_lines(steps)])

    def _steps_lines(self, steps: int | None) -> list[str]:
        lines = [] if steps is None else [f"  {steps} step{'' if steps == 1 else 's'}"]
        if self._times:
            live = sum(self._times.values())
            lines.append(f"  inside the time range at {live} of {len(self._times)} noise levels")
        return lines

    def _begin(self) -> None:
        self._calls = 0
        self._times = {}
        self._strangers = {}
        self._keeps_maps = self._wants_maps()
        for handle in self._patches.values():
            handle.reset_counts()
            handle.keep_maps(self._keeps_maps)

    def _take_off(self) -> None:
        """Forget the time, and what was kept over steps; and what an interrupt left on, when it fell into the very
        moment of taking a patch off."""
        for handle in self._patches.values():
            handle.set_time()
            if handle not in self._inside:
                handle.uninstall()

    def _let_go_of_strangers(self) -> None:
        home = id(self._home())
        self._patches = {key: handle for key, handle in self._patches.items() if key == home}

    def _patch_of(self, model: Any) -> Any | None:
        """The patch of the UNet in this model, not always `home`; None where it has no blocks of our kind."""
        try:
            unet = tome_core.families.find_unet(model.diffusion_model)
            with self._lock:  # several GPUs sample in threads
                return self._patches.get(id(unet)) or self._make(unet)
        except (tome_core.UnsupportedModelError, TypeError) as error:
            self._strangers[id(model)] = f"Token merging stepped aside: {error}"
            return None

    def _make(self, unet: Any) -> Any:
        handle = tome_core.patch(unet, self.config, host_clock=True)
        handle.uninstall()
        handle.keep_maps(self._keeps_maps)
        self._patches[id(unet)] = handle
        return handle

    def _tell_time(self, handle: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        """From apply_model(x, t, ...), whose ``t`` is a sigma for each sample."""
        sigmas = args[1] if len(args) > 1 else kwargs["t"]
        sigma = float(sigmas.reshape(-1)[0])  # one wait for the device a call, and only where the time matters
        handle.set_time(percent=percent_of(sigma, model.model_sampling), sampling=self._sampling)
        if self._has_range:
            self._times[sigma] = bool(handle.run.live)


def unsupported(model: Any) -> str | None:
    """Why this model cannot merge; None where it can."""
    try:
        tome_core.families.find_blocks(tome_core.families.find_unet(model))
    except (tome_core.UnsupportedModelError, TypeError) as error:
        return str(error)
    return None


def _text(report: Any) -> str:
    if report.calls or not any(level.covered for level in report.levels):
        return str(report)
    levels = ", ".join(f"{level.level} (latent /{level.downsample})" for level in report.levels if level.covered)
    return (
        f"Token merging: {'; '.join(report.settings)}\n"
        f"  level {levels}: inside a compiled model, where calls are not counted"
    )


def _steps(*args: Any, **kwargs: Any) -> int | None:
    """Steps of a sampling, from outer_sample(noise, latent_image, sampler, sigmas, ...)."""
    sigmas = kwargs.get("sigmas", args[3] if len(args) > 3 else None)
    return len(sigmas) - 1 if hasattr(sigmas, "__len__") and len(sigmas) else None
