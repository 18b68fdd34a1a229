"""dense: exact attention, by the fastest kernel for the shape at hand.

Prefill is torch's scaled_dot_product_attention where that is exact (no softcap, no sinks, the whole
sequence at once). Else it is attnplug's own flash kernel, which reads lengths and padding on the
device. Decode is `dense_decode`, which reads only the valid part of a static cache.
"""

import dataclasses
import sys
from typing import Any, ClassVar

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from attnplug.call import AttentionCall, LatentCall, LayerShape, PagedCall, causal_mask
from attnplug.errors import UnsupportedCallError
from attnplug.models.sync import may_sync
from attnplug.ops import dense_decode, query_sparse_attention
from attnplug.ops.common.checks import WIDE_HEAD_DIMS
from attnplug.policies._absorbed import attend_absorbed, attend_expanded, expanded_width
from attnplug.policies.paged import PagedPhase

# Up to this many queries (speculative verification) splitting the keys over the GPU beats a
# program per query tile.
MAX_DECODE_QUERIES = 16

# The flash kernel has a program for each head and so many queries. Where these are fewer than half
# of an H200's multiprocessors, a few queries over a long cache, splitting the keys uses the others.
TILE_QUERIES, FEW_PROGRAMS, FEW_QUERIES = 128, 66, 256

FLASH_WIDTH = 256  # head dimensions that torch's flash kernels have

# From so many tokens on, each row of a padded prefill is worth a call of torch's SDPA of its own,
# without a mask, and up to so many masked tokens behind a row's first a call each. Not measured.
ROW_TOKENS = 8192
MOST_HOLES = 16

LATENT_SLAB = 4096  # queries whose latents are there at a time


@dataclasses.dataclass(frozen=True)
class Dense(PagedPhase):
    """Exact causal attention, softmax(scale q k^T) v, for prefill and decode."""

    name: ClassVar[str] = "dense"
    phases: ClassVar[frozenset[str]] = frozenset({"prefill", "decode"})
    head_dims: ClassVar[tuple[int, ...]] = WIDE_HEAD_DIMS

    def query_grid(self) -> int:
        return 1

    def refusal(self, shape: LayerShape) -> str | None:
        return None if shape.reads_latents else super().refusal(shape)

    def note(self, shape: LayerShape) -> str:
        return f"keeps latents, {shape.latent:,} numbers a token" if shape.reads_latents else ""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        queries = call.q.shape[2]
        plain = call.whole and call.softcap == 0.0 and call.sinks is None
        if plain and call.key_mask is None:
            return _decode(call) if known_below(queries, 2) else _sdpa(call, None)
        if known_below(queries, MAX_DECODE_QUERIES + 1) or _leaves_a_gpu_idle(call):
            return _decode(call)
        looks = plain and may_sync(call.q.is_cuda)
        rows = _row_by_row(call) if looks and not known_below(queries, ROW_TOKENS) else None
        if rows is not None:
            return rows
        if plain and call.q.device.type == "cpu":
            return _sdpa(call, causal_mask(call))
        return _flash(call)

    def attend_all_latents(self, call: LatentCall) -> torch.Tensor:
        """A step, and a few queries over a longer cache, read the latents as they lie; keys and
        values are expanded for a prompt, and for so many queries that it is less work."""
        call.served_by, width = self.name, expanded_width(call)
        least = 2 if call.whole else _expanding_pays(call)
        if width is None or known_below(call.q.shape[2], least):
            return attend_absorbed(call, LATENT_SLAB)
        return attend_expanded(call, width, self.attend)

    def attend_pages(self, call: PagedCall) -> torch.Tensor:
        where: dict[str, Any] = {"table": call.table, "lengths": call.lengths}
        out, _ = dense_decode(call.q, call.k, call.v, **call.options, **where)
        return out


def exporting() -> bool:
    """`torch.compiler.is_exporting()`, which torch 2.11 answers by True wherever dynamo traces."""
    return torch.compiler._is_exporting_flag


def known_below(tokens: int, limit: int) -> bool:
    """Whether a number of tokens is below a limit. False for the open length of a program that
    torch.export makes: it must serve all lengths, so that none may be asked for."""
    if exporting():
        return statically_known_true(tokens < limit)
    return bool(tokens < limit)


def known_from(tokens: int, limit: int) -> bool:
    """Whether a number of tokens is at least a limit. False for an open length, as above."""
    if exporting():
        return statically_known_true(tokens >= limit)
    return bool(tokens >= limit)


def check_open_length(method: str, tokens: int, query_block: int) -> None:
    """Raise UnsupportedCallError for a program of torch.export whose open length may be one block
    of queries: to torch, a size that may be 1 is another program."""
    if exporting() and not statically_known_true(tokens > query_block):
        raise UnsupportedCallError(
            f"torch.export: {method} needs more than one block of {query_block} queries in a "
            f"program; declare the length as torch.export.Dim(name, min={query_block + 1})"
        )


def _expanding_pays(call: LatentCall) -> int:
    """From how many queries over a longer cache on it is fewer products to expand the cache than
    to meet latents, which are wider than keys and values: R (D + Dv) a token of the cache against
    2 R - D - Dv a query and token."""
    expanded, latent = call.up.shape[1:]
    saved = 2 * latent - expanded
    return -(-latent * expanded // saved) if saved > 0 else sys.maxsize


def _leaves_a_gpu_idle(call: AttentionCall) -> bool:
    """Whether the flash kernel would have few programs, each of which reads a long cache alone."""
    batch, heads, queries, _ = call.q.shape
    if call.whole or not call.q.is_cuda:
        return False
    few = FEW_PROGRAMS // max(1, batch * heads) * TILE_QUERIES
    return known_below(queries, min(few, FEW_QUERIES) + 1)


def _decode(call: AttentionCall) -> torch.Tensor:
    out, _ = dense_decode(call.q, call.k, call.v, sinks=call.sinks, **call.options)
    return out


def _row_by_row(call: AttentionCall) -> torch.Tensor | None:
    """A whole prefill with a key mask, each row by torch's causal kernel over its real tokens; None
    where the mask hides too many tokens behind a row's first. Looks at the mask on the host.

    A prompt that holds its pad token has a few such holes: transformers hides them, and their
    queries see the keys before them.
    """
    mask, size = call.key_mask, call.k.shape[2]
    assert mask is not None  # else there is nothing to leave out
    counted = torch.stack([mask.sum(-1), mask.to(torch.uint8).argmax(-1)], 1).tolist()
    if any(real and size - start - real > MOST_HOLES for real, start in counted):
        return None
    out = call.q.new_zeros(call.q.shape)
    for row, (real, start) in enumerate(counted):
        if real:
            alone = [x[row : row + 1, :, start:] for x in (call.q, call.k, call.v)]
            own = mask[row : row + 1, start:] if real < size - start else None
            out[row : row + 1, :, start:] = _row(call, alone, own)
    return out


def _row(call: AttentionCall, row: list[torch.Tensor], mask: torch.Tensor | None) -> torch.Tensor:
    """The output of one row from its first real token on; `mask` `[1,T]` is None without holes."""
    if mask is None:
        return _sdpa(dataclasses.replace(call, q=row[0], k=row[1], v=row[2], key_mask=None), None)
    q, k, v = row
    out, real = torch.empty_like(q), mask[0].nonzero()[:, 0]
    own = [x.index_select(2, real) for x in row]
    alone = dataclasses.replace(call, q=own[0], k=own[1], v=own[2], key_mask=None)
    out.index_copy_(2, real, _sdpa(alone, None))
    for hole in (~mask[0]).nonzero()[:, 0].tolist():
        seen = torch.full((1,), hole + 1, device=q.device, dtype=torch.int64)
        masked, _ = dense_decode(
            q[:, :, hole : hole + 1], k, v, scale=call.scale, lengths=seen, key_mask=mask
        )
        out[:, :, hole : hole + 1] = masked
    return out


def _sdpa(call: AttentionCall, mask: torch.Tensor | None) -> torch.Tensor:
    q, k, v = call.q, call.k, call.v
    groups = q.shape[1] // k.shape[1]
    # With a mask, or on a GPU in float32 or with heads that are too wide for torch's flash kernels,
    # enable_gqa means the math kernel: it stores all scores.
    narrow = q.dtype != torch.float32 and q.shape[3] <= FLASH_WIDTH
    stored = mask is not None or (q.is_cuda and not narrow)
    if stored and groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return torch.nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=call.scale,
        enable_gqa=bool(k.shape[1] != q.shape[1]),  # torch.jit.trace's sizes are tensors
    )


def _flash(call: AttentionCall) -> torch.Tensor:
    # Without start: it would shift the rows of a padded sequence, and the key mask says the same.
    out, lse, _, _ = query_sparse_attention(
        call.q, call.k, call.v, gamma=1, top_k=0, exact_k=0, **call.options
    )
    return apply_sinks(out, lse, call.sinks)


def apply_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Add one logit per head to the softmax's denominator after the fact: out `[B,H,T,D]` times
    exp(lse) / (exp(lse) + exp(sink)), with the natural log-sum-exp lse `[B,H,T]`."""
    if sinks is None:
        return out
    weight = torch.sigmoid(lse - sinks.float().view(1, -1, 1))
    return (out.float() * weight.unsqueeze(-1)).to(out.dtype)
