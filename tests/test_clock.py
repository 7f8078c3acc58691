"""A pipeline's clock is its scheduler: read outside the UNet, without asking the device, and never stale."""

from __future__ import annotations

import copy
import pickle

import diffusers
import pytest
import torch

import tome_core
from tests.models import CASES
from tests.tiny_pipeline import write_folder
from tome_core.timesteps import Timesteps

STEPS = 8
LATE = tome_core.MergeConfig(ratio=0.5, start_percent=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture
def pipe(folder):
    made = diffusers.StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)
    made.set_progress_bar_config(disable=True)
    return made


def draw(pipe, steps: int = STEPS):
    generator = torch.Generator().manual_seed(0)
    return pipe("a", num_inference_steps=steps, guidance_scale=2.0, generator=generator, output_type="latent").images


def expected_merges(scheduler, config=LATE) -> int:
    """UNet calls at a share of the schedule inside the rule's range, from the scheduler's own timesteps."""
    rule, last = config.rules[0], scheduler.config.num_train_timesteps - 1
    shares = [1 - float(t) / last for t in scheduler.timesteps]
    return sum(rule.start_percent <= share <= rule.end_percent for share in shares)


@pytest.mark.parametrize(
    "name",
    ["DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler",
     "LCMScheduler", "HeunDiscreteScheduler", "PNDMScheduler"],
)  # fmt: skip
def test_a_rule_in_percent_merges_in_exactly_its_steps(pipe, name):
    pipe.scheduler = getattr(diffusers, name).from_config(pipe.scheduler.config)
    blocks = 3
    with tome_core.patch(pipe, LATE) as handle:
        draw(pipe)
        level = handle.report().levels[0]
    merges = expected_merges(pipe.scheduler)
    assert 0 < merges < handle.report().calls == len(pipe.scheduler.timesteps)
    assert level.calls_merged == merges * blocks
    assert level.reasons == {"block: outside the rules' time range": (len(pipe.scheduler.timesteps) - merges) * blocks}


def test_a_timestep_is_looked_up_without_reading_it(pipe, monkeypatch):
    pipe.scheduler.set_timesteps(STEPS)
    steps, known = pipe.scheduler.timesteps, Timesteps()
    known.look(steps[0])
    values = steps.tolist()
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: pytest.fail("the timestep's value was read"))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("the timesteps were read again"))
    assert [known.look(t) for t in steps] == [(value, 1) for value in values]
    assert [known.look(t[None].expand(2))[0] for t in steps[3:]] == values[3:]


def test_a_timestep_of_somebodys_own_making_is_read():
    known = Timesteps()
    for one in (torch.tensor(123), torch.full((2,), 123), torch.arange(10_000)[123], 123, torch.tensor(1.0).to("meta")):
        assert known.look(one) is None
    assert [known.read(one) for one in (torch.tensor(123), 77, 77)] == [(123.0, 1), (77.0, 1), (77.0, 2)]


def test_a_schedule_is_one_picture_until_it_is_begun_again():
    known, steps, others = Timesteps(), torch.arange(1000, 0, -100), torch.arange(1000, 0, -100)
    order = [*steps[:4], steps[3], *steps[5:], *steps[:2], *others[2:], *steps[4:]]
    numbers = [known.look(one)[1] for one in order]
    assert numbers == [1] * 10 + [2] * 2 + [3] * 8 + [4] * 6


def test_noise_that_grows_and_a_schedule_that_is_written_into_begin_another_picture():
    known, steps = Timesteps(), torch.tensor([500.0, 510.0, 400.0])
    assert [known.look(one) for one in steps] == [(500.0, 1), (510.0, 2), (400.0, 2)]
    steps.mul_(0.5)
    assert known.look(steps[2]) == (200.0, 3)
    with torch.inference_mode():
        assert known.look(torch.tensor([9.0, 8.0])[1]) == (8.0, 4)


def test_several_timesteps_at_once_are_no_time(pipe):
    with tome_core.patch(pipe, LATE):
        pipe.scheduler.scale_model_input(torch.zeros(2, 4, 8, 8), torch.tensor([900, 800]))


@pytest.mark.parametrize("turn", [1, -1])
def test_nothing_is_left_on_a_scheduler_that_two_pipelines_share(pipe, turn):
    other = copy.deepcopy(pipe)
    other.scheduler = pipe.scheduler
    before = dict(vars(pipe.scheduler))
    for handle in [tome_core.patch(one, LATE) for one in (pipe, other)][::turn]:
        handle.remove()
    assert vars(pipe.scheduler) == before


def test_a_scheduler_exchanged_after_patching_does_not_stop_the_clock(pipe):
    handle = tome_core.patch(pipe, LATE)
    draw(pipe)
    first = handle.report().levels[0].calls_merged
    pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    draw(pipe)
    assert handle.report().levels[0].calls_merged - first == expected_merges(pipe.scheduler) * 3
    handle.remove()


def test_a_pipeline_compiled_as_a_whole_follows_its_scheduler(pipe):
    with tome_core.patch(pipe, LATE):
        expected = draw(pipe)
    plain = draw(pipe)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with tome_core.patch(pipe, LATE):
        pipe.unet = torch.compile(pipe.unet, backend=backend, fullgraph=True)
        assert torch.equal(draw(pipe), expected)
        assert torch.equal(draw(pipe), expected)
        assert len(graphs) == 2  # merged and not
    assert torch.equal(draw(pipe), plain)
    assert not torch.equal(plain, expected)


def test_nothing_is_left_on_the_scheduler_and_nothing_put_there_without_need(pipe):
    before = set(vars(pipe.scheduler))
    with tome_core.patch(pipe, LATE):
        assert set(vars(pipe.scheduler)) == before | {"scale_model_input"}
    assert set(vars(pipe.scheduler)) == before
    with tome_core.patch(pipe, tome_core.MergeConfig()):
        assert set(vars(pipe.scheduler)) == before


def test_a_copy_or_a_pickle_of_the_unet_keeps_its_rules_and_reads_the_time_itself(pipe):
    handle = tome_core.patch(pipe, LATE)
    for twin in (copy.deepcopy(pipe.unet), pickle.loads(pickle.dumps(pipe.unet))):
        x, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, 32)
        with torch.no_grad():
            twin(x, torch.tensor(900), text)
            twin(x, torch.tensor(100), text)
        assert tome_core.report(twin).levels[0].calls_merged == 3
    assert handle.report().calls == 0
    handle.remove()


def test_an_ldm_model_knows_its_own_schedule():
    case = next(case for case in CASES if case.name == "ldm_sd1")
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.diffusion_model = case.build()
    model.register_buffer("betas", torch.tensor(tome_core.NoiseSchedule.stable_diffusion().betas))
    handle = tome_core.patch(model, LATE)
    assert handle.run.knows_schedule and not handle.run.lacks_schedule
    handle.remove()
