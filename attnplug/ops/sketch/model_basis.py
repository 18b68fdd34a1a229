"""The basis of `sketch`'s codes that a model has once, for all prompts and lengths.

A key at position n lies in the band of 2,048 positions that begins at s. RoPE turns it by n; turned
back to the start of its band, by R(-s), it looks like a key of the model's first 2,048 positions,
wherever it stands. So one A, B, k_mean and step of a layer's KV head serve every band, and a
token's code depends on its key and position alone:

    x = (R(-s) k - k_mean) A                        q.k ~ (R(-s) q).k_mean + ((R(-s) q) B).x

The turn is orthogonal and both sides make it, so that the scores are those of the keys themselves
even where a model's rope is another. A and B are those of `basis`, of moments that the model's keys
and queries have before RoPE, in closed form: M stands for the mean of k k^T or q q^T, and R(p) M
R(-p) is averaged over p evenly from 0 to the end of a band for keys, and to a million positions for
queries, which meet keys at every distance.

    mean over p of e^(i w p), 0 <= p <= P   =   e^(i w P / 2) sin(w P / 2) / (w P / 2)

Source: measured in docs/log/sketch.md.
"""

from typing import NamedTuple

import torch

from attnplug.ops.common.define import require
from attnplug.ops.sketch.basis import Quantizer, directions, weighed
from attnplug.ops.sketch.state import COORDINATES, coordinates

BAND = 2048  # positions
SPAN = 1 << 20  # positions from a band's start to a query, at most
RIDGE = 0.1  # of the queries' moment, as in `fit_basis`


def size_for(width: int) -> int:
    """Bytes of a token's code: 32, or 24 for heads that have too few channels for these."""
    return 32 if sum(COORDINATES[32]) <= width else 24


class Moments(NamedTuple):
    """Means over a layer's tokens, of keys and queries before RoPE, float64."""

    k_mean: torch.Tensor  # [Hkv, D]
    k_pairs: torch.Tensor  # [Hkv, D, D], of k k^T
    q_pairs: torch.Tensor  # [Hq, D, D], of q q^T


class ModelBasis(NamedTuple):
    """What makes codes of a layer's keys and scores of codes, float32."""

    encoder: torch.Tensor  # [Hkv, D + 1, r]: (R(-s) k, 1) @ encoder is x in steps of its code
    scorer: torch.Tensor  # [Hkv, D, r + 1]: (R(-s) q) @ scorer is the codes' weights, and an offset


def fit_model_basis(
    moments: Moments, inv_freq: torch.Tensor, *, size: int | None = None
) -> ModelBasis:
    """The basis of a layer.

    Args:
        moments: of a text's tokens, queries of as many heads as a multiple of the KV heads.
        inv_freq: float `[P]`, radians a position of the pairs (d, P + d) of channels; channels from
            2 P on do not turn.
        size: bytes a token: 16, 24 or 32. None: `size_for` the head dimension.

    Raises:
        ArgumentError: `size`, `inv_freq` or the numbers of heads do not fit.
    """
    heads, width = moments.k_mean.shape
    name = "fit_model_basis"
    counts = coordinates(name, size_for(width) if size is None else size, width)
    code = Quantizer.of(*counts, moments.k_mean.device)
    check_frequencies(name, inv_freq, width)
    groups = len(moments.q_pairs) // heads
    fits = groups > 0 and groups * heads == len(moments.q_pairs)
    require(fits, name, f"{len(moments.q_pairs)} query heads are no multiple of {heads} KV heads")
    pairs = _Pairs.of(inv_freq, width)
    k_mean = pairs.mean_turned(moments.k_mean, BAND)
    cov_k = pairs.pairs_turned(moments.k_pairs, BAND) - k_mean[:, :, None] * k_mean[:, None]
    asked = pairs.pairs_turned(moments.q_pairs, SPAN).unflatten(0, (heads, groups))
    a, b, deviation = directions(cov_k, weighed(cov_k[None], asked[None])[0], len(code.most), RIDGE)
    level, step = -code.clip * deviation, 2 * code.clip * deviation / code.most
    encoder = a / step[:, None]
    bias = -(k_mean[:, None] @ encoder)[:, 0] - level / step
    offset = k_mean + (b @ level[..., None])[..., 0]
    maps = (
        torch.cat((encoder, bias[:, None]), 1),
        torch.cat((b * step[:, None], offset[..., None]), 2),
    )
    return ModelBasis(*(x.float().contiguous() for x in maps))


def check_frequencies(name: str, inv_freq: torch.Tensor, width: int) -> None:
    """Raise ArgumentError unless they are of pairs of channels that a head of this width has."""
    fits = inv_freq.dim() == 1 and 2 * len(inv_freq) <= width
    found = f"inv_freq has shape {tuple(inv_freq.shape)}"
    require(fits, name, f"{found}, needs [P], at most half the head dimension {width}")


def turn(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """R(angles) x: the pairs (d, P + d) of `x [..., N, D]`, turned by `angles [N, P]` radians."""
    count = angles.shape[-1]
    left, right, rest = x.split((count, count, x.shape[-1] - 2 * count), -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), -1)


def back_to_start(inv_freq: torch.Tensor, bands: int) -> torch.Tensor:
    """The angles `[bands, P]`, float64, of R(-s) for the bands from the first on: in float32 an
    angle of a million radians would be off by a thirtieth."""
    starts = torch.arange(bands, device=inv_freq.device, dtype=torch.float64) * BAND
    return -starts[:, None] * inv_freq.double()


class _Pairs(NamedTuple):
    """The channels as complex numbers, those that do not turn among them."""

    order: torch.Tensor  # int64 [D]: first the left channels, then their partners
    frequency: torch.Tensor  # float64 [D / 2]

    @classmethod
    def of(cls, inv_freq: torch.Tensor, width: int) -> "_Pairs":
        count, device = len(inv_freq), inv_freq.device
        at = torch.arange(width, device=device)
        still = (width - 2 * count) // 2
        parts = at[:count], at[2 * count : 2 * count + still], at[count : 2 * count]
        order = torch.cat((*parts, at[2 * count + still :]))
        frequency = torch.zeros(width // 2, dtype=torch.float64, device=device)
        frequency[:count] = inv_freq
        return cls(order, frequency)

    def mean_turned(self, x: torch.Tensor, until: int) -> torch.Tensor:
        """The mean of R(p) x over 0 <= p <= until, of `x [..., D]`."""
        left, right = x[..., self.order].chunk(2, -1)
        z = torch.complex(left, right) * _mean_phase(self.frequency, until)
        return self._back(torch.cat((z.real, z.imag), -1), -1)

    def pairs_turned(self, m: torch.Tensor, until: int) -> torch.Tensor:
        """The mean of R(p) M R(-p), of symmetric matrices `[..., D, D]`."""
        m = m[..., self.order, :][..., self.order]
        (xx, xy), (yx, yy) = (x.chunk(2, -1) for x in m.chunk(2, -2))
        w = self.frequency
        # E z z^H and E z z^T turn by the difference and by the sum of two frequencies.
        h = torch.complex(xx + yy, yx - xy) * _mean_phase(w[:, None] - w, until)
        p = torch.complex(xx - yy, yx + xy) * _mean_phase(w[:, None] + w, until)
        top = torch.cat((h.real + p.real, p.imag - h.imag), -1)
        low = torch.cat((p.imag + h.imag, h.real - p.real), -1)
        return self._back(self._back(torch.cat((top, low), -2) / 2, -1), -2)

    def _back(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.empty_like(x).index_copy_(dim, self.order, x)


def _mean_phase(w: torch.Tensor, until: int) -> torch.Tensor:
    """The mean of e^(i w p) over 0 <= p <= until."""
    half = w * (until / 2)
    return torch.polar(torch.ones_like(half), half) * torch.sinc(half / torch.pi)
