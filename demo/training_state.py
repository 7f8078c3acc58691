"""What a training run needs to go on after a stop, in one safetensors file (no pickle, like everything here)."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from demo.model import SceneModel

BLOCKS = ("down_blocks.", "mid_block.", "up_blocks.", "transformer_blocks.")


class TrainingState:
    """The model, its running average, the optimizer, steps done and seconds spent.

    The average is what gets sampled and published: single steps are noisy, their mean is not.
    """

    def __init__(self, model: SceneModel, learning_rate: float):
        self.model = model.train()
        self.average = copy.deepcopy(model).eval().requires_grad_(False)
        self.matrices = [p for name, p in model.named_parameters() if p.ndim > 1 and any(b in name for b in BLOCKS)]
        # Muon takes matrices, a convolution's kernel as one; these share its memory. After equal steps its loss is
        # less than AdamW's, where there is most noise above all.
        self.flat = [torch.nn.Parameter(p.detach().flatten(1)) for p in self.matrices]
        chosen = set(map(id, self.matrices))
        others = [p for p in model.parameters() if id(p) not in chosen]
        self.optimizers = (
            torch.optim.Muon(self.flat, learning_rate, weight_decay=0.01, ns_steps=3, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0),
        )
        self.step, self.seconds = 0, 0.0

    def set_learning_rate(self, rate: float) -> None:
        """Of every weight."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def descend(self) -> None:
        """One step down the gradients that the model's weights have; takes them away."""
        for flat, matrix in zip(self.flat, self.matrices, strict=True):
            flat.grad = matrix.grad.flatten(1)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        self.step += 1

    def update_average(self, limit: float) -> None:
        """Move the average towards the model; early on faster than `limit`, to forget the start."""
        keep = min(limit, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - keep)

    def save(self, path: Path) -> None:
        """Write everything, in one move: a stop while writing leaves the previous state."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"average.{name}": value for name, value in self.average.state_dict().items()}
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
        """Take over what `save` wrote. Raises ValueError where the file is of another model or no such file."""
        try:
            with safe_open(path, "pt") as file:
                progress = json.loads(file.metadata()["progress"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self.model.load_state_dict(_below("model.", tensors))
            self.average.load_state_dict(_below("average.", tensors))
            for kind, optimizer in enumerate(self.optimizers):
                _load(optimizer, _below(f"optimizer.{kind}.", tensors))
        except Exception as error:
            raise ValueError(f"{path} is no training state of this model ({error}); give another --state, "
                             "or remove the file to start anew") from error
        self.step, self.seconds = progress["step"], progress["seconds"]


def _load(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    state: dict[int, dict] = {}
    for key, value in tensors.items():
        index, name = key.split(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _below(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name[len(prefix):]: value for name, value in tensors.items() if name.startswith(prefix)}
