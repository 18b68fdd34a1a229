"""The basis of `sketch`'s codes, of what a cache's keys, values and last queries are like.

The keys of a KV head in the coordinates that its queries weigh, the best rank r for E (q.k)^2:

    C_k = Cov(k)      C = sum_g C_g / tr(C_g C_k),  C_g = mean over queries of head g of q q^T
    C + ridge (tr C / D) I = L L^T      L^T C_k L = W S W^T, S descending
    A = L W_r      B = L^-T W_r         q.k ~ q.k_mean + (q B).((k - k_mean) A)

W_r is found by subspace iteration, which is products and Cholesky factors of all layers' matrices
in one batch: a GPU's eigensolvers take such matrices one after the other, and the host waits. A
coordinate x has the standard deviation sqrt(S); the leading ones are rounded to 4 bits, clipped at
3.64 of it, the others to 2 bits, clipped at 1.49. What the codes stand for is called x^ here.
Sources: Loki (Singhania et al., arXiv:2406.02542) for low-rank keys; Golub and Van Loan, Matrix
Computations, 8.2.4, for the iteration; the weighing by queries, the bits, the clips and the number
of turns are measured (docs/log/sketch.md).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from attnplug.ops.common.checks import why_not_width
from attnplug.ops.common.define import require
from attnplug.ops.sketch.state import BLOCK, Basis, coordinates

CLIPS = {4: 3.64, 2: 1.49}  # standard deviations
SAMPLE = 8192  # tokens of a row that `fit_basis` reads at most, evenly spaced
PIECE = 256  # tokens whose products are summed in float32, the sums of pieces in float64
AT_ONCE = 1 << 19  # tokens, of all layers, rows and KV heads, that are widened to float32 together
TURNS = 8  # of the subspace iteration, each by the square of the matrix
FLOOR = 1e-6  # added to its eigenvalues, in parts of their sum: what is smaller has no order


class Fit(NamedTuple):
    """What one basis is made of, as in `fit_basis`."""

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    lengths: torch.Tensor | None = None
    start: torch.Tensor | None = None
    key_mask: torch.Tensor | None = None

    def rows(self, first: int, until: int) -> "Fit":
        """Some of the rows."""
        parts = (x if x is None or len(x) == 1 else x[first:until] for x in self[3:])
        return Fit(*(x[first:until] for x in self[:3]), *parts)

    def first(self) -> torch.Tensor:
        """The first real token of each row, int64 `[B]`."""
        zeros = torch.zeros(len(self.keys), dtype=torch.long, device=self.keys.device)
        return zeros if self.start is None else zeros + self.start.clamp(min=0)

    def end(self) -> torch.Tensor:
        """One past the last valid token of each row, int64 `[B]`."""
        rows, size = self.keys.shape[0], self.keys.shape[2]
        full = torch.full((rows,), size, dtype=torch.long, device=self.keys.device)
        return full if self.lengths is None else torch.minimum(full, self.lengths.long())


def fit_basis(
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
    *,
    size: int = 24,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    ridge: float = 0.1,
) -> Basis:
    """The basis of each row and KV head.

    Args:
        keys, values: `[B, Hkv, S, D]`, the cache, keys as attention sees them (after RoPE).
        queries: `[B, Hq, N, D]`, queries like those to come: the prompt's last, or a calibration's.
        size: bytes a token: 16, 24 or 32.
        lengths, start: `[1]` or `[B]`, valid tokens and first real token of a row.
        key_mask: bool `[B, S]`, False where a key must not be seen.
        ridge: of the queries' second moment, in parts of its mean eigenvalue.

    Moments are of at most 8,192 tokens of a row, evenly spaced. Tokens that are not finite are
    left out; so is a row's first block, the sink, where there are at least two more. A row without
    tokens gives finite numbers, and queries of zeros the principal directions of the keys. All is
    made on the keys' device, and the host never waits for it.

    Raises:
        ArgumentError: `size` or a head dimension does not fit.
    """
    fit = Fit(keys, values, queries, lengths, start, key_mask)
    return fit_bases([fit], size=size, ridge=ridge)[0]


@torch.no_grad()
def fit_bases(fits: Sequence[Fit], *, size: int = 24, ridge: float = 0.1) -> list[Basis]:
    """`fit_basis` of several caches that have the same shape, dtype and device, except that their
    lengths may differ, such as the layers of a model. Their rows are fitted together, because a GPU
    takes about as long for one row as for many."""
    keys = fits[0].keys
    unserved = why_not_width(keys.shape[3])
    require(not unserved, "fit_basis", unserved)
    code = Quantizer.of(*coordinates("fit_basis", size, keys.shape[3]), keys.device)
    # Without autocast, which would round the moments.
    with torch.autocast(keys.device.type, enabled=False):
        found = [_fitted(rows, code, ridge) for rows in _together(fits)]
    whole = (torch.cat(parts).split(len(keys)) for parts in zip(*found, strict=True))
    return [Basis(*(x.contiguous() for x in parts)) for parts in zip(*whole, strict=True)]


def _together(fits: Sequence[Fit]) -> Iterator[list[Fit]]:
    """The rows of all caches in their order, as many at a time as `AT_ONCE` has room for."""
    heads, tokens = fits[0].keys.shape[1], max(fit.keys.shape[2] for fit in fits)
    room = max(1, AT_ONCE // (heads * _most(tokens)))
    group: list[Fit] = []
    taken = 0
    for fit in fits:
        for first in range(0, len(fit.keys), room):
            part = fit.rows(first, first + room)
            if taken + len(part.keys) > room:
                yield group
                group, taken = [], 0
            group.append(part)
            taken += len(part.keys)
    yield group


class Quantizer(NamedTuple):
    """The code of each coordinate."""

    most: torch.Tensor  # float64 [r], its largest code
    clip: torch.Tensor  # float64 [r], in standard deviations

    @classmethod
    def of(cls, fine: int, coarse: int, device: torch.device) -> "Quantizer":
        # Made there: a copy from the host's pageable memory would wait for the device.
        is_fine = torch.arange(fine + coarse, device=device) < fine

        def either(of_fine: float, of_coarse: float) -> torch.Tensor:
            return is_fine.double() * (of_fine - of_coarse) + of_coarse

        return cls(either(15.0, 3.0), either(CLIPS[4], CLIPS[2]))


def _fitted(fits: list[Fit], code: Quantizer, ridge: float) -> Basis:
    """The basis of the rows of several caches, R rows in all."""
    k, v, counts = _sampled(fits)
    total = counts.sum(2, dtype=torch.float64).clamp(min=1)[..., None]  # [R, Hkv, 1]
    k_mean, v_mean = (_sums(x) / total for x in (k, v))
    for x, mean in ((k, k_mean), (v, v_mean)):  # what does not count stays 0
        x.addcmul_(counts[..., None], mean.float()[:, :, None], value=-1)
    cov_k = _product(k, k) / total[..., None]
    cov_q = _query_moment(cov_k, torch.cat([fit.queries for fit in fits]))
    a, b, deviation = directions(cov_k, cov_q, len(code.most), ridge)
    level, step = -code.clip * deviation, 2 * code.clip * deviation / code.most
    encoder = a / step[..., None, :]
    # The codes, less the constant `level`, which the centred values take away.
    x = (k @ encoder.float()).add_((0.5 - level / step).float()[..., None, :]).floor_()
    x = torch.minimum(x.clamp_(min=0), code.most.float())
    cov_xv = step[..., None] * _product(x, v) / total[..., None]
    bias = -(k_mean[..., None, :] @ encoder)[..., 0, :] - level / step
    offset = k_mean + (b @ level[..., None])[..., 0]
    scores = [b * step[..., None, :], offset[..., None], k_mean[..., None]]
    scores += [b * deviation[..., None, :], b @ cov_xv]
    maps = torch.cat([encoder, bias[..., None, :]], -2), torch.cat(scores, -1), v_mean
    return Basis(*(x.float() for x in maps))


def _most(tokens: int) -> int:
    """How many tokens are read of a row at most: whole pieces."""
    return min(-(-tokens // PIECE) * PIECE, SAMPLE)


def _sampled(fits: list[Fit]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(keys, values, counts) of the tokens that the moments are taken over: float32 `[R, Hkv, n,
    D]` twice, and `[R, Hkv, n]`, 1 where a token counts. Keys and values that do not count are
    0."""
    keys = fits[0].keys
    device, (_, heads, _, width) = keys.device, keys.shape
    rows, sizes = sum(len(fit.keys) for fit in fits), [fit.keys.shape[2] for fit in fits]
    low = torch.cat([fit.first() for fit in fits])[:, None]
    end = torch.cat([fit.end() for fit in fits])[:, None]
    first = torch.where(end - low >= 3 * BLOCK, low + BLOCK, low)
    count, most = (end - first).clamp(min=0), _most(max(sizes))
    place = torch.arange(most, device=device)[None]
    at = first + torch.where(count > most, place * count // most, place)
    weight = at < end
    k, v = (keys.new_empty((rows, heads, most, width)) for _ in range(2))
    row = 0
    for fit in fits:
        part = slice(row, row + len(fit.keys))
        index = at[part].clamp(max=fit.keys.shape[2] - 1)
        if fit.key_mask is not None:
            weight[part] &= fit.key_mask.gather(1, index)
        index = index[:, None, :, None].expand(-1, heads, -1, width)
        for found, of in ((k, fit.keys), (v, fit.values)):
            torch.gather(of, 2, index, out=found[part])
        row = part.stop
    # A sum over the channels is finite where all of them are, up to what float32 holds.
    sums = k.sum(-1, dtype=torch.float32) + v.sum(-1, dtype=torch.float32)
    counts = weight[:, None] & sums.isfinite()
    hidden = ~counts[..., None]
    k, v = (x.masked_fill_(hidden, 0.0).float() for x in (k, v))
    return k, v, counts.float()


def _sums(x):
    """Sums over the tokens of `[R, Hkv, n, D]`, float64."""
    return x.unflatten(2, (-1, PIECE)).sum(3).sum(2, dtype=torch.float64)


def _product(a, b):
    """The sum over tokens of a b^T, of `[R, Hkv, n, r]` and `[R, Hkv, n, D]`, float64: pieces are
    products of their own, which a GPU takes side by side."""
    left, right = (x.unflatten(2, (-1, PIECE)) for x in (a, b))
    return (left.mT @ right).sum(2, dtype=torch.float64)


def _query_moment(cov_k, queries):
    """`weighed` of the second moments of queries `[B, Hq, N, D]`."""
    q = queries.float().nan_to_num(0.0, 0.0, 0.0).unflatten(1, (cov_k.shape[1], -1))
    return weighed(cov_k, (q.transpose(3, 4) @ q).double() / q.shape[3])


def weighed(cov_k: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """The second moments of a group's queries `[B, Hkv, G, D, D]` as one `[B, Hkv, D, D]`, each
    head's by how much its scores vary with keys of covariance `cov_k`, or the heads with long
    queries would decide alone; the identity where all are 0."""
    variance = torch.einsum("bhgde,bhed->bhg", moments, cov_k)
    largest = variance.amax(-1, keepdim=True).clamp(min=1e-30)
    c = (moments / torch.maximum(variance, 1e-12 * largest)[..., None, None]).sum(2)
    mean = c.diagonal(dim1=-2, dim2=-1).mean(-1)
    plain = (mean > 0) & mean.isfinite()
    eye = torch.eye(c.shape[-1], dtype=torch.float64, device=c.device)
    return torch.where(plain[..., None, None], c / mean.where(plain, 1.0)[..., None, None], eye)


def directions(cov_k, cov_q, rank, ridge):
    """A `[..., D, r]`, B alike, and the standard deviations of the coordinates `[..., r]`, of
    matrices `[..., D, D]`."""
    lower = _cholesky(cov_q, ridge)
    variance, vectors = leading_directions(lower.mT @ cov_k @ lower, rank)
    # A coordinate that does not vary has codes of no meaning, and a step that keeps it finite.
    smallest = (1e-6 * variance[..., :1].sqrt()).clamp(min=1e-12)
    b = torch.linalg.solve_triangular(lower.mT, vectors, upper=True)
    return lower @ vectors, b, torch.maximum(variance.sqrt(), smallest)


def leading_directions(m: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(eigenvalues `[..., rank]`, orthonormal eigenvectors `[..., D, rank]`) of the largest
    eigenvalues of symmetric matrices `m [..., D, D]` without negative ones, float64, about
    descending. Neighbours whose eigenvalues are nearly equal may be mixed, and the eigenvalue is
    what `m` has in the direction that was found.

    Subspace iteration, X <- orthonormal(M^2 X): the part of a wrong direction falls by the square
    of the ratio of the eigenvalues at each turn. Nothing waits for the device."""
    width = m.shape[-1]
    eye = torch.eye(width, dtype=m.dtype, device=m.device)
    total = m.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp(min=1e-300)
    shifted = m / total + FLOOR * eye
    square = shifted @ shifted
    # Columns that are unlike one another and like no axis, as eigenvectors are in neither.
    at = torch.arange(1, width + 1, dtype=m.dtype, device=m.device)
    x = torch.cos(2.39996 * at[:, None] * at[None, :rank])
    for _ in range(TURNS):
        x = _orthonormal(square @ x)
    x = _orthonormal(x)
    return ((m @ x) * x).sum(-2).clamp(min=0), x


def _orthonormal(x):
    """The columns of `[..., D, r]` made orthonormal from the first to the last, by Cholesky's
    factor of their products. Columns of one length first: the factor is as good as they are
    unlike."""
    x = x / x.norm(dim=-2, keepdim=True).clamp(min=1e-300)
    upper = _cholesky(x.mT @ x, 1e-15 * x.shape[-1]).mT
    return torch.linalg.solve_triangular(upper, x, upper=True, left=False)


def _cholesky(matrix, ridge):
    """The lower factor of `matrix + ridge I`, not checked, as the host would wait for that."""
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.cholesky_ex(matrix + ridge * eye, check_errors=False)[0]
