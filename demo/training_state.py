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

MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainingState:
    """The model, its running average, the optimizer, steps done and seconds spent.

    The average is what gets sampled and published: single steps are noisy, their mean is not.
    """

    def __init__(self, model: SceneModel, learning_rate: float):
        self.model = model.train()
        self.average = copy.deepcopy(model).eval().requires_grad_(False)
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim <= 1]  # biases and norms: decay would only hurt them
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.99))
        self.step, self.seconds = 0, 0.0

    def update_average(self, limit: float) -> None:
        """Move the average towards the model; early on faster than `limit`, to forget the start."""
        keep = min(limit, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - keep)

    def save(self, path: Path) -> None:
        """Write everything, in one move: a stop while writing leaves the previous state."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"average.{name}": value for name, value in self.average.state_dict().items()}
        for index, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": moments[name] for name in MOMENTS}
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
            self._load_optimizer(_below("optimizer.", tensors), progress["step"])
        except Exception as error:
            raise ValueError(f"{path} is no training state of this model ({error}); give another --state, "
                             "or remove the file to start anew") from error
        self.step, self.seconds = progress["step"], progress["seconds"]

    def _load_optimizer(self, tensors: dict[str, torch.Tensor], step: int) -> None:
        state: dict[int, dict] = {}
        for key, value in tensors.items():
            index, name = key.split(".")
            state.setdefault(int(index), {"step": torch.tensor(float(step))})[name] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _below(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name[len(prefix):]: value for name, value in tensors.items() if name.startswith(prefix)}
