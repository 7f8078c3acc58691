"""Whole blocks of transformers on merged tokens: what a block gets, what it returns, and when it keeps all tokens."""

from typing import Any

import pytest
import torch
from torch import nn

import tome_core
from tests.small_models import dits
from tests.small_models.dits import PRESENT
from tome_core import MergeConfig, MergePlan
from tome_core.engine.fewer_tokens import Place
from tome_core.engine.state import State
from tome_core.merging.grid import Grid, Layout
from tome_core.models import transformer, transformer_blocks
from tome_core.models.every_token import ModulesBelow
from tome_core.models.transformer_blocks import middle, run_pooled
from tome_core.reporting.ledger import LevelTally

CONFIG = MergeConfig(ratio=0.5, sx=2, sy=1, merge_attn=False, merge_blocks=True)
GRID, WORDS, WIDTH = Grid(32, 32), 7, 6
PICTURE = GRID.height * GRID.width
X, TEXT = torch.randn(2, PICTURE, WIDTH), torch.randn(2, WORDS, WIDTH)
PLACE = Place("blocks.1", 0, "block", "blocks", pools=True)


def means(x: torch.Tensor, axis: int, first: int = 0) -> torch.Tensor:
    """The mean of each two neighbours of the picture along an axis, in which `first` is before it."""
    before, picture, after = x.split([first, PICTURE, x.shape[axis] - first - PICTURE], axis)
    even = torch.arange(0, PICTURE, 2)
    merged = (picture.index_select(axis, even) + picture.index_select(axis, even + 1)) / 2
    return torch.cat([before, merged, after], axis)


def begin() -> Any:
    return State(CONFIG, [LevelTally(2, 3)]).begin(500, torch.zeros(2, 4, 64, 64))


def run(given: dict[str, Any], answer: Any = None, text_first: bool = True, why: str = "") -> tuple[Any, dict, dict]:
    """Run a block; return its output, its arguments and the reasons of the report."""
    with torch.no_grad():
        call, got = begin(), {}

        def layout_of(tokens: int) -> Layout:
            return Layout(GRID, tokens - PICTURE if text_first else 0)

        def original(**now: Any) -> Any:
            got.update(now)
            name = next(name for name in ("hidden_states", "img", "x") if name in now)
            return (answer or (lambda now, out: out))(now, now[name] + 1)

        below = ModulesBelow(nn.Identity())
        out = run_pooled(call, PLACE, layout_of, below, original, [], (), given, lambda: why)
    return out, got, call.state.report().reasons


BOTH = WORDS + PICTURE
FORMS = {  # names, positions, their axis of tokens, and whether they are the text's too
    "Flux": ("image_rotary_emb", (torch.randn(BOTH, 8), torch.randn(BOTH, 8)), 0, True),
    "SkyReels": ("rotary_emb", (torch.randn(1, PICTURE, 1, 8), torch.randn(1, PICTURE, 1, 8)), 1, False),
    "LTX": ("image_rotary_emb", (torch.randn(2, PICTURE, 8), torch.randn(2, PICTURE, 8)), 1, False),
    "Mochi": ("image_rotary_emb", (torch.randn(PICTURE, 2, 4), torch.randn(PICTURE, 2, 4)), 0, False),
    "complex": ("freqs_cis", torch.randn(2, PICTURE, 4, dtype=torch.complex64), 1, False),
    "ComfyUI": ("pe", torch.randn(1, 1, BOTH, 4, 2, 2), 2, True),
    "double": ("pe", torch.randn(1, 1, BOTH, 4, 2, 2, dtype=torch.float64), 2, True),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text_first", [True, False])
def test_a_block_gets_means_of_cells_and_of_their_positions_and_all_else_as_it_is(form, text_first):
    name, positions, axis, of_text = FORMS[form]
    temb, options = torch.randn(2, PICTURE), {}  # as many channels as tokens
    given = {"hidden_states": X, "encoder_hidden_states": TEXT, name: positions, "temb": temb, "attn_kwargs": options}
    out, got, reasons = run(given, text_first=text_first)
    assert not reasons and got["encoder_hidden_states"] is TEXT and got["temb"] is temb
    torch.testing.assert_close(got["hidden_states"], means(X, 1))
    first = WORDS if of_text and text_first else 0
    several = ((one if isinstance(one, tuple) else (one,)) for one in (positions, got[name]))
    for part, merged in zip(*several, strict=True):
        torch.testing.assert_close(merged, means(part, axis, first))
        assert merged.dtype == part.dtype
    torch.testing.assert_close(out + 0, X + 1)


def test_positions_of_the_text_alone_stay_as_they_are():
    """Qwen-Image has the picture's and the text's apart."""
    of_text = torch.randn(WORDS, 4)
    _, got, _ = run({"hidden_states": X, "encoder_hidden_states": TEXT,
                     "image_rotary_emb": (torch.randn(PICTURE, 4), of_text)})  # fmt: skip
    assert got["image_rotary_emb"][1] is of_text and len(got["image_rotary_emb"][0]) == PICTURE // 2


@pytest.mark.parametrize("text_first", [True, False])
def test_in_one_sequence_with_the_text_only_the_pictures_tokens_merge(text_first):
    x = torch.cat([TEXT, X] if text_first else [X, TEXT], 1)
    out, got, _ = run({"x": x, "pe": torch.randn(1, 1, BOTH, 4, 2, 2)}, text_first=text_first)
    torch.testing.assert_close(got["x"], means(x, 1, WORDS if text_first else 0))
    torch.testing.assert_close(out + 0, x + 1)


def test_a_mask_of_tokens_leaves_out_a_group_if_it_hides_one_of_its_tokens():
    mask = torch.ones(2, PICTURE, dtype=torch.bool)
    mask[:, 10:13] = False
    _, got, _ = run({"x": X, "attn_mask": mask})
    hidden = (~got["attn_mask"]).nonzero()
    assert hidden.tolist() == [[0, 5], [0, 6], [1, 5], [1, 6]]


ANSWERS = {
    "its tokens": (lambda now, out: out, lambda out: out),
    "text, tokens": (lambda now, out: (now["encoder_hidden_states"], out), lambda out: out[1]),
    "a list": (lambda now, out: [out, None], lambda out: out[0]),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_a_block_returns_beside_its_tokens_is_handed_on(answer):
    make, take = ANSWERS[answer]
    out, _, reasons = run({"hidden_states": X, "encoder_hidden_states": TEXT}, make)
    assert not reasons and type(out) in (type(make({"encoder_hidden_states": TEXT}, X)), type(take(out)))
    torch.testing.assert_close(take(out) + 0, X + 1)


def test_what_returns_its_tokens_twice_or_not_at_all_runs_on_all_tokens():
    for make in (lambda now, out: (out, out * 2), lambda now, out: ("nothing",)):
        out, got, reasons = run({"hidden_states": X}, make)
        assert got["hidden_states"] is X and list(reasons) == ["block: what it returned cannot be unmerged"]
        assert len(out) in (1, 2)


MAY_NEED = "an argument may need every token; it merges without that"
WHOLE = {
    "positions without tokens": ({"pe": torch.randn(1, 5, 4)}, "the form of its positions is not known (pe)"),
    "an added mask": ({"attention_mask": torch.zeros(2, 1, 1, PICTURE)}, "an attention mask is on"),
    "a mask of pairs": ({"attn_mask": torch.ones(PICTURE, PICTURE, dtype=torch.bool)}, "an attention mask is on"),
    "tokens of a control": ({"control_hidden_states": X}, f"{MAY_NEED} (control_hidden_states)"),
    "a number for each token": ({"modulate_index": torch.zeros(2, PICTURE).long()}, f"{MAY_NEED} (modulate_index)"),
    "times of tokens": ({"temb": torch.randn(2, PICTURE, 3)}, f"{MAY_NEED} (temb)"),
    "a size": ({"height": 32}, f"{MAY_NEED} (height)"),
    "an adapter": ({"joint_attention_kwargs": {"ip_hidden_states": TEXT}}, f"{MAY_NEED} (joint_attention_kwargs)"),
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
def test_a_block_with_an_argument_that_may_need_every_token_gets_all_and_it_is_named(case):
    more, why = WHOLE[case]
    out, got, reasons = run({"hidden_states": X, "encoder_hidden_states": TEXT, **more})
    assert got["hidden_states"] is X and list(reasons) == [f"block: {why}"] and torch.equal(out, X + 1)


def test_a_host_may_forbid_a_block_to_merge():
    _, got, reasons = run({"hidden_states": X}, why="the host says so")
    assert got["hidden_states"] is X and list(reasons) == ["block: the host says so"]


# classes of which blocks keep all tokens, and a part of the reason
STAY_WHOLE = {
    "HiDream": "mask", "HunyuanVideo 1.5": "mask", "LTX 2": "(video_rotary_emb)",
    "Allegro": "positions", "Flux, a reference": "reference",
}  # fmt: skip
_DIFFERENT = ("Flux", "SD3.5", "Qwen-Image, padded", "Wan", "Z-Image", "Lumina 2", "LTX", "Chroma", "Flux.2",
              "HunyuanImage", "HunyuanVideo", "PixArt", "FramePack", *STAY_WHOLE)  # fmt: skip


@pytest.fixture
def every_block_may_merge(monkeypatch):
    """Tiny models have few blocks."""
    monkeypatch.setattr(transformer, "middle", lambda blocks: blocks)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in _DIFFERENT)) for name in PRESENT])
def test_blocks_of_each_class_merge_or_say_why_and_removed_nothing_changes(name, every_block_may_merge):
    model, given = dits.make(name)
    before = dits.call(model, given)
    with tome_core.patch(model, CONFIG) as handle:
        merged, report = dits.call(model, given), handle.report()
    assert torch.equal(dits.call(model, given), before) and merged.isfinite().all()
    reasons = [why for why in report.reasons if why.startswith("block")]
    if name in STAY_WHOLE:
        assert torch.equal(merged, before) and not report.levels[0].block_tokens
        assert any(STAY_WHOLE[name] in why for why in reasons), reasons
        return
    assert not torch.equal(merged, before) and report.levels[0].block_tokens and 0 < report.work_saved < 0.75
    for tokens, left in report.levels[0].block_tokens:
        assert tokens - left == dits.MODELS[name].count // 2


def test_the_first_and_the_last_blocks_keep_all_tokens():
    assert middle(range(57)) == range(19, 49) and middle(range(16)) == range(6, 14) and not middle(range(2))
    assert transformer_blocks.WHOLE_FIRST > 0 and transformer_blocks.WHOLE_LAST > 0


def test_a_stretch_goes_on_from_joint_blocks_to_single_ones_and_merges_once(every_block_may_merge, monkeypatch):
    model, given = dits.make("Flux")
    merges, original = [], MergePlan.merge
    monkeypatch.setattr(MergePlan, "merge", lambda plan, x: merges.append(x.shape) or original(plan, x))
    with tome_core.patch(model, CONFIG):
        dits.call(model, given)
    assert sum(shape[1:] == (dits.SIDE**2, 32) for shape in merges) == 1


def put_hook(module: nn.Module, seen: list[int]) -> None:
    """Another program's hook, which notes how many tokens it gets."""

    def of_another(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"]).shape[1])

    module.register_forward_pre_hook(of_another, with_kwargs=True)


def put_forward(module: nn.Module, seen: list[int]) -> None:
    beneath = module.forward

    def of_another(*args: Any, **kwargs: Any) -> Any:
        seen.append((args[0] if args else kwargs["hidden_states"]).shape[1])
        return beneath(*args, **kwargs)

    module.forward = of_another


@pytest.mark.parametrize("put", [put_hook, put_forward])
@pytest.mark.parametrize("name, path", [
    ("Flux", "transformer_blocks.0.norm1"), ("Flux", "single_transformer_blocks.0.attn"),
    ("Wan", "blocks.1.ffn.net.2"), ("SD3.5", "transformer_blocks.0.attn.to_q")])
def test_code_of_others_in_a_block_gets_all_tokens_and_is_named(name, path, put, every_block_may_merge):
    (model, given), seen = dits.make(name), []
    put(model.get_submodule(path), seen)
    before, alone = dits.call(model, given), [*seen]
    seen.clear()
    with tome_core.patch(model, CONFIG) as handle:
        merged = dits.call(model, given)
    assert seen == alone and not torch.equal(merged, before)
    (why,) = [why for why in handle.report().reasons if why.startswith("block")]
    assert "of_another" in why and path.partition(".")[2].partition(".")[2] in why


def test_a_call_with_gradients_keeps_all_tokens(every_block_may_merge):
    model, given = dits.make("Flux")
    with tome_core.patch(model, CONFIG) as handle:
        out = model(**given, return_dict=False)[0]
    assert torch.equal(out, dits.call(model, given)) and out.requires_grad
    assert any("torch.no_grad()" in why for why in handle.report().reasons)


def test_what_is_added_between_blocks_reaches_every_token(every_block_may_merge):
    """ControlNets add residuals of all tokens: the stretch ends there, and the next block begins another."""
    model, given = dits.make("Flux")
    count = dits.MODELS["Flux"].count
    added = torch.randn(1, count, 32, generator=torch.Generator().manual_seed(1))
    with tome_core.patch(model, CONFIG) as handle:
        without = dits.call(model, given)
        out = dits.call(model, {**given, "controlnet_single_block_samples": [added]})
        assert not [why for why in handle.report().reasons if why.startswith("block")]
    plain, wanted = (dits.call(model, {**given, **more})
                     for more in ({}, {"controlnet_single_block_samples": [added]}))  # fmt: skip
    effect = wanted - plain
    assert (out - without - effect).norm() < 0.1 * effect.norm()
