"""The interface for hosts: `comfy_nodes` and `extension` import nothing else of the engine.

A host patches a model (`patch`, `Patch`); or it makes a `State`, begins each call of the model with `State.begin`, and
passes each attention to `attend_call` from its own attention hooks.
"""
# ruff: noqa: F401 (imported for hosts)

from __future__ import annotations

from torch import nn

from .attention.descriptions import ForwardOnStandIn, StandIn, full_name, name_of_patch, register
from .compiling import is_tracing, when_traced
from .engine.fewer_tokens import Place
from .engine.state import State
from .engine.steps import Steps
from .faults import add_own_folder, is_ours, may_be_of_fewer_tokens, quietly
from .measuring import pictures
from .measuring.expected import expected_share
from .measuring.pays import pays_of, why_not_at
from .merging.grid import Grid, Layout
from .models import adapter_of
from .models.answer import attend_call
from .models.attention_calls import HeadsCall
from .models.compiled import OPERATORS, number_of, why_not_in_graph
from .models.every_token import ModulesBelow, register_package
from .models.fewer_tokens import run_block
from .models.intercept import register_name
from .models.transformer import REFERENCES
from .models.transformer_blocks import middle, names_of, run_pooled
from .models.unet_blocks import UnsupportedModelError, find_unet, is_kind
from .models.weights import of_lists
from .models.wrap import Wrap, register_wrapper
from .models.wrap_set import forget_all
from .patching import Patch, curve_of, patch
from .reporting import gains
from .reporting.ledger import NO_GRID, OF_OTHERS, PARTS_COMPILED, REFINED, REPLACED, LevelTally, Reason
from .reporting.report import Report, count
from .settings import form
from .settings.config import SEED_LIMIT, MergeConfig
from .settings.presets import DEFAULT, MARKS, SD, SDXL, TRANSFORMER, strength
from .settings.schedule import STABLE_DIFFUSION


def state_of(config: MergeConfig, downsample: int, model: nn.Module | None = None) -> State:
    """Make the `State` of a host's own transformer, whose tokens are all of one size.

    `downsample` is latent cells per token, along a side. Without a `model`, the report knows the work of attention
    alone.
    """
    weights, blocks = (0, 0) if model is None else of_lists(model)
    return State(config, [LevelTally(downsample, blocks, per_token=weights // max(1, blocks))])
