"""The arithmetic of codes, estimated scores and shares in the numba references of sketch's ops:
float32 where the kernels compute in float32, logarithms to base 2."""

import numpy as np

from attnplug.ops.common.numba_cache import njit
from attnplug.ops.sketch.kernels import codes as kernel_codes

NAMED = ("BINS", "REACH", "LARGEST", "OCTAVE", "FINE", "MARGIN", "LOWER", "RISE")
BINS, REACH, LARGEST, OCTAVE, FINE, MARGIN, LOWER, RISE = (
    getattr(kernel_codes, name).value for name in NAMED
)


@njit()
def exp2(x):
    """2^x, float64: numba mixes up its own exp2 of two widths."""
    return np.exp(np.float64(x) * np.log(2.0))


@njit()
def log2(x):
    return np.log(np.float64(x)) / np.log(2.0)


@njit()
def capped(s, cap):
    """cap tanh(s / cap); a cap of 0 is none."""
    return s if cap == 0 else cap * np.tanh(s / cap)


@njit()
def in_units(weights):
    """Weights `[r]` as (integers, unit), the largest REACH units."""
    unit = max(np.abs(weights).max() / np.float32(REACH), np.float32(1e-30))
    return np.rint(weights * (np.float32(1) / unit)), unit


@njit()
def unpack(fine, coarse, codes):
    """The codes of one token, in the order of the coordinates."""
    half, quarter = fine.shape[0], coarse.shape[0]
    for i in range(half):
        codes[i], codes[half + i] = fine[i] & 15, fine[i] >> 4
    for i in range(quarter):
        for j in range(4):
            codes[2 * half + j * quarter + i] = (coarse[i] >> (2 * j)) & 3


@njit()
def estimate(whole, unit, offset, codes):
    """The estimated score of one head and token. The sum is exact: an integer below 2^24."""
    total = np.float32(0)
    for i in range(codes.shape[0]):
        total += whole[i] * codes[i]
    return total * unit + offset


@njit()
def rounded(share):
    """A share as float16 holds it."""
    if not abs(share) < 2.0**16:
        return share
    step = 2.0 ** (max(np.floor(log2(abs(share))), -14.0) - 10) if share != 0 else 1.0
    return np.rint(share / step) * step


@njit()
def bin_of(share, middle):
    """The bin of a share; what is below them all goes to bin 0."""
    y = (np.float32(share) - middle) * np.float32(OCTAVE)
    far = abs(y) - np.float32(FINE)
    if far > 0:
        y = np.sign(y) * (np.float32(FINE) + far * np.float32(0.125))
    return int(np.floor(min(max(y, -128.0), 127.0))) + 128
