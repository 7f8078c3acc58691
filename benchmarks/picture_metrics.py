"""How far two sets of pictures are apart, and two pictures to a trained network. Pictures are uint8 ``[H, W, 3]``."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

ENOUGH_FOR_FRECHET = 1024  # at 256 it separates no two methods
LPIPS_WEIGHTS, INCEPTION_WEIGHTS = "alexnet-owt-*.pth", "weights-inception-2015-12-05-*.pth"
_GRID, _SCALES = 4, 4


def features(picture: np.ndarray) -> list[float]:
    """60 plain numbers for a Frechet distance without learned weights.

    The mean colour of each of 4x4 squares (48), and the logarithm of the energy of Haar details across, down and
    diagonal at four scales (12): where what colour is, and how much texture. It sees blur, ringing and shifted
    colours; it knows nothing of objects, so it does not compare with published FIDs.
    """
    height, width = (side - side % 2**_SCALES for side in picture.shape[:2])  # what does not divide is cut off
    x = picture[:height, :width].astype(np.float64) / 255
    squares = x.reshape(_GRID, height // _GRID, _GRID, width // _GRID, 3).mean((1, 3))
    energies = []
    grey = x.mean(-1)
    for _ in range(_SCALES):
        a, b, c, d = grey[::2, ::2], grey[::2, 1::2], grey[1::2, ::2], grey[1::2, 1::2]
        details = (a - b + c - d, a + b - c - d, a - b - c + d)
        energies += [math.log(1e-6 + float(np.mean(detail**2))) for detail in details]
        grey = (a + b + c + d) / 4
    return [*squares.reshape(-1).tolist(), *energies]


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """Frechet distance of two sets of features ``[n, d]``, each taken as a Gaussian (Heusel et al. 2017).

    Raises ValueError for sets of fewer than 1,024, where it says more about the number than about the pictures.
    """
    if min(len(a), len(b)) < ENOUGH_FOR_FRECHET:
        raise ValueError(f"a Frechet distance of {min(len(a), len(b))} pictures separates nothing; "
                         f"it needs {ENOUGH_FOR_FRECHET}")
    first, second = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    # the trace of the root of a product of two covariances: the roots of its eigenvalues, real and not negative
    roots = np.sqrt(np.clip(np.linalg.eigvals(first @ second).real, 0, None)).sum()
    apart = np.square(a.mean(0) - b.mean(0)).sum()
    return float(max(0.0, apart + np.trace(first) + np.trace(second) - 2 * roots))


def lpips() -> tuple[Callable[[np.ndarray, np.ndarray], float] | None, str]:
    """LPIPS (Zhang et al. 2018) by the package of that name, or None and the sentence that says why not.

    Nothing is downloaded: the package would fetch AlexNet, so that has to be on the machine.
    """
    why_not = _missing(("lpips", "torchvision"), LPIPS_WEIGHTS, "LPIPS")
    if why_not:
        return None, why_not
    import lpips as package

    network = package.LPIPS(net="alex", verbose=False).eval()

    def distance(a: np.ndarray, b: np.ndarray) -> float:
        pair = [torch.from_numpy(x).permute(2, 0, 1)[None].float() / 127.5 - 1 for x in (a, b)]
        with torch.inference_mode():
            return float(network(*pair))

    return distance, "LPIPS: package lpips, AlexNet"


def inception_distance() -> tuple[Callable[[Path, Path], float] | None, str]:
    """FID of two folders of pictures by torch-fidelity, or None and the sentence that says why not."""
    why_not = _missing(("torch_fidelity",), INCEPTION_WEIGHTS, "FID")
    if why_not:
        return None, why_not
    import torch_fidelity

    def distance(a: Path, b: Path) -> float:
        found = torch_fidelity.calculate_metrics(
            input1=str(a), input2=str(b), fid=True, cuda=torch.cuda.is_available(), verbose=False
        )
        return float(found["frechet_inception_distance"])

    return distance, "FID: package torch-fidelity, Inception v3"


def _missing(packages: tuple[str, ...], weights: str, what: str) -> str:
    absent = [name.replace("_", "-") for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        return f"{what} is left out: {' and '.join(absent)} not installed"
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    if not any(folder.glob(weights)):
        return f"{what} is left out: its weights ({weights}) are not in {folder}, and nothing is downloaded here"
    return ""
