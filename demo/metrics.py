"""How alike two pictures are, and how much detail one has. Pictures are uint8 ``[H, W, 3]``."""

import math

import numpy as np
from skimage.metrics import structural_similarity

_LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue: ITU-R BT.601


def squared_error(a: np.ndarray, b: np.ndarray) -> float:
    """Compute the mean squared difference of two uint8 pictures over pixels and colours, at most 255**2."""
    return float(np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2))


def decibels(error: float) -> float:
    """Compute the peak signal-to-noise ratio in dB of a `squared_error`, for a peak of 255; infinite for 0."""
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Compute the peak signal-to-noise ratio of two pictures in dB, with 255 as the peak; infinite for equal ones."""
    return decibels(squared_error(a, b))


def ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Compute scikit-image's structural similarity of two pictures, in windows of 7 x 7 pixels; 1 for equal ones."""
    return float(structural_similarity(a, b, channel_axis=2, data_range=255))


def gradient_energy(picture: np.ndarray) -> float:
    """Compute the detail: mean squared step of luminance, 0..255, to the next pixel, down and across added up."""
    grey = picture.astype(np.float64) @ _LUMINANCE
    return float(np.mean(np.diff(grey, axis=0) ** 2) + np.mean(np.diff(grey, axis=1) ** 2))
