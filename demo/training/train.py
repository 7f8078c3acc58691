"""Train the embedded model: ``python -m demo.training.train --minutes 90``. After Ctrl-C the same command goes on."""

import argparse
import copy
import json
import math
import os
import sys
import time
from pathlib import Path

from demo import command

command.wait_passively()

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from demo import model as scene_model  # noqa: E402
from demo.training import attention  # noqa: E402
from demo.training import loss as losses  # noqa: E402
from demo.training.loss import Batch, Scenes  # noqa: E402

BLOCKS = ("down_blocks.", "mid_block.", "up_blocks.", "transformer_blocks.")  # their matrices are Muon's
FOLDER = Path(__file__).resolve().parents[2] / "demo-output"
SAVE_EVERY, SPEAK_EVERY = 60.0, 10.0  # seconds
AVERAGE = 0.995
STAY_SHARP = 1.0  # of the loss: a sharp head's excess of one nat, squared
DETAILS_EVERY = 6  # steps on full pictures: parts have taught most of that by then
FINISH, FINISH_EVERY = 0.8, 2  # from that share of the time on, for clean edges
FEWER = 8  # in noise level 0 looks at every 8th key of a full picture: its attention is two thirds of a step's time


def parser() -> argparse.ArgumentParser:
    """Make the parser of a training run's options."""
    options = argparse.ArgumentParser(prog="python -m demo.training.train", description=__doc__)
    add = options.add_argument
    add("--minutes", type=float, required=True, help="length of the whole run, over all its resumptions")
    add("--layout", choices=tuple(scene_model.LAYOUTS), default="sd", help="Stable Diffusion's, for 128 px (default), "
        "SDXL's, for 256 px, or Flux's, for 128 px")
    add("--state", type=Path, help="where the run is kept (default demo-output/training-LAYOUT.safetensors)")
    add("--output", type=Path, help="where the weights go (default demo-output/scenes-LAYOUT.safetensors)")
    add("--device", default="cpu", help="cpu (default), cuda, ...")
    add("--batch", type=command.number("number of pictures", 1, 4096, "such as 4"), default=4,
        help="pictures a step; twice as many at first, and four times as many quarter-size parts for a transformer "
             "(default 4; a GPU takes 64)")
    add("--learning-rate", type=float, default=3e-3, help="highest learning rate (default 0.003)")
    add("--coarse", type=float, default=0.3, help="share of the time spent on half-size pictures first (default 0.3)")
    add("--crops", type=float, default=0.15, help="share of the time spent on parts of full pictures after that, cheap "
        "to look things up in: half-size ones, quarter-size ones for a transformer (default 0.15)")
    add("--seed", type=command.SEED, default=0, help="seed of the scenes and of the noise")
    return options


class TrainingState:
    """A training run: the model, its running average, which becomes the result, optimizers, steps and seconds."""

    def __init__(self, model: scene_model.SceneModel, learning_rate: float):
        self.model = model.train()
        self.average = copy.deepcopy(model).eval().requires_grad_(False)
        self.both = torch.nn.ModuleDict({"model": self.model, "average": self.average})
        self.matrices = [p for name, p in model.named_parameters() if p.ndim > 1 and any(b in name for b in BLOCKS)]
        # Muon, which learns more in a step than AdamW, takes matrices; these share the memory of kernels
        self.flat = [torch.nn.Parameter(p.detach().flatten(1)) for p in self.matrices]
        chosen = set(map(id, self.matrices))
        others = [p for p in model.parameters() if id(p) not in chosen]
        self.optimizers = (
            torch.optim.Muon(self.flat, learning_rate, weight_decay=0.01, ns_steps=3, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0),
        )
        self.step, self.seconds = 0, 0.0

    def descend(self) -> None:
        """Take one step of each optimizer by the gradients of the model's weights, clear them, and count the step."""
        for flat, matrix in zip(self.flat, self.matrices, strict=True):
            flat.grad = matrix.grad.flatten(1)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        self.step += 1

    def update_average(self, limit: float) -> None:
        """Move the running average towards the model. It keeps the share `limit` of itself; less in the first steps."""
        keep = min(limit, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - keep)

    def save(self, path: Path) -> None:
        """Write model, average, optimizers, step and seconds to a .safetensors file. If it fails, the old one stays."""
        tensors = self.both.state_dict()
        for kind, optimizer in enumerate(self.optimizers):
            for index, moments in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{kind}.{index}.{name}": value for name, value in moments.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(f"{path}.part")
        progress = json.dumps({"step": self.step, "seconds": self.seconds})
        save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, unfinished,
                  {"progress": progress})
        os.replace(unfinished, path)

    def load(self, path: Path) -> None:
        """Replace the state by a saved one. Raises ValueError if the file is missing, damaged or another model's."""
        moments: list[dict] = [{}, {}]
        try:
            with safe_open(path, "pt") as file:
                progress = json.loads(file.metadata()["progress"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            for name in [name for name in tensors if name.startswith("optimizer.")]:
                _, kind, index, moment = name.split(".")
                moments[int(kind)].setdefault(int(index), {})[moment] = tensors.pop(name)
            self.both.load_state_dict(tensors)
            for optimizer, state in zip(self.optimizers, moments, strict=True):
                optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        except Exception as error:
            raise ValueError(f"{path} is no training state of this model ({error}); give another --state, "
                             "or remove the file to start anew") from error
        self.step, self.seconds = progress["step"], progress["seconds"]


def learning_rate(highest: float, step: int, progress: float, coarse: float) -> float:
    """Return a step's rate: up for 40 steps, `highest` until `progress` (of the time) is `coarse`, a cosine to 2 %."""
    fine = max(0.0, progress - coarse) / (1 - coarse)
    return highest * min(1.0, (step + 1) / 40) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, fine))))


def train_step(state: TrainingState, batch: Batch, seed: int, composition: bool = False) -> float:
    """Train one step and update the average; return the loss without the `broadness` that a UNet's training adds.

    composition: use `composition_loss` at `noisy_times`, else `v_loss` at `stratified_times`. Draws depend on `seed`
    and the step alone. Raises FloatingPointError, and leaves the weights as they are, if gradients are not finite.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + state.step)
    draw, loss_of = ((losses.noisy_times, losses.composition_loss) if composition
                     else (losses.stratified_times, losses.v_loss))
    times = draw(len(batch.pictures), generator)
    whole = batch.pictures.shape[-1] == 2 * state.model.side
    keys = slice(state.step % FEWER, None, FEWER) if composition and whole else None
    with attention.record_breadths(state.model, keys) as breadths:
        loss = loss_of(state.model, batch, times, generator)
    (loss + STAY_SHARP * attention.broadness(breadths, times) if breadths else loss).backward()
    if not torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0).isfinite():
        raise FloatingPointError(f"step {state.step} has loss {loss.item()} and gradients that are no numbers; what "
                                 "was saved before is kept: go on from there with a lower --learning-rate")
    state.descend()
    state.update_average(AVERAGE)
    return loss.item()


def teaches_composition(state: TrainingState, scenes: Scenes, progress: float) -> bool:
    """Say if a step uses `composition_loss`: half-size pictures yes, parts no, full pictures unless 6 divides the step.

    From the share FINISH of the time (`progress`) on, full pictures unless 2 divides the step.
    """
    details_every = DETAILS_EVERY if progress < FINISH else FINISH_EVERY
    return scenes.size < 2 * state.model.side or (scenes.crop is None and state.step % details_every > 0)


def train(state: TrainingState, options: argparse.Namespace) -> None:
    """Train for the rest of the minutes: half-size pictures, parts, full ones. Saves each minute, not at the end."""
    full, total = 2 * state.model.side, options.minutes * 60
    # A transformer has all of its attention at full size, so smaller parts and more of them teach it more in a minute.
    part, parts = (full // 2, 2) if isinstance(state.model, scene_model.SceneModel) else (full // 4, 4)
    phases = (
        (options.coarse, Scenes(options.seed, 2 * options.batch, full // 2, device=options.device)),
        (options.coarse + options.crops, Scenes(options.seed, parts * options.batch, full, part, options.device)),
        (1.0, Scenes(options.seed, options.batch, full, device=options.device)),
    )
    saved = spoken = before = time.monotonic()
    for until, scenes in phases:
        mean = None
        while (progress := state.seconds / total) < until:
            for group in (group for optimizer in state.optimizers for group in optimizer.param_groups):
                group["lr"] = learning_rate(options.learning_rate, state.step, progress, options.coarse)
            loss = train_step(state, scenes[state.step], options.seed, teaches_composition(state, scenes, progress))
            mean = loss if mean is None else 0.95 * mean + 0.05 * loss
            now = time.monotonic()
            state.seconds, before = state.seconds + now - before, now
            if now - spoken > SPEAK_EVERY:
                crop, left = f"{scenes.crop} of " if scenes.crop else "", max(0.0, total - state.seconds) / 60
                print(f"{state.seconds / 60:.1f} of {options.minutes:g} min, step {state.step}, {crop}{scenes.size} "
                      f"px, loss {mean:.4f}, {left:.1f} min left", flush=True)
                spoken = now
            if now - saved > SAVE_EVERY:
                state.save(options.state)
                saved = now


def prepare(options: argparse.Namespace) -> TrainingState:
    """Fill in paths `state` and `output`; load the state's file if any. ValueError, OSError: cannot run, or time up."""
    if min(options.coarse, options.crops) < 0 or options.coarse + options.crops >= 1:
        raise ValueError(f"--coarse {options.coarse} and --crops {options.crops} leave no time for full pictures; "
                         "give shares from 0 on that sum to less than 1")
    options.state = options.state or FOLDER / f"training-{options.layout}.safetensors"
    options.output = options.output or FOLDER / f"scenes-{options.layout}.safetensors"
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"training takes the optimizer Muon; torch {torch.__version__} has none, install 2.9 or newer")
    torch.manual_seed(options.seed)
    model = scene_model.make(scene_model.LAYOUTS[options.layout])
    attention.start_sharp(model)
    state = TrainingState(model.to(options.device), options.learning_rate)
    resume = options.state.exists()
    if resume:
        state.load(options.state)
    if state.seconds >= options.minutes * 60:
        raise ValueError(f"{options.state} has used up its {options.minutes:g} minutes; "
                         "give more --minutes or another --state")
    if resume:
        print(f"going on at step {state.step}, {state.seconds / 60:.1f} min into the run")
    return state


def main(arguments: list[str] | None = None) -> int:
    """Train and return the exit code: 0 done, 130 stopped (both saved), 1 a gradient not finite, 2 wrong options."""
    options = parser().parse_args(arguments)
    try:
        state = prepare(options)
    except (ValueError, OSError) as error:
        print(f"demo.training.train: {error}", file=sys.stderr)
        return 2
    torch.set_flush_denormal(True)  # moments of rarely used weights become denormal, which a CPU computes slowly
    stopped = False
    try:
        train(state, options)
    except KeyboardInterrupt:
        stopped = True
    except FloatingPointError as error:
        print(f"demo.training.train: {error}", file=sys.stderr)
        return 1
    finally:
        torch.set_flush_denormal(False)
    state.save(options.state)
    scene_model.save(state.average, options.output)
    print(f"step {state.step}, {state.seconds / 60:.1f} min; weights: {options.output}")
    if stopped:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    published = scene_model.load(options.output)
    print(f"held-out loss {losses.held_out_loss(published):.4f}")
    if attention.level_0(published):
        print(attention.Gates(attention.effective_keys(published), attention.loss_rise(published)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
