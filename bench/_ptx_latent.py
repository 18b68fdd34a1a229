"""Cases of bench/ptx.py: the ops of models that are sparse by training."""

from typing import Any

import torch
from _ptx_inputs import BF16, FP16, FP32, INT32, INT64, Cases, cases, new, padding


@cases
def index_topk(op: Any) -> Cases:
    def case(batch, queries, heads, size, width, k=2048, dtype=BF16, **options):
        q = new(batch, queries, heads, width, dtype=dtype)
        weights = new(batch, queries, heads, dtype=FP32)
        stored = "key_scale" in options
        keys = new(batch, size, width, dtype=torch.float8_e4m3fn if stored else dtype)
        return lambda: op(q, weights, keys, k, scale=0.1, **options)

    yield "step 32K", case(1, 1, 64, 32768, 128, lengths=new(1, dtype=INT64))
    yield "step 512K", case(1, 1, 64, 524288, 128, lengths=new(1, dtype=INT64))
    yield "batch=8", case(8, 1, 64, 131072, 128, lengths=new(1, dtype=INT64))
    yield "prefill", case(1, 512, 64, 32768, 128, lengths=new(1, dtype=INT64))
    mask = padding(2, 16384)["key_mask"]
    yield "padded", case(2, 100, 64, 16384, 128, lengths=new(1, dtype=INT64), key_mask=mask)
    yield "all are picked", case(2, 9, 64, 1024, 128, lengths=new(1, dtype=INT64))
    yield "fp16 D=48 H=6", case(2, 33, 6, 1003, 48, 100, FP16)
    pools = {"lengths": new(16, dtype=INT64), "key_mask": new(16, 8192, dtype=torch.bool)}
    yield "prompt over pools", case(16, 2048, 32, 8192, 128, 128, **pools)  # GLM-5.3's
    pools = {"lengths": new(1, dtype=INT64), "key_mask": new(1, 8192, dtype=torch.bool)}
    yield "step over pools", case(1, 1, 32, 8192, 128, 128, **pools)
    stored = {"lengths": new(1, dtype=INT64), "key_scale": new(8, 131072, dtype=FP32)}
    yield "fp8 batch=8", case(8, 1, 64, 131072, 128, **stored)
    stored = {"lengths": new(1, dtype=INT64), "key_scale": new(1, 32768, dtype=FP32)}
    yield "fp8 prefill", case(1, 512, 64, 32768, 128, **stored)
    yield "H=200", case(1, 4, 200, 4096, 64, 500)
    yield "fp32", case(1, 64, 64, 4096, 128, 500, FP32)
    yield "fp32 step D=256", case(2, 1, 16, 4096, 256, 500, FP32)
    yield "seen step", case(1, 1, 4, 32768, 128, 512, seen=new(1, 1, dtype=INT64))
    yield "seen prefill", case(2, 512, 4, 8192, 128, 512, seen=new(2, 512, dtype=INT64))
    yield "seen, all are picked", case(2, 9, 4, 500, 128, 512, seen=new(2, 9, dtype=INT64))


@cases
def pool_keys(op: Any) -> Cases:
    def case(batch, size, width, turned, ratio=4, dtype=BF16, slots=False):
        keys, pooled = (
            new(batch, size, width, dtype=dtype),
            new(batch, size // ratio, width, dtype=dtype),
        )
        cos, sin = new(2, batch, size, turned, dtype=dtype)
        ends = new(batch, dtype=INT64), new(batch, dtype=INT64)
        options = {"slots": new(batch, size) if slots else None, "ratio": ratio, "eps": 1e-6}
        weight = new(width, dtype=dtype)
        return lambda: op(pooled, keys, cos, sin, weight, *ends, **options)

    yield "128K", case(1, 131072, 128, 64)
    yield "padded", case(8, 32768, 128, 64, slots=True)
    yield "fp16 D=48 P=12", case(2, 1003, 48, 12, 3, FP16)
    yield "fp32 all turned", case(1, 4096, 256, 256, 16, FP32)


@cases
def block_maxima(op: Any) -> Cases:
    def case(batch, queries, heads, size, width, block=128, dtype=BF16, kind=INT64):
        q = new(batch, queries, heads, width, dtype=dtype).transpose(1, 2)
        keys, positions = new(batch, size, width, dtype=dtype), new(batch, queries, dtype=kind)
        return lambda: op(q, keys, positions, block=block)

    yield "step 32K", case(1, 1, 4, 32768, 128)
    yield "step 512K", case(1, 1, 4, 524288, 128)
    yield "batch=8", case(8, 1, 4, 131072, 128)
    yield "prefill", case(1, 4096, 4, 131072, 128)
    yield "fp16 D=48 H=6", case(2, 33, 6, 1003, 48, 16, FP16, INT32)
    yield "D=256", case(1, 512, 4, 4096, 256)
    yield "fp32", case(1, 64, 4, 4096, 128, 64, FP32)
    yield "fp32 D=256", case(1, 64, 4, 4096, 256, 128, FP32)


@cases
def latent_attention(op: Any) -> Cases:
    def case(batch, queries, heads, size, picked=0, widths=(512, 64), dtype=BF16, **options):
        q = [new(batch, queries, heads, width, dtype=dtype) for width in widths]
        cache = [new(batch, size, width, dtype=dtype) for width in widths]
        picks = new(batch, queries, picked) if picked else None
        return lambda: op(*q, *cache, picks, scale=0.1, **options)

    yield "step", case(1, 1, 128, 131072, 2048, lengths=new(1, dtype=INT64))
    yield "batch=8", case(8, 1, 128, 131072, 2048, lengths=new(1, dtype=INT64))
    yield "prefill", case(1, 4096, 128, 32768, 2048, lengths=new(1, dtype=INT64))
    yield "dense step", case(1, 1, 128, 131072, lengths=new(1, dtype=INT64))
    yield "dense prefill", case(1, 4096, 128, 32768, lengths=new(1, dtype=INT64))
    mask = {"lengths": new(1, dtype=INT64), "key_mask": padding(2, 4096)["key_mask"]}
    yield "padded", case(2, 64, 128, 4096, 1024, **mask)
    wide = {"widths": (512, 0), "lengths": new(1, dtype=INT64)}  # GLM-5.3's, which rotates nothing
    yield "step without rope", case(1, 1, 64, 131072, 2063, **wide)
    yield "prefill without rope", case(1, 4096, 64, 32768, 2063, **wide)
    yield "dense padded", case(2, 64, 16, 4096, **mask)
    yield "fp16 R=48 P=4", case(2, 9, 6, 1003, 100, (48, 4), FP16)
    yield "fp32", case(1, 64, 16, 4096, 512, dtype=FP32)
    yield "fp32 dense step", case(1, 1, 16, 4096, dtype=FP32)
