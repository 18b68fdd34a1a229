"""The Triton kernel of page_codes: a program codes the keys of a few written slots, of one head."""

from attnplug.ops.common.constants import Constant
from attnplug.ops.common.triton import tl, triton

# 1.5 * 2**23: adding and subtracting it rounds a small float to an integer, halves to even.
_ROUND = Constant(12582912.0)


@triton.jit(do_not_specialize=["count", "stored"])  # of any batch, of a cache of any size
def code_written(
    k,
    codes,
    scales,
    slots,
    count,
    stored,
    k_strides,
    slot_stride,
    D: tl.constexpr,
    DP: tl.constexpr,
    PAGE: tl.constexpr,
    EACH: tl.constexpr,
):
    """Slots EACH i and on, of head h; what `quantize_keys` makes of their keys. All pages have
    `stored` slots."""
    k_p, k_h, k_s = k_strides
    h = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * EACH + tl.arange(0, EACH)
    d = tl.arange(0, DP)
    slot = tl.load(slots + i.to(tl.int64) * slot_stride, mask=i < count, other=-1).to(tl.int64)
    written = (slot >= 0) & (slot < stored)
    loadable = written[:, None] & (d < D)[None, :]
    page, in_page = slot // PAGE, slot % PAGE
    k_at = k + h * k_h + (page * k_p + in_page * k_s)[:, None] + d[None, :]
    key = tl.load(k_at, mask=loadable, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(key), 1), 127.0)
    bad = tl.sum((key != key).to(tl.int32), 1) > 0  # a maximum may pass over NaN
    scale = tl.where(bad, float("nan"), scale)
    usable = (scale > 0) & (scale < float("inf"))  # not of zeros, nor of what is not finite
    divisor = tl.where(usable, scale, 1.0)[:, None] + tl.zeros([EACH, DP], tl.float32)
    code = tl.div_rn(tl.where(usable[:, None], key, 0.0), divisor)
    code = (code + _ROUND) - _ROUND
    place = (page * tl.num_programs(1) + h) * PAGE + in_page
    tl.store(codes + place[:, None] * D + d[None, :], code.to(tl.int8), mask=loadable)
    tl.store(scales + place, scale, mask=written)
