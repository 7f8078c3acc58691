"""Which way an attention takes the sizes of merged keys, found out by running it on a few tokens.

Attention over keys of which the j-th is repeated ``n_j`` times is attention over the keys alone with ``log n_j``
added to their logits. So the module itself says what is right, whatever it does inside, and no way is trusted
that was not seen to give that: some attentions take a mask and ignore it, and which scale one uses on wider
heads is nowhere written down.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from .families import Family
from .fold import Folding, ProjectionWraps, extra_channels, size_logs
from .plan import MergePlan, take_rows

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)  # torch 2.4 has the latter alone
FOLDED, MASK, WITHOUT = "folded", "mask", "without"
# of both samples; far apart, so that a wrong scale shows in half precision too
_SIZES = (1, 2, 0, 5, 40, 1, 200, 3), (3, 200, 1, 40, 5, 0, 2, 1)
# error allowed, of what leaving the sizes out does: a mask that is ignored has 1
_ALLOWED = {torch.float32: 0.01, torch.float64: 0.01}
_ALLOWED_IN_HALF = 0.15
_TELLS_NOTHING = 1e-6


class Route(NamedTuple):
    """The way one attention takes the sizes. why: of the last way, where the others do not fit.

    Of the folded one, own, wide: its scales on its own and on wider heads; heads; extra: channels for each.
    padded: it takes the width of its heads from its input, which so has to be as wide as they get. masked: a mask
    was seen to fit as well.
    """

    kind: str
    why: str = ""
    own: float = 1.0
    wide: float = 1.0
    heads: int = 1
    extra: int = 0
    padded: bool = False
    masked: bool = False


class Trial(NamedTuple):
    """What is tried. call: the attention as it is beneath our wrap; alone: keys are given apart from queries."""

    attention: nn.Module
    call: Callable[..., Any]
    family: Family
    wraps: ProjectionWraps
    alone: bool


def folding_of(route: Route, plan: MergePlan) -> Folding:
    """What the projections are told in a call on this route."""
    cut = route.heads * route.extra if route.padded else 0
    return Folding(plan, route.heads, route.extra, route.own, route.wide, cut)


def padded(x: torch.Tensor, route: Route) -> torch.Tensor:
    """The attention's input for this route."""
    return torch.nn.functional.pad(x, (0, route.heads * route.extra)) if route.padded else x


def key_mask(plan: MergePlan, x: torch.Tensor) -> torch.Tensor:
    """What is added to the logits, as a mask ``[B, 1, G]`` in the dtype of ``x``; made once for a plan."""
    key = (MASK, x.dtype)
    if key not in plan.derived:
        plan.derived[key] = size_logs(plan).to(x.dtype)[:, None]
    return plan.derived[key].expand(x.shape[0], -1, -1)


def find_route(trial: Trial, device: torch.device, dtype: torch.dtype) -> Route | None:
    """The first way that gives what repeated keys give; None where the attention cannot be run, or tells nothing."""
    channels = getattr(getattr(trial.attention, "to_q", None), "in_features", None)
    if channels is None:
        return Route(WITHOUT, "its projections are of an unknown kind")
    with torch.no_grad(), torch.autocast(device.type, enabled=False), _not_training(trial.attention):
        try:
            return _compare(trial, _Tokens(channels, device, dtype))
        except OUT_OF_MEMORY:  # which says nothing about the attention
            raise
        except Exception as error:  # whatever a host's attention may raise for input that is not its own
            logger.debug("attention cannot be tried out: %r", error)
            return None


class _Tokens:
    """Random tokens ``[2, 8, C]`` in groups of known sizes, other ones in each sample: some masks know heads alone.

    kept: the groups that have tokens, ``[2, K]``; first: the first of each one's rows among the repeated, ``[2, K]``.
    """

    def __init__(self, channels: int, device: torch.device, dtype: torch.dtype) -> None:
        x = torch.randn(2, len(_SIZES[0]), channels, generator=torch.Generator().manual_seed(0))
        self.x = x.to(device, dtype)
        groups = [[number for number, size in enumerate(sizes) for _ in range(size)] for sizes in _SIZES]
        kept = [[number for number, size in enumerate(sizes) if size] for sizes in _SIZES]
        first = [[group.index(number) for number in numbers] for group, numbers in zip(groups, kept, strict=True)]
        group, self.kept, self.first = (torch.tensor(rows, device=device) for rows in (groups, kept, first))
        self.plan = MergePlan(group, len(_SIZES[0]))
        self.repeated = take_rows(self.x, group)


def _compare(trial: Trial, tokens: _Tokens) -> Route | None:
    name = trial.family.context
    if trial.alone:
        expected = take_rows(trial.call(tokens.x, **{name: tokens.repeated}), tokens.kept)
    else:
        expected = take_rows(trial.call(tokens.repeated), tokens.first)
    plain = _run(trial, tokens, tokens.x)
    effect = _distance(plain, expected)
    if not effect > _TELLS_NOTHING * expected.abs().max().item():
        return None
    allowed = _ALLOWED.get(tokens.x.dtype, _ALLOWED_IN_HALF) * effect
    tried = [(_error(trial, tokens, route, expected), route) for route in _ways(trial)]
    fitting = [(error, number) for number, (error, _) in enumerate(tried) if error <= allowed]
    # of the folded ways the closest, because two scales may be alike
    folded = [one for one in fitting if tried[one[1]][1].kind == FOLDED]
    if fitting:
        masked = any(tried[number][1].kind == MASK for _, number in fitting)
        return tried[min(folded or fitting)[1]][1]._replace(masked=masked)
    return Route(WITHOUT, "it takes neither wider heads nor a mask")


def _ways(trial: Trial) -> Iterator[Route]:
    attention = trial.attention
    heads, inner = getattr(attention, "heads", None), getattr(attention.to_q, "out_features", None)
    if isinstance(heads, int) and isinstance(inner, int) and inner % heads == 0:
        width = inner // heads
        extra = extra_channels(width)
        own = getattr(attention, "scale", None)
        scales = [(own, own)] if isinstance(own, float) else []
        scales.append((width**-0.5, (width + extra) ** -0.5))
        for wide in (False, True) if attention.to_q.in_features == inner else (False,):
            for own, other in scales:
                yield Route(FOLDED, "", own, other, heads, extra, wide)
    yield Route(MASK)


def _error(trial: Trial, tokens: _Tokens, route: Route, expected: torch.Tensor) -> float:
    try:
        return _distance(_run(trial, tokens, tokens.x, route), expected)
    except OUT_OF_MEMORY:
        raise
    except Exception as error:  # as above: what does not run does not fit
        logger.debug("attention does not take %s: %r", route, error)
        return float("inf")
    finally:
        trial.wraps.now.call = None


def _run(trial: Trial, tokens: _Tokens, x: torch.Tensor, route: Route | None = None) -> torch.Tensor:
    """The attention on the groups: rows of those that have tokens."""
    named: dict[str, Any] = {}
    if trial.alone or (route is not None and route.padded):
        named[trial.family.context] = x
    if route is None:
        x = take_rows(x, tokens.kept)
        named = dict.fromkeys(named, x)
        return trial.call(x, **named)
    if route.kind == MASK:
        named[trial.family.mask] = key_mask(tokens.plan, x)
    else:
        trial.wraps.now.call = folding_of(route, tokens.plan)
        x = padded(x, route)
    return take_rows(trial.call(x, **named), tokens.kept)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one.float() - other.float()).abs().max().item()


@contextmanager
def _not_training(module: nn.Module) -> Iterator[None]:
    """Without dropout, which would draw from the global generator."""
    training = [one for one in module.modules() if one.training]
    for one in training:
        one.training = False
    try:
        yield
    finally:
        for one in training:
            one.training = True
