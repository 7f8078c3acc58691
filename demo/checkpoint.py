"""What a path given by the user holds, read without loading it, and what is refused."""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

PICKLED = (".ckpt", ".pt", ".pth", ".bin", ".pkl", ".pickle")
WHY_NOT_PICKLED = "a pickle can run any code when it is opened, so only .safetensors weights are accepted here"


@dataclass(frozen=True)
class Checkpoint:
    """A user's folder or file that `inspect` accepted; the weights are not loaded yet.

    kind: "folder" of diffusers, "sd" or "sdxl" for a single file of that family, "scenes" for weights that
        `demo.training.train` wrote.
    variant: the tag of a folder's weights, such as "fp16"; None for plain weights and for single files.
    """

    path: Path
    kind: str
    variant: str | None = None


def inspect(path: Path) -> Checkpoint:
    """Tell the kind of a diffusers folder or .safetensors file. FileNotFoundError if missing, ValueError if refused."""
    if not path.exists():
        raise FileNotFoundError(f"--model {path} does not exist; give a diffusers folder or a .safetensors file")
    return _inspect_folder(path) if path.is_dir() else _inspect_file(path)


def _inspect_file(path: Path) -> Checkpoint:
    """Return a checkpoint of kind "scenes", "sd" or "sdxl" by its tensor names. Raises ValueError for all else."""
    if path.suffix.lower() in PICKLED:
        raise ValueError(f"{path} is a pickled checkpoint: {WHY_NOT_PICKLED}; "
                         "download or convert the model as .safetensors")
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} ends in {path.suffix or 'nothing'!r}; a single-file model must end in "
                         "'.safetensors' (or give a diffusers folder)")
    shapes = read_shapes(path)
    if is_of_scenes(shapes):
        return Checkpoint(path, "scenes")
    first = shapes.get("model.diffusion_model.input_blocks.0.0.weight")
    if first is None:
        raise ValueError(f"{path} holds no Stable Diffusion UNet (no 'model.diffusion_model.input_blocks' among its "
                         f"{len(shapes)} tensors): a LoRA, a VAE, a part of a model, or another kind of model; "
                         "give a whole SD1.x, SD2.x or SDXL checkpoint, or a diffusers folder")
    _refuse_extra_channels(path, first[1], 4)
    if any(name.startswith("conditioner.embedders.1.") for name in shapes):
        return Checkpoint(path, "sdxl")
    if any(name.startswith("conditioner.") for name in shapes):
        raise ValueError(f"{path} is an SDXL refiner, which only improves finished pictures; give an SDXL base model")
    return Checkpoint(path, "sd")


def is_of_scenes(shapes: dict[str, list[int]]) -> bool:
    """Say, by names alone, whether a file with these tensors is a scene model of this demo, UNet or transformer."""
    return "emb.weight" in shapes and ("unet.conv_in.weight" in shapes or is_transformer(shapes))


def is_transformer(shapes: dict[str, list[int]]) -> bool:
    """Say, by names alone, whether a scene model with these tensors has Flux's layout."""
    return "transformer.x_embedder.weight" in shapes


def read_shapes(path: Path) -> dict[str, list[int]]:
    """Read names and shapes of a .safetensors file's tensors from its header. Raises ValueError if it is not one."""
    try:
        with safe_open(path, "np") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} ends in .safetensors but is no such file ({error}); "
                         "it may be a renamed or incomplete download, get it again") from error


def _inspect_folder(path: Path) -> Checkpoint:
    """Return a "folder" checkpoint, with the variant of its UNet's files.

    Raises ValueError if ``model_index.json`` is missing or names no UNet, a part has pickled weights alone, the folder
    has Python code, or it is an inpainting model.
    """
    index = path / "model_index.json"
    if not index.is_file():
        raise ValueError(f"{path} has no model_index.json, so it is no diffusers folder; give the folder that has "
                         "one, or a single .safetensors file")
    # a part that is there is [library, class]
    parts = [name for name, entry in _read_json(index).items()
             if isinstance(entry, list) and entry and entry[0] is not None]  # fmt: skip
    if "unet" not in parts:
        raise ValueError(f"{path} holds a model without a UNet (its parts: {', '.join(parts) or 'none'}); "
                         "merging works on Stable Diffusion's UNets")
    for part in (path / name for name in parts):
        files = list(part.iterdir()) if part.is_dir() else []
        pickled = [file.name for file in files if file.suffix.lower() in PICKLED]
        if pickled and not any(file.suffix == ".safetensors" for file in files):
            raise ValueError(f"{part} holds only pickled weights ({pickled[0]}): {WHY_NOT_PICKLED}; "
                             "download or convert the model as .safetensors")
    # older diffusers import modules that a local folder brings along, without asking
    code = [file for folder in (path, *(path / name for name in parts)) for file in folder.glob("*.py")]
    if code:
        raise ValueError(f"{code[0]} is Python code inside the model, which loading it could run; "
                         "use a model without code of its own, or move that file away if the model does not need it")
    unet = _read_json(path / "unet" / "config.json")
    _refuse_extra_channels(path, unet.get("in_channels", 4), unet.get("out_channels", 4))
    return Checkpoint(path, "folder", _variant(path / "unet"))


def _read_json(path: Path) -> dict:
    """Return a JSON file's content, unchecked. Raises FileNotFoundError if missing, ValueError if it is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: the model is incomplete, get it again") from None
    except ValueError as error:
        raise ValueError(f"{path} does not read as JSON ({error}); the model is damaged, get it again") from error


def _refuse_extra_channels(path: Path, channels: int, expected: int) -> None:
    """Raise ValueError, which calls the model in `path` an inpainting one, unless `channels` equals `expected`."""
    if channels != expected:
        raise ValueError(f"{path} takes {channels} latent channels where a text-to-image model takes {expected}: "
                         "an inpainting or editing model; give one that makes pictures from text alone")


def _variant(unet: Path) -> str | None:
    """Return the first file's tag, "fp16" in `x.fp16.safetensors`; None if any file has no tag, or without files.

    unet: the folder of a UNet, whose .safetensors files are looked at. A shard's tag, "fp16-00001-of-2", gives "fp16".
    """
    tags = [file.name.split(".")[1:-1] for file in sorted(unet.glob("*.safetensors"))]
    return None if not tags or [] in tags else tags[0][0].split("-")[0]
