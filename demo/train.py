"""Train the embedded model: `python -m demo.train --minutes 90`. Stop it with Ctrl-C, start it again to go on."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from demo import cores

cores.wait_passively()

import torch  # noqa: E402

from demo import attention  # noqa: E402
from demo import model as scene_model  # noqa: E402
from demo.training_loss import Scenes, held_out_loss, stratified_times, v_loss  # noqa: E402
from demo.training_state import TrainingState  # noqa: E402

FOLDER = Path(__file__).resolve().parent.parent / "demo-output"
SAVE_EVERY, SPEAK_EVERY = 60.0, 10.0  # seconds
AVERAGE = 0.995


def positive(text: str) -> float:
    """A number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0; give one such as 90")
    return value


def parser() -> argparse.ArgumentParser:
    """The options of a training run."""
    made = argparse.ArgumentParser(prog="python -m demo.train", description=__doc__)
    add = made.add_argument
    add("--minutes", type=positive, required=True, help="length of the whole run, over all its resumptions")
    state, weights = FOLDER / "training.safetensors", FOLDER / "scenes128.safetensors"
    add("--state", type=Path, default=state, help="where the run is kept (default %(default)s)")
    add("--output", type=Path, default=weights, help="where the weights go (default %(default)s)")
    add("--start", type=Path, help="weights to begin a new run with (default: random ones); "
        "level-0 self-attention starts anew all the same")
    add("--device", default="cpu", help="cpu (default), cuda, ...")
    add("--batch", type=int, default=4, help="pictures a step; twice as many at first (default 4; a GPU takes 64)")
    add("--learning-rate", type=positive, default=1e-3, help="highest learning rate (default 0.001)")
    add("--coarse", type=float, default=0.28, help="share of the time spent on half-size pictures first")
    add("--seed", type=int, default=0, help="seed of the scenes and of the noise")
    return made


def learning_rate(highest: float, step: int, progress: float, coarse: float) -> float:
    """Warm up for 40 steps, stay, and fall along a cosine to 2 % once the pictures have full size."""
    fine = max(0.0, progress - coarse) / (1 - coarse)
    return highest * min(1.0, (step + 1) / 40) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, fine))))


def train_step(state: TrainingState, pictures: torch.Tensor, tokens: torch.Tensor, seed: int) -> float:
    """One step on a batch; gives its loss. Noise and times depend on `seed` and the step alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + state.step)
    times = stratified_times(len(pictures), generator)
    loss = v_loss(state.model, pictures, tokens, times, generator)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.update_average(AVERAGE)
    return loss.item()


def train(state: TrainingState, options: argparse.Namespace) -> None:
    """Run until the minutes are used up, half-size pictures first; saves now and then, and at the end."""
    full = 2 * state.model.unet.config.sample_size
    phases = ((options.coarse, full // 2, 2 * options.batch), (1.0, full, options.batch))
    saved = spoken = time.monotonic()
    for until, size, batch in phases:
        for loss in _phase(state, options, until, size, batch):
            now = time.monotonic()
            if now - spoken > SPEAK_EVERY:
                print(_progress_line(state, options.minutes, size, loss), flush=True)
                spoken = now
            if now - saved > SAVE_EVERY:
                state.save(options.state)
                saved = now


def _phase(state: TrainingState, options: argparse.Namespace, until: float, size: int, batch: int) -> Iterator[float]:
    """Steps on pictures of one size while progress is below `until`; gives the running mean of the loss."""
    total, mean = options.minutes * 60, None
    if state.seconds / total >= until:
        return
    before = time.monotonic()
    scenes = Scenes(options.seed, batch, size, options.device)
    while True:
        pictures, tokens = scenes[state.step]
        rate = learning_rate(options.learning_rate, state.step, state.seconds / total, options.coarse)
        for group in state.optimizer.param_groups:
            group["lr"] = rate
        loss = train_step(state, pictures, tokens, options.seed)
        mean = loss if mean is None else 0.95 * mean + 0.05 * loss
        now = time.monotonic()
        state.seconds, before = state.seconds + now - before, now
        yield mean
        if state.seconds / total >= until:
            return


def _progress_line(state: TrainingState, minutes: float, size: int, loss: float) -> str:
    spent = state.seconds / 60
    return (f"{spent:.1f} of {minutes:g} min, step {state.step}, {size} px, loss {loss:.4f}, "
            f"{max(0.0, minutes - spent):.1f} min left")


def prepared(options: argparse.Namespace) -> TrainingState:
    """The state to go on from: the saved one, else new. Raises ValueError or OSError with a sentence to read."""
    if not 0 <= options.coarse < 1:
        raise ValueError(f"--coarse {options.coarse} is a share of the time: at least 0 and less than 1, such as 0.28")
    for name, low in (("batch", 1), ("seed", 0)):
        if getattr(options, name) < low:
            raise ValueError(f"--{name} {getattr(options, name)} is too small; give at least {low}")
    resume = options.state.exists()
    if resume and options.start:
        raise ValueError(f"--start begins a new run, but {options.state} holds one; leave --start out to go on, "
                         "or give another --state")
    torch.manual_seed(options.seed)
    model = scene_model.SceneModel()
    if options.start:
        model.load_state_dict(scene_model.load(options.start).state_dict())
    attention.start_sharp(model)
    state = TrainingState(model.to(options.device), options.learning_rate)
    if resume:
        state.load(options.state)
    if state.seconds >= options.minutes * 60:
        raise ValueError(f"{options.state} has used up its {options.minutes:g} minutes; "
                         "give more --minutes or another --state")
    if resume:
        print(f"going on at step {state.step}, {state.seconds / 60:.1f} min into the run")
    return state


def main(arguments: list[str] | None = None) -> int:
    """Train; gives the exit code: 0 done, 2 wrong options, 130 stopped (the run is kept)."""
    options = parser().parse_args(arguments)
    try:
        state = prepared(options)
    except (ValueError, OSError) as error:
        print(f"demo.train: {error}", file=sys.stderr)
        return 2
    torch.set_flush_denormal(True)  # moments of rarely used weights become denormal, which a CPU computes slowly
    stopped = False
    try:
        train(state, options)
    except KeyboardInterrupt:
        stopped = True
    state.save(options.state)
    scene_model.save(state.average, options.output)
    print(f"step {state.step}, {state.seconds / 60:.1f} min; weights: {options.output}")
    if stopped:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    published = scene_model.load(options.output)
    print(f"held-out loss {held_out_loss(published):.4f}")
    print(attention.gates(published))
    return 0


if __name__ == "__main__":
    sys.exit(main())
