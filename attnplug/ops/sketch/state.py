"""What `sketch` keeps beside a KV cache: the codes of its tokens, and the basis that they are in.

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

from collections.abc import Sequence
from typing import NamedTuple

import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import why_not_width
from attnplug.ops.common.define import require

BLOCK, CHUNK = 128, 32
CLIPS = {4: 3.64, 2: 1.49}  # standard deviations
COORDINATES = {16: (16, 32), 24: (32, 32), 32: (32, 64)}  # bytes: of 4 bits, of 2 bits
SAMPLE = 16384  # tokens of a row that `fit_basis` reads at most, evenly spaced
PIECE = 256  # tokens whose products are summed in float32, the sums of pieces in float64
TURNS = 8  # of the subspace iteration, each by the square of the matrix
FLOOR = 1e-6  # added to its eigenvalues, in parts of their sum: what is smaller has no order
STEP_ROWS = 1 << 16  # tokens, of all rows and KV heads, that it widens to float32 at a time


class Codes(NamedTuple):
    """The codes of a cache and what they cover; contiguous, of a fixed shape."""

    fine: torch.Tensor  # uint8 [B, Hkv, S, r4 / 2]: coordinates i and r4 / 2 + i in byte i
    coarse: torch.Tensor  # uint8 [B, Hkv, S, r2 / 4]: coordinate (r2 / 4) j + i at bit 2 j, byte i
    odd: torch.Tensor  # uint8 [B, Hkv, ceil(S / 32)]: a key or value of 32 tokens is not finite
    progress: torch.Tensor  # int32 [B, 2]: leading blocks that are done, the start they count from


class Basis(NamedTuple):
    """What makes codes of keys and scores of codes, float32, contiguous."""

    encoder: torch.Tensor  # [B, Hkv, D + 1, r]: (k, 1) @ encoder is x in steps of its code
    queries: torch.Tensor  # [B, Hkv, D, 2 r + 2 + D]: what `prepare_query` makes of a query
    v_mean: torch.Tensor  # [B, Hkv, D]


def coordinates(name: str, size: int, width: int) -> tuple[int, int]:
    """(coordinates of 4 bits, of 2 bits) of codes of `size` bytes, for a head dimension."""
    if size not in COORDINATES:
        raise ArgumentError(f"{name}: bytes is {size}, needs {', '.join(map(str, COORDINATES))}")
    fine, coarse = COORDINATES[size]
    require(
        fine + coarse <= width,
        name,
        f"bytes is {size}, {fine + coarse} coordinates, more than the head dimension {width}",
    )
    return fine, coarse


def empty_codes(k: torch.Tensor, size: int) -> Codes:
    """Codes of `size` bytes a token for a fresh cache `k [B, Hkv, S, D]`: none is done."""
    batch, heads, tokens, width = k.shape
    fine, coarse = coordinates("empty_codes", size, width)
    return Codes(
        k.new_zeros((batch, heads, tokens, fine // 2), dtype=torch.uint8),
        k.new_zeros((batch, heads, tokens, coarse // 4), dtype=torch.uint8),
        k.new_zeros((batch, heads, -(-tokens // CHUNK)), dtype=torch.uint8),
        k.new_zeros((batch, 2), dtype=torch.int32),
    )


def empty_basis(k: torch.Tensor, size: int) -> Basis:
    """A basis of zeros for codes of `size` bytes a token of a cache `k [B, Hkv, S, D]`."""
    rows, width = k.shape[:2], k.shape[3]
    rank = sum(coordinates("empty_basis", size, width))
    shapes = (width + 1, rank), (width, 2 * rank + 2 + width), (width,)
    return Basis(*(k.new_zeros((*rows, *shape), dtype=torch.float32) for shape in shapes))


class Fit(NamedTuple):
    """What one basis is made of, as in `fit_basis`."""

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    lengths: torch.Tensor | None = None
    start: torch.Tensor | None = None
    key_mask: torch.Tensor | None = None


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

    Moments are of at most 16,384 tokens of a row, evenly spaced. Tokens that are not finite are
    left out; so is a row's first block, the sink, where there are at least two more. A row without
    tokens gives finite numbers, and queries of zeros the principal directions of the keys. All is
    made on the keys' device, and the host never waits for it.

    Raises:
        ArgumentError: `size` or a head dimension does not fit.
    """
    fit = Fit(keys, values, queries, lengths, start, key_mask)
    return fit_bases([fit], size=size, ridge=ridge)[0]


def fit_bases(fits: Sequence[Fit], *, size: int = 24, ridge: float = 0.1) -> list[Basis]:
    """`fit_basis` of several caches on one device, whose rows and heads are as many, such as a
    model's layers'. Their matrices are decomposed in one batch."""
    device, width = fits[0].keys.device, fits[0].keys.shape[3]
    unserved = why_not_width(width)
    require(not unserved, "fit_basis", unserved)
    code = _Code.of(*coordinates("fit_basis", size, width), device)
    # Without autocast, which would round the moments.
    with torch.autocast(device.type, enabled=False):
        seen = [_Seen.of(fit) for fit in fits]
        cov_k, cov_q = (torch.stack([getattr(x, of) for x in seen]) for of in ("cov_k", "cov_q"))
        found = _directions(cov_k, cov_q, code.rank, ridge)
        coded = [
            _coded(fit, each, code, *parts)
            for fit, each, *parts in zip(fits, seen, *found, strict=True)
        ]
        roots = _roots(
            *(torch.stack([getattr(x, of) for x in coded]) for of in ("mean_x", "cov_xx"))
        )
        return [
            Basis(each.encoder, _query_map(of, each, root), of.v_mean.float().contiguous())
            for of, each, root in zip(seen, coded, roots, strict=True)
        ]


class _Code(NamedTuple):
    """The code of each coordinate."""

    most: torch.Tensor  # float64 [r], its largest code
    clip: torch.Tensor  # float64 [r], in standard deviations

    @classmethod
    def of(cls, fine: int, coarse: int, device: torch.device) -> "_Code":
        # Made there: a copy from the host's pageable memory would wait for the device.
        is_fine = torch.arange(fine + coarse, device=device) < fine

        def either(of_fine: float, of_coarse: float) -> torch.Tensor:
            return is_fine.double() * (of_fine - of_coarse) + of_coarse

        return cls(either(15.0, 3.0), either(CLIPS[4], CLIPS[2]))

    @property
    def rank(self) -> int:
        return len(self.most)


class _Seen(NamedTuple):
    """What a cache's tokens and queries are like, float64 on its device."""

    tokens: tuple[torch.Tensor, torch.Tensor]  # as `_sampled` has them
    k_mean: torch.Tensor  # [B, Hkv, D]
    v_mean: torch.Tensor
    cov_k: torch.Tensor  # [B, Hkv, D, D]
    cov_q: torch.Tensor  # the queries' second moment, of a mean eigenvalue of 1

    @classmethod
    def of(cls, fit: Fit) -> "_Seen":
        tokens = _sampled(fit.keys, fit.lengths, fit.start, fit.key_mask)
        k_mean, v_mean, cov_k = _moments(fit.keys, fit.values, *tokens)
        return cls(tokens, k_mean, v_mean, cov_k, _query_moment(cov_k, fit.queries))


class _Coded(NamedTuple):
    """A cache in its coordinates, on its device."""

    encoder: torch.Tensor  # of `Basis`
    b: torch.Tensor  # [B, Hkv, D, r]
    level: torch.Tensor  # [B, Hkv, r], the coordinate where the code is 0
    step: torch.Tensor  # and a code's step
    mean_x: torch.Tensor
    cov_xx: torch.Tensor
    cov_xv: torch.Tensor


def _coded(fit, seen, code, a, b, deviation):
    most, reach = code.most, code.clip * deviation
    level, step = -reach, 2 * reach / most
    inverse = a / step[..., None, :]
    bias = -(seen.k_mean[..., None, :] @ inverse)[..., 0, :] - level / step
    encoder = torch.cat([inverse, bias[..., None, :]], -2).float().contiguous()
    moments = _coded_moments(
        fit.keys, fit.values, *seen.tokens, encoder, level, step, most, seen.v_mean
    )
    return _Coded(encoder, b, level, step, *moments)


def _sampled(keys, lengths, start, key_mask):
    """The tokens that moments are of, int64 `[B, n]`, and bool `[B, n]`, which of them count."""
    batch, tokens = keys.shape[0], keys.shape[2]
    rows = torch.zeros((batch, 1), dtype=torch.long, device=keys.device)
    low = rows if start is None else rows + start.long().clamp(min=0)[:, None]
    end = rows + tokens if lengths is None else rows + lengths.long().clamp(max=tokens)[:, None]
    first = torch.where(end - low >= 3 * BLOCK, low + BLOCK, low)
    count = (end - first).clamp(min=0)
    most = min(-(-tokens // PIECE) * PIECE, SAMPLE)
    place = torch.arange(most, device=keys.device)[None]
    at = first + torch.where(count > most, place * count // most, place)
    weight = at < end
    at = at.clamp(max=tokens - 1)
    return at, weight if key_mask is None else weight & key_mask.gather(1, at)


def _parts(keys, values, at, weight):
    """(keys, values, weight) of some tokens at a time, float32, `[B, Hkv, n, D]` and `[..., n]`;
    what is not to count is 0."""
    step = max(1, STEP_ROWS // (keys.shape[0] * keys.shape[1] * PIECE)) * PIECE
    for first in range(0, at.shape[1], step):
        part = slice(first, first + step)
        place = at[:, None, part, None].expand(-1, keys.shape[1], -1, keys.shape[3])
        k, v = keys.gather(2, place).float(), values.gather(2, place).float()
        counts = weight[:, None, part] & k.isfinite().all(-1) & v.isfinite().all(-1)
        yield (
            k.masked_fill(~counts[..., None], 0.0),
            v.masked_fill(~counts[..., None], 0.0),
            counts.float(),
        )


def _moments(keys, values, at, weight):
    """Means of keys and values and the covariance of keys, float64."""
    shape = (*keys.shape[:2], keys.shape[3])
    k_sum, v_sum = (keys.new_zeros(shape, dtype=torch.float64) for _ in range(2))
    count = keys.new_zeros(shape[:2], dtype=torch.float64)
    for k, v, counts in _parts(keys, values, at, weight):
        k_sum += k.sum(2, dtype=torch.float64)
        v_sum += v.sum(2, dtype=torch.float64)
        count += counts.sum(2, dtype=torch.float64)
    count = count.clamp(min=1)[..., None]
    k_mean, v_mean = k_sum / count, v_sum / count
    cov = keys.new_zeros((*shape, shape[2]), dtype=torch.float64)
    for k, _, counts in _parts(keys, values, at, weight):
        centred = (k - k_mean.float()[:, :, None]) * counts[..., None]
        cov += _product(centred, centred)
    return k_mean, v_mean, cov / count[..., None]


def _product(a, b):
    """The sum over tokens of a b^T, of `[B, Hkv, n, r]` and `[B, Hkv, n, D]`: n is whole pieces,
    which a GPU takes side by side."""
    left, right = (x.unflatten(2, (-1, PIECE)) for x in (a, b))
    return (left.mT @ right).sum(2, dtype=torch.float64)


def _query_moment(cov_k, queries):
    """The second moment of queries `[B, Hq, N, D]`, each head's by how much its scores vary, or
    the heads with long queries would decide alone; the identity where all are 0."""
    q = queries.float().nan_to_num(0.0, 0.0, 0.0).unflatten(1, (cov_k.shape[1], -1))
    c_g = (q.transpose(3, 4) @ q).double() / q.shape[3]
    variance = torch.einsum("bhgde,bhed->bhg", c_g, cov_k)
    largest = variance.amax(-1, keepdim=True).clamp(min=1e-30)
    c = (c_g / torch.maximum(variance, 1e-12 * largest)[..., None, None]).sum(2)
    mean = c.diagonal(dim1=-2, dim2=-1).mean(-1)
    plain = (mean > 0) & mean.isfinite()
    eye = torch.eye(c.shape[-1], dtype=torch.float64, device=c.device)
    return torch.where(plain[..., None, None], c / mean.where(plain, 1.0)[..., None, None], eye)


def _directions(cov_k, cov_q, rank, ridge):
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


def _coded_moments(keys, values, at, weight, encoder, level, step, most, v_mean):
    """Mean of x^, its covariance, and that with the values, float64."""
    rank = level.shape[-1]
    shape = (*keys.shape[:2], rank)
    x_sum = keys.new_zeros(shape, dtype=torch.float64)
    xx = keys.new_zeros((*shape, rank), dtype=torch.float64)
    xv = keys.new_zeros((*shape, keys.shape[3]), dtype=torch.float64)
    count = keys.new_zeros(shape[:2], dtype=torch.float64)
    for k, v, counts in _parts(keys, values, at, weight):
        code = (k @ encoder[..., :-1, :] + encoder[..., -1:, :] + 0.5).floor()
        code = torch.minimum(code.clamp(min=0), most.float())
        x = (level.float()[..., None, :] + code * step.float()[..., None, :]) * counts[..., None]
        x_sum += x.sum(2, dtype=torch.float64)
        xx += _product(x, x)
        xv += _product(x, (v - v_mean.float()[:, :, None]) * counts[..., None])
        count += counts.sum(2, dtype=torch.float64)
    count = count.clamp(min=1)[..., None]
    mean = x_sum / count
    # Coordinates are near to centred: nothing cancels here.
    cov = xx / count[..., None] - mean[..., :, None] * mean[..., None, :]
    return mean, cov, xv / count[..., None]


def _roots(mean_x, cov_xx):
    """Components of covariances `[..., r, r]`, whose squares add up to them: Cholesky's factors, in
    units of each coordinate's root mean square, of which 1e-3 is added to the variances. So a
    coordinate that does not vary cannot end the factor, nor products rounded to TF32."""
    unit = (cov_xx.diagonal(dim1=-2, dim2=-1) + mean_x.square()).clamp(min=0).sqrt()
    unit = unit.clamp(min=1e-300)
    return unit[..., None] * _cholesky(cov_xx / unit[..., None] / unit[..., None, :], 1e-3)


def _query_map(seen, coded, root):
    """What a query is multiplied by, `[B, Hkv, D, 2 r + 2 + D]`: the weights of the codes, the
    score where all codes are 0, the mean score, components whose squares add up to the scores'
    variance, and the covariance of values and score."""
    b = coded.b
    offset = seen.k_mean + (b @ coded.level[..., None])[..., 0]
    mean = seen.k_mean + (b @ coded.mean_x[..., None])[..., 0]
    weights = b * coded.step[..., None, :]
    parts = [weights, offset[..., None], mean[..., None], b @ root, b @ coded.cov_xv]
    return torch.cat(parts, -1).float().contiguous()
