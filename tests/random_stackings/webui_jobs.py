"""Random jobs of a webui: settings by place or name, passes, samplers, refiners, models, reloads and interruptions."""

from __future__ import annotations

import functools
import random
from collections import Counter
from typing import Any

import pytest
import torch

from tests.models import fixed, ldm_of_one_level
from tests.random_settings import field_value
from tests.random_stackings.laws import hold_in_host, hold_to_be_as_before
from tests.random_stackings.sessions import WRONG, Fault, Thrown
from tests.traces import traces
from tests.webui_doubles import FLAVOURS, CFGDenoiserTimesteps, Denoiser, Webui, be_short
from tome_core import form


@functools.cache
def _model(number: int) -> Any:
    return fixed(ldm_of_one_level(), number)


def hold(dice: random.Random, repeats: bool) -> Counter:
    """A session of a webui: a start, some jobs, an end; raises Fault."""
    return hold_in_host(dice, repeats, _jobs)


def _jobs(
    dice: random.Random, patches: pytest.MonkeyPatch, told: list[str]
) -> tuple[Counter, list[torch.Tensor]]:  # fmt: skip
    be_short(patches)
    webui = Webui(patches, dice.choice(FLAVOURS)).start()
    told.append(webui.flavour)
    options, seen, pictures = webui.part("options"), Counter(), []
    webui.shared.opts.data[options.REPORT] = dice.choice((options.PAGE, ""))
    models = [_model(number).model for number in (0, 1)]
    before = [traces(one) for one in models]
    webui.load(_model(0))
    for _ in range(dice.randint(1, 3)):
        event = dice.choice(("", "", "", "reload", "load"))
        if event == "reload":
            webui.reload()
        elif event == "load":
            webui.load(_model(dice.randrange(2)))
        args, facts = _args(dice, webui), _facts(dice)
        told.append(f"{event} job {args} {facts}")
        if dice.random() < 0.08:
            try:
                webui.job(*args, at_step=_throw, **facts)
            except Thrown:
                seen["thrown through"] += 1
            continue
        plain = _plain(webui, facts)
        done = webui.job(*args, **facts)
        if webui.errors:
            raise Fault(f"a hook raised {webui.errors}")
        if done.latents.shape != plain.shape or not done.latents.isfinite().all():
            raise Fault(f"latents of {tuple(done.latents.shape)}")
        pictures.append(done.latents)
        seen["job as without merging" if torch.equal(done.latents, plain) else "merged job"] += 1
    told.append("an ordinary job, and the end")
    if not torch.equal(webui.job(False).latents, _plain(webui, {})):
        raise Fault("a job without merging draws another picture than a webui without the extension")
    webui.call("script_unloaded")
    hold_to_be_as_before(models, before)
    return seen, pictures


def _args(dice: random.Random, webui: Webui) -> list[Any]:
    """By name mostly; now and then by place, or with a value that is none."""
    wish = webui.part("wish")
    if dice.random() < 0.15:
        return [dice.random() < 0.8, dice.choice((dice.random(), dice.choice(WRONG)))][: dice.randint(0, 2)]
    given: dict[str, Any] = {"enabled": dice.random() < 0.9, "strength": dice.random(),
                             "where": dice.choice(wish.WHERE)}  # fmt: skip
    for one in form.FIELDS:
        if dice.random() < 0.25:
            given[one.name] = field_value(dice, one)
    if dice.random() < 0.8:
        given["only_if_it_pays"] = False
    if dice.random() < 0.15:
        given[dice.choice(tuple(given))] = dice.choice(WRONG)
    return [given]


def _facts(dice: random.Random) -> dict[str, Any]:
    facts: dict[str, Any] = {"enable_hr": dice.random() < 0.5, "n_iter": dice.randint(1, 2),
                             "batch_size": dice.randint(1, 2), "seed": dice.randrange(100),
                             "denoiser": dice.choice((Denoiser, CFGDenoiserTimesteps))}  # fmt: skip
    if dice.random() < 0.15:
        facts |= {"refiner": _model(1), "refiner_at": 1}
    return facts


def _plain(webui: Webui, facts: dict[str, Any]) -> torch.Tensor:
    """The latents of a webui that has no such extension, by the model that is loaded; a refiner leaves its own."""
    with_us, webui.script, model = webui.script, object(), webui.shared.sd_model
    try:
        return webui.job(**facts).latents
    finally:
        webui.script, webui.shared.sd_model = with_us, model


def _throw(step: Any) -> None:
    raise Thrown
