"""The Triton kernel of page_bounds."""

import triton
import triton.language as tl


@triton.jit
def summarise_pages(
    k,
    bounds,
    slots,
    pages,
    k_strides,
    slot_stride,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """One program a (slot, KV head); it has work where the slot is the last one of its page."""
    k_n, k_h, k_s = k_strides
    slot = tl.load(slots + tl.program_id(0).to(tl.int64) * slot_stride)
    h = tl.program_id(1)
    if (slot >= 0) & (slot % PAGE == PAGE - 1) & (slot // PAGE < pages):
        number = slot // PAGE  # int64: pages times their size pass 2^31
        d = tl.arange(0, DP)
        n = tl.arange(0, PAGE)
        at = k + number * k_n + h.to(tl.int64) * k_h + n.to(tl.int64)[:, None] * k_s + d[None, :]
        key = tl.load(at, mask=(d < D)[None, :], other=0.0).to(tl.float32)
        any_nan = tl.sum((key != key).to(tl.int32), 0) > 0  # the reductions drop a NaN
        out = bounds + (number * HEADS + h) * (2 * D) + d
        tl.store(out, tl.where(any_nan, float("nan"), tl.max(key, 0)), mask=d < D)
        tl.store(out + D, tl.where(any_nan, float("nan"), tl.min(key, 0)), mask=d < D)
