"""Cases of bench/ptx.py: dense attention, gather and momo."""

import functools
from typing import Any

import torch
from _ptx_inputs import BF16, FP16, FP32, INT64, Cases, attention, cases, new, padding, summaries


@cases
def dense_decode(op: Any) -> Cases:
    def case(*shape, dtype=BF16, **options):
        return lambda: op(*attention(*shape, dtype=dtype), scale=0.1, **options)

    capped = {"softcap": 30.0, "sinks": new(28, dtype=FP32)}
    yield "bench", case(1, 28, 4, 1, 131072, 128, lengths=new(1))
    yield "full buffer", case(1, 28, 4, 1, 131072, 128)
    yield "fp16 D=80", case(2, 8, 2, 3, 1003, 80, dtype=FP16, lengths=new(2, dtype=INT64))
    yield "fp32 D=64", case(1, 4, 4, 17, 500, 64, dtype=FP32)
    yield "padded", case(2, 28, 4, 1, 4096, 128, **padding(2, 4096), **capped)
    yield "window", case(1, 28, 4, 1, 32768, 128, lengths=new(1), window=1024, **capped)
    yield "many queries", case(1, 28, 4, 128, 8192, 128, lengths=new(1))
    yield "D=192", case(1, 128, 128, 9, 8192, 192, **padding(1, 8192))  # of latents, expanded
    yield "D=256", case(1, 16, 8, 1, 8192, 256, lengths=new(1))


@cases
def block_bounds(op: Any) -> Cases:
    def case(block, batch, heads, size, width, dtype=BF16, parts=2, int8=False, **more):
        k = new(batch, heads, size, width, dtype=dtype)
        made = summaries(k, block, parts, int8)
        return lambda: op(k, *made, block=block, **more)

    yield "bench", case(64, 1, 4, 131072, 128, lengths=new(1))
    yield "int8", case(64, 1, 4, 131072, 128, int8=True, lengths=new(1))
    yield "int8 padded", case(32, 2, 4, 4096, 128, int8=True, **padding(2, 4096))
    yield "fp16 D=80 padded", case(16, 2, 3, 1003, 80, FP16, **padding(2, 1003))
    yield "fp32 D=64 block=128", case(128, 1, 2, 1024, 64, FP32)
    yield "band", case(16, 1, 4, 131072, 128, parts=1, int8=True, lengths=new(1), band=True)


@cases
def select_blocks(op: Any) -> Cases:
    def case(batch, heads, kv, queries, size, width, dtype=BF16, int8=False, block=64, **options):
        q, k, _ = attention(batch, heads, kv, queries, size, width, dtype)
        made = summaries(k, block, int8=int8)
        return lambda: op(q, k, *made, block=block, **options)

    step = {"lengths": new(1), "top_k": 8}
    yield "bench", case(1, 28, 4, 1, 131072, 128, **step)
    yield "top_k=32", case(1, 28, 4, 1, 131072, 128, **{**step, "top_k": 32})
    yield "int8", case(1, 28, 4, 1, 131072, 128, int8=True, **step)
    yield "int8 top_k=32 1M", case(1, 28, 4, 1, 1 << 20, 128, int8=True, top_k=32, lengths=new(1))
    yield "short", case(1, 28, 4, 1, 8192, 128, **step)
    yield "batch=8 512K", case(8, 28, 4, 1, 524288, 128, **step)
    yield "int8 batch=8", case(8, 28, 4, 1, 262144, 128, int8=True, **step)
    yield "top_k=100", case(1, 28, 4, 1, 65536, 128, **{**step, "top_k": 100})
    yield (
        "fp16 D=80 padded",
        case(
            2, 8, 2, 3, 2003, 80, dtype=FP16, block=16, top_k=5, sink=2, local=3, **padding(2, 2003)
        ),
    )


@cases
def gather_attention(op: Any) -> Cases:
    def case(batch, heads, kv, queries, size, width, listed, dtype=BF16, **options):
        index = new(batch, kv, queries, listed)
        options = {"scale": 0.1, "block": 64, **options}
        args = attention(batch, heads, kv, queries, size, width, dtype)
        return lambda: op(*args, index, **options)

    yield "bench", case(1, 28, 4, 1, 131072, 128, 8, lengths=new(1))
    yield "32 blocks", case(1, 28, 4, 1, 131072, 128, 32, lengths=new(1))
    yield "batch=64", case(64, 28, 4, 1, 32768, 128, 32, lengths=new(64))
    yield "fused", case(512, 28, 4, 1, 4096, 128, 8, lengths=new(512), sinks=new(28, dtype=FP32))
    yield "fp16 D=80", case(2, 8, 2, 3, 1003, 80, 5, FP16, block=16, lengths=new(2))
    yield (
        "padded",
        case(
            2, 28, 4, 1, 4096, 128, 7, softcap=30.0, sinks=new(28, dtype=FP32), **padding(2, 4096)
        ),
    )
    yield "fp32 D=64", case(1, 4, 4, 2, 1024, 64, 3, FP32, block=128)
    yield "D=256", case(1, 16, 8, 1, 8192, 256, 8, lengths=new(1))
    picks = {"block": 128, "sink": 0, "local": 0, "lengths": new(1, dtype=INT64)}  # MiniMax-M3's
    yield "picks of a step", case(1, 64, 4, 1, 131072, 128, 16, **picks)
    yield "picks of steps", case(8, 64, 4, 1, 131072, 128, 16, **picks)
    yield "picks of a prompt", case(1, 64, 4, 4096, 131072, 128, 16, **picks)
    mask = {"key_mask": padding(2, 32768)["key_mask"]}
    yield "padded picks of a prompt", case(2, 64, 4, 4096, 32768, 128, 16, **picks, **mask)
    yield "fp32 picks of a prompt", case(1, 64, 4, 512, 4096, 128, 16, FP32, **picks)


def served_step(rows: int, room: int, chain: bool = False, **options) -> Any:
    """A server's step over pages, in place: both halves, or all rows in one `chain`."""
    page, block = 16, options["block"]
    q, k, v = (
        new(rows, 28, 1, 128, dtype=BF16),
        *(new(8192, 4, page, 128, dtype=BF16) for _ in "kv"),
    )
    bounds, _ = summaries(new(1, 4, 8192 * page, 128, dtype=BF16), block)
    table, lengths, slots = new(rows, room // page), new(rows), new(rows, dtype=INT64)
    near, out = new(rows), new(rows, 28, 1, 128, dtype=BF16)

    def call() -> None:
        from attnplug.ops.gather.gather_pieces import gather_pieces, merge_pieces
        from attnplug.ops.gather.gather_rows import gather_rows

        if chain:
            at = bounds, table, lengths, near, out
            gather_rows(q, k, v, *at, slots=slots, scale=0.1, **options)
            return
        pieces = gather_pieces(q, k, v, bounds, table, lengths, slots=slots, scale=0.1, **options)
        merge_pieces(pieces, lengths, out, chained=False)

    return call


@cases
def gather_decode(op: Any) -> Cases:
    def case(batch, heads, kv, size, width, dtype=BF16, int8=False, **options):
        q, k, v = attention(batch, heads, kv, 1, size, width, dtype)
        options = {"scale": 0.1, "block": 64, "top_k": 8, **options}
        parts = 1 if options.get("scoring") == "band" and int8 else 2
        made = summaries(k, options["block"], parts, int8)
        token = (new(batch, kv, 1, width, dtype=dtype) for _ in range(2))
        lengths = options.pop("lengths", new(1))
        args = (q, k, v, *token, *made, lengths)
        return lambda: op(*args, **options)

    yield "bench", case(1, 28, 4, 131072, 128)
    yield "uncounted", case(1, 28, 4, 131072, 128, count=False)
    yield "int8", case(1, 28, 4, 131072, 128, int8=True)
    yield "top_k=32", case(1, 28, 4, 131072, 128, top_k=32)
    yield "int8 top_k=32", case(1, 28, 4, 131072, 128, top_k=32, int8=True)
    yield "window only", case(1, 28, 4, 131072, 128, top_k=0)
    yield "batch=16 512K", case(16, 28, 4, 524288, 128, lengths=new(16))
    yield "fp16 D=80 block=16", case(2, 8, 2, 1003, 80, FP16, block=16, lengths=new(2))
    some = padding(2, 4096)
    capped = {"softcap": 30.0, "sinks": new(28, dtype=FP32), "int8": True}
    yield "padded", case(2, 28, 4, 4096, 128, **some, **capped)
    many = {"block": 16, "top_k": 256, "sink": 8, "local": 32}
    for rows in (1, 8):
        yield f"served, {rows} rows", served_step(rows, 131072, **many)
    for size in (8192, 32768, 131072, 1 << 20):
        yield f"pages, bounds {size}", case(1, 28, 4, size, 128, int8=True, **many)
        band = {"scoring": "band", "int8": True, **many}
        yield f"default {size}", case(1, 28, 4, size, 128, **band)
    yield "default batch=8", case(8, 28, 4, 1 << 20, 128, scoring="band", int8=True, **many)
    for rows in (1, 8):
        yield f"one chain, {rows} rows", served_step(rows, 131072, True, **many)


@cases
def page_bounds(op: Any) -> Cases:
    def case(pages, kv, page, width, slots, dtype=BF16, wide=INT64, **more):
        k = new(pages, kv, page, width, dtype=dtype)
        one_row = new(1, kv, pages * page, width, dtype=dtype)
        bounds, _ = summaries(one_row, 16)
        return lambda: op(k, bounds, new(slots, dtype=wide), block=16, **more)

    yield "a step", case(4096, 4, 16, 128, 8)
    yield "a prompt", case(512, 8, 128, 128, 16384)
    yield "band", case(4096, 4, 16, 128, 8, band=True)
    yield "fp16 D=80", case(64, 2, 48, 80, 100, FP16, torch.int32)
    yield "fp32 D=256", case(64, 4, 16, 256, 33, FP32)


@cases
def gather_tokens_attention(op: Any) -> Cases:
    def case(batch, heads, kv, queries, size, width, listed, dtype=BF16, **options):
        index = new(batch, kv, queries, listed)
        args = attention(batch, heads, kv, queries, size, width, dtype)
        return lambda: op(*args, index, scale=0.1, **options)

    capped = {"softcap": 30.0, "sinks": new(28, dtype=FP32)}
    yield "bench", case(1, 28, 4, 1, 131072, 128, 2048, lengths=new(1))
    yield "fp16 D=80", case(2, 8, 2, 3, 1003, 80, 33, FP16, lengths=new(2))
    yield "padded", case(2, 28, 4, 1, 4096, 128, 512, **capped, **padding(2, 4096))
    yield "fused", case(2, 28, 4, 1, 4096, 128, 31, sink=0, window=1, **capped, **padding(2, 4096))
    yield "fp32 D=64", case(1, 4, 4, 1, 1024, 64, 64, FP32)
    for queries in (1, 64):
        listed = case(1, 24, 2, queries, 32768, 256, 2051, sink=0, window=0, lengths=new(1))
        yield f"list alone T={queries}", listed
    for page in (16, 128):
        _, k, v = attention(65536 // page, 28, 4, 1, page, 128, BF16)
        q, index = new(8, 28, 1, 128, dtype=BF16), new(8, 4, 1, 2048)
        rows = {"table": new(8, 131072 // page), "lengths": new(8), **capped}
        yield f"pages of {page}", functools.partial(op, q, k, v, index, scale=0.1, **rows)


@cases
def measure_blocks(op: Any) -> Cases:
    def case(batch, heads, kv, queries, size, width, dtype=BF16, values=True, **options):
        slots = -(-queries // options.get("query_block", 128))
        q, k, v = attention(batch, heads, kv, queries, size, width, dtype)
        args = (q, k, v if values else None, new(1, slots))
        return lambda: op(*args, scale=0.1, **options)

    yield "bench", case(1, 28, 4, 32768, 32768, 128)
    yield "parts", case(1, 28, 4, 131072, 131072, 128)
    yield "lengths", case(1, 28, 4, 8192, 16384, 128, lengths=new(1))
    yield "fp16 D=64 packed", case(2, 32, 8, 4096, 4096, 64, FP16, gamma=32, top_k=20)
    yield "fp16 D=80", case(1, 8, 2, 2003, 2003, 80, FP16, top_k=7)
    yield "padded", case(2, 28, 4, 4096, 4096, 128, softcap=30.0, **padding(2, 4096))
    yield "block=128", case(1, 8, 2, 4096, 4096, 128, block=128, query_block=256, top_k=16)
    yield "fp32", case(1, 8, 2, 2048, 2048, 64, FP32, top_k=16)
    yield "no values", case(1, 28, 4, 32768, 32768, 128, values=False)
    yield "no values, lengths", case(2, 24, 8, 8192, 16384, 64, FP16, False, lengths=new(1))
    yield "no values, padded", case(2, 28, 4, 4096, 4096, 128, values=False, **padding(2, 4096))


@cases
def query_sparse_attention(op: Any) -> Cases:
    def case(batch, heads, kv, queries, size, width, dtype=BF16, **options):
        args = attention(batch, heads, kv, queries, size, width, dtype)
        return lambda: op(*args, scale=0.1, **options)

    latents = dict(gamma=1, top_k=0, exact_k=0)  # dense, of latents that are expanded
    yield "D=192", case(1, 128, 128, 4096, 8192, 192, **latents, lengths=new(1, dtype=INT64))
    yield "D=192 padded", case(2, 128, 128, 4096, 4096, 192, **latents, **padding(2, 4096))
    yield "bench", case(1, 28, 4, 32768, 32768, 128)
    yield "pack=2", case(1, 24, 4, 8192, 8192, 128, exact_k=4)
    yield "pack=4 lengths", case(2, 32, 8, 8192, 8192, 128, lengths=new(2))
    yield "nothing selected", case(1, 28, 4, 32768, 32768, 128, top_k=0)
    yield "fp16 D=64", case(1, 28, 4, 8192, 8192, 64, FP16, exact_k=0)
    yield "fp16 D=80", case(1, 8, 2, 2003, 2003, 80, FP16, top_k=20)
    yield "exact", case(1, 28, 4, 8192, 8192, 128, algorithm="exact", top_k=16)
    yield "tournament", case(1, 28, 4, 8192, 8192, 128, algorithm="tournament", top_k=32)
    yield "exact_k=16", case(1, 28, 4, 8192, 8192, 128, exact_k=16)
    yield "padded", case(2, 28, 4, 4096, 4096, 128, softcap=30.0, **padding(2, 4096))
    yield "padded, no mask", case(2, 8, 2, 4096, 4096, 128, top_k=0, **padding(2, 9, mask=False))
    yield "fp32 block=32", case(1, 4, 4, 1024, 1024, 64, FP32, block=32, top_k=8)


@cases
def block_sparse_attention(op: Any) -> Cases:
    def case(batch, heads, kv, queries, size, width, names, dtype=BF16, rows=False, **options):
        slots = -(-queries // options.get("query_block", 128))
        index = new(batch, heads, slots, names)
        args = (*attention(batch, heads, kv, queries, size, width, dtype), index)
        if rows:
            dense = -(-queries // options.get("gamma", 16))
            options["rows"] = new(batch, heads, dense, width, dtype=dtype)
        return lambda: op(*args, scale=0.1, **options)

    yield "bench", case(1, 28, 4, 32768, 32768, 128, 128, window=128)
    yield "lengths", case(1, 28, 4, 8192, 16384, 128, 64, lengths=new(1))
    yield "corrected", case(1, 28, 4, 32768, 32768, 128, 128, rows=True, weight=0.5)
    yield "corrected after", case(1, 28, 4, 8192, 8192, 128, 64, rows=True, gamma=32)
    yield "fp16 D=64", case(2, 8, 2, 4096, 4096, 64, 20, FP16, lengths=new(2))
    yield "fp16 D=80", case(1, 8, 2, 2003, 2003, 80, 7, FP16, sink=2)
    yield (
        "padded",
        case(2, 28, 4, 4096, 4096, 128, 16, rows=True, softcap=30.0, window=70, **padding(2, 4096)),
    )
    yield (
        "query_block=64 block=32",
        case(1, 8, 2, 4096, 4096, 128, 16, query_block=64, block=32, lengths=new(1)),
    )
    yield "block=24", case(1, 8, 2, 1024, 1024, 128, 16, block=24)
    yield "fp32 D=64", case(1, 4, 2, 1024, 1024, 64, 5, FP32)


@cases
def delta_correct(op: Any) -> Cases:
    def case(batch, heads, queries, width, gamma, dtype=BF16, **options):
        out = new(batch, heads, queries, width, dtype=dtype)
        rows = new(batch, heads, -(-queries // gamma), width, dtype=dtype)
        return lambda: op(out, rows, gamma=gamma, **options)

    yield "bench", case(1, 28, 32768, 128, 16, weight=0.5)
    yield "lengths", case(1, 28, 32768, 128, 16, lengths=new(1), kv_length=65536)
    yield "fp16 D=80 padded", case(2, 3, 1003, 80, 24, FP16, **padding(2, 9, mask=False))
    yield "fp32", case(1, 4, 512, 64, 64, FP32)


@cases
def merge_block_rows(op: Any) -> Cases:
    def case(batch, heads, count, names, rows, **options):
        index = new(batch, heads, count, names)
        score, lse = new(*index.shape, dtype=FP32), new(batch, heads, count, dtype=FP32)
        return lambda: op(index, score, lse, rows=rows, **options)

    yield "mass", case(1, 28, 2048, 64, 8, trim=64)
    yield "mean", case(1, 28, 2048, 64, 8, trim=64, merge="mean")
    yield "before", case(2, 8, 100, 33, 4, trim=20, sink=1, before=new(2, 25))
    yield "few", case(1, 2, 5, 3, 2, trim=4)
