"""Cases of bench/ptx.py: stream, gvr, certified, tiered gather and sketch."""

import inspect
from typing import Any

import torch
from _ptx_inputs import BF16, FP16, FP32, INT64, Cases, attention, cases, new, padding, summaries


@cases
def stream_mask(op: Any) -> Cases:
    def case(batch, heads, kv, queries, size, width, dtype=BF16, **options):
        q, k, _ = attention(batch, heads, kv, queries, size, width, dtype)
        return lambda: op(q, k, **options)

    yield "bench", case(1, 28, 4, 32768, 32768, 128)
    yield "lengths", case(1, 28, 4, 8192, 16384, 128, lengths=new(1))
    yield "budget", case(1, 28, 4, 8192, 8192, 128, budget=new(1, 28, 128))
    yield (
        "block_mask",
        case(1, 28, 4, 8192, 8192, 128, block_mask=new(1, 1, 128, 128, dtype=torch.bool)),
    )
    yield "padded", case(2, 28, 4, 4096, 4096, 128, top_k=16, **padding(2, 4096))
    yield "one query", case(1, 28, 4, 1, 32768, 128, lengths=new(1))
    yield "fp16 D=80", case(2, 8, 2, 1003, 1003, 80, FP16, query_block=32, block=16, top_k=5)
    yield "fp32 query_block=128", case(1, 4, 4, 1024, 1024, 64, FP32, query_block=128, block=128)
    if "search" not in inspect.signature(op).parameters:  # an older tree
        return
    flat = {"search": "bounds"}
    yield "bounds", case(1, 32, 8, 131072, 131072, 128, **flat)
    yield "bounds 1M", case(1, 32, 8, 1 << 20, 1 << 20, 128, **flat)
    yield "bounds budget", case(1, 28, 4, 8192, 8192, 128, budget=new(1, 28, 128), **flat)
    shown = new(1, 1, 128, 128, dtype=torch.bool)
    yield "bounds block_mask", case(1, 28, 4, 8192, 8192, 128, block_mask=shown, **flat)
    yield "bounds padded", case(2, 28, 4, 4096, 4096, 128, top_k=16, **padding(2, 4096), **flat)
    yield "bounds one query", case(1, 28, 4, 1, 32768, 128, lengths=new(1), **flat)
    small = {"query_block": 32, "block": 16, "top_k": 5, **flat}
    yield "bounds fp16 D=80", case(2, 8, 2, 1003, 1003, 80, FP16, **small)
    large = {"query_block": 128, "block": 128, **flat}
    yield "bounds fp32", case(1, 4, 4, 1024, 1024, 64, FP32, **large)
    yield "bounds fp32 D=256", case(1, 4, 1, 1024, 1024, 256, FP32, top_k=128, **large)


@cases
def stream_edges(op: Any) -> Cases:
    def case(batch, heads, kv, queries, size, width, names, dtype=BF16, **options):
        args = attention(batch, heads, kv, queries, size, width, dtype)
        index = new(batch, heads, -(-queries // options.get("query_block", 64)), names)
        return lambda: op(*args, index, scale=0.1, **options)

    yield "bench", case(1, 28, 4, 32768, 32768, 128, 32)
    for weights in ("score", "value"):
        yield weights, case(1, 28, 4, 8192, 8192, 128, 32, weights=weights, lengths=new(1))
    yield "output", case(1, 28, 4, 8192, 8192, 128, 32, output=True)
    yield "padded", case(2, 28, 4, 4096, 4096, 128, 16, output=True, **padding(2, 4096))
    yield "fp16 D=80", case(2, 8, 2, 1003, 1003, 80, 5, FP16, query_block=32, block=16)
    yield (
        "fp32 query_block=128",
        case(1, 4, 4, 1024, 1024, 64, 4, FP32, query_block=128, block=128, weights="value"),
    )
    yield "one query", case(1, 28, 4, 1, 8192, 128, 16, lengths=new(1))


@cases
def score_tokens(op: Any) -> Cases:
    def case(batch, heads, kv, size, width, dtype=BF16, **options):
        q = new(options.pop("rows", batch), heads, 1, width, dtype=dtype)
        codes = new(batch, kv, size, width, dtype=torch.int8)
        return lambda: op(q, codes, new(batch, kv, size, dtype=FP32), **options)

    kept = {"sink": 16, "window": 256}
    yield "bench", case(1, 28, 4, 131072, 128, lengths=new(1), **kept)
    yield "1M", case(1, 28, 4, 1 << 20, 128, lengths=new(1), **kept)
    yield "fp16 D=80", case(2, 8, 2, 1003, 80, FP16, lengths=new(2))
    yield "padded", case(2, 28, 4, 4096, 128, **kept, **padding(2, 4096))
    yield "fp32 D=256", case(1, 4, 4, 4096, 256, FP32)
    for page in (16, 128):
        rows = {"rows": 8, "table": new(8, 131072 // page), "lengths": new(8), **kept}
        yield f"pages of {page}", case(65536 // page, 28, 4, page, 128, **rows)
    yield "fp16 D=80 pages", case(64, 8, 2, 48, 80, FP16, rows=2, table=new(2, 9), lengths=new(2))


@cases
def top_tokens(op: Any) -> Cases:
    def case(batch, heads, kv, size, width, k=2048, dtype=BF16, queries=1, **options):
        q = new(batch, heads, queries, width, dtype=dtype)
        codes = new(batch, kv, size, width, dtype=torch.int8)
        return lambda: op(q, codes, new(batch, kv, size, dtype=FP32), k, **options)

    kept = {"sink": 16, "window": 256}
    yield "bench", case(1, 28, 4, 131072, 128, lengths=new(1), **kept)
    yield "32K", case(1, 28, 4, 32768, 128, lengths=new(1), **kept)
    yield "1M", case(1, 28, 4, 1 << 20, 128, lengths=new(1), **kept)
    yield "batch=8", case(8, 28, 4, 131072, 128, lengths=new(8), **kept)
    yield "fp16 D=80", case(2, 8, 2, 10003, 80, 300, FP16, lengths=new(2))
    yield "padded", case(2, 28, 4, 16384, 128, **kept, **padding(2, 16384))
    yield "fp32 D=256", case(1, 4, 4, 16384, 256, 500, FP32)
    yield "two ops", case(2, 8, 2, 1003, 80, 100, FP16, lengths=new(2))
    yield "4 queries", case(1, 28, 4, 131072, 128, queries=4, lengths=new(1), **kept)


@cases
def page_codes(op: Any) -> Cases:
    def case(pages, kv, page, width, slots, dtype=BF16, wide=INT64):
        k, codes = new(pages, kv, page, width, dtype=dtype), new(pages, kv, page, width)
        scales = new(pages, kv, page, dtype=FP32)
        return lambda: op(k, codes.to(torch.int8), scales, new(slots, dtype=wide))

    yield "a step", case(4096, 4, 16, 128, 8)
    yield "a prompt", case(512, 8, 128, 128, 16384)
    yield "fp16 D=80", case(64, 2, 48, 80, 100, FP16, torch.int32)
    yield "fp32 D=256", case(64, 4, 16, 256, 33, FP32)


@cases
def topk(op: Any) -> Cases:
    def case(rows, size, k, hint=0, **options):
        options = {**options, "hint": new(rows, hint)} if hint else options
        return lambda: op(new(rows, size, dtype=FP32), k, **options)

    yield "bench hint", case(4, 131072, 2048, hint=2048, lengths=new(1))
    yield "bench", case(4, 131072, 2048, lengths=new(1))
    yield "one row", case(1, 65536, 2048)
    yield "1M hint", case(4, 1 << 20, 2048, hint=2048, lengths=new(1))
    yield "4M", case(1, 1 << 22, 512, lengths=new(1))
    yield "many rows", case(256, 32768, 128, hint=128, lengths=new(256, dtype=INT64))
    yield "k=4096", case(2, 131072, 4096)
    yield "short", case(8, 8192, 512, lengths=new(8))
    yield "sorted", case(8, 4000, 200, sorted=True)
    yield "odd short", case(3, 1003, 7)
    yield "tiny", case(3, 200, 16, lengths=new(3))


def tier_of(quantized: Any, k: torch.Tensor, block: int) -> Any:
    """A quantized tier for the keys `[B,Hkv,S,D]`."""
    (batch, heads, size, width), columns = k.shape, 16 * -(-k.shape[3] // 32)
    grid = (batch, heads, -(-size // block))
    return quantized(
        new(*grid, block, width, dtype=torch.int8), new(*grid, 2, width, dtype=BF16),
        new(*grid, block, columns, dtype=torch.uint8), new(*grid, block, columns // 8),
        new(*grid, 4, dtype=FP32), new(*grid, 2), new(batch, 2),
    )  # fmt: skip


@cases
def quantize_kv(op: Any) -> Cases:
    from attnplug.ops import QuantizedKV

    def case(batch, kv, size, width, dtype=BF16, block=64, **options):
        k, v = (new(batch, kv, size, width, dtype=dtype) for _ in range(2))
        tier = tier_of(QuantizedKV, k, block)
        return lambda: op(k, v, tier, block=block, **options)

    yield "bench", case(1, 8, 131072, 128, lengths=new(1))
    yield "block=16", case(1, 8, 131072, 128, block=16, lengths=new(1))
    yield "fp16 D=80 padded", case(2, 2, 1003, 80, FP16, block=16, **padding(2, 1003))
    yield "fp32 D=64 block=128", case(1, 2, 1024, 64, FP32, block=128)
    yield "padded", case(2, 4, 4096, 128, **padding(2, 4096))


@cases
def tiered_decode(op: Any) -> Cases:
    from attnplug import ops

    resident = getattr(ops, "ResidentBlocks", None) or ops.Near  # its name before

    def case(batch, heads, kv, size, width, dtype=BF16, slots=256, token=True, **options):
        q, k, v = attention(batch, heads, kv, 1, size, width, dtype)
        options = {"scale": 0.1, "block": 64, "top_k": 32, "lengths": new(1), **options}
        block, rows, local = options["block"], (batch, kv), options.get("local", 4)
        near = resident(
            new(*rows, 2, local * block, width, dtype=dtype),
            new(*rows, slots, 2, block, width, dtype=dtype), new(*rows, -(-size // block)),
            new(*rows, slots), new(*rows, slots), new(*rows, 3, dtype=INT64),
        )  # fmt: skip
        if token:
            options["new"] = tuple(new(*rows, 1, width, dtype=dtype) for _ in range(2))
        made = summaries(k, block, int8=options.pop("int8", False))
        return lambda: op(q, k, v, *made, near, **options)

    yield "bench", case(1, 28, 4, 131072, 128)
    yield "top_k=8 int8", case(1, 28, 4, 131072, 128, top_k=8, int8=True)
    yield "token is there", case(1, 28, 4, 131072, 128, token=False)
    yield "window only", case(1, 28, 4, 131072, 128, top_k=0)
    yield "batch=64", case(64, 28, 4, 32768, 128, slots=64, lengths=new(64))
    yield "fp16 D=80", case(2, 8, 2, 1003, 80, FP16, block=16, top_k=5, slots=33, lengths=new(2))
    capped = {"softcap": 30.0, "sinks": new(28, dtype=FP32)}
    yield "padded", case(2, 28, 4, 4096, 128, top_k=8, **capped, **padding(2, 4096))


def sketched(batch, kv, size, width, codes=24):
    """basis and codes of a cache."""
    fine, coarse = {16: (16, 32), 24: (32, 32), 32: (32, 64)}[codes]
    rows, rank = (batch, kv), fine + coarse
    basis = [
        new(*rows, *shape, dtype=FP32)
        for shape in ((width + 1, rank), (width, 2 * rank + 2 + width), (width,))
    ]
    shapes = (size, fine // 2), (size, coarse // 4), (-(-size // 32),)
    return basis, [*(new(*rows, *shape, dtype=torch.uint8) for shape in shapes), new(batch, 2)]


@cases
def encode_keys(op: Any) -> Cases:
    def case(batch, kv, size, width, dtype=BF16, codes=24, **options):
        _, k, v = attention(batch, kv, kv, 1, size, width, dtype)
        basis, made = sketched(batch, kv, size, width, codes)
        return lambda: op(k, v, basis[0], *made, **options)

    yield "bench", case(1, 4, 131072, 128, lengths=new(1))
    yield "fp32 16 bytes", case(2, 2, 1003, 64, FP32, codes=16, lengths=new(2))
    yield "padded 32 bytes", case(2, 4, 4096, 128, codes=32, **padding(2, 4096))


@cases
def sketch_decode(op: Any) -> Cases:
    def case(batch, heads, kv, size, width, dtype=BF16, token=True, ring=True, codes=24, **options):
        q, k, v = attention(batch, heads, kv, options.pop("queries", 1), size, width, dtype)
        options = {"scale": 0.1, "lengths": new(1), **options}
        if token:
            options["new"] = tuple(new(batch, kv, 1, width, dtype=dtype) for _ in range(2))
        if ring:
            options["recent"] = new(batch, heads, 520, width, dtype=dtype)
            options["hint"] = new(batch, kv, dtype=FP32)
        basis, made = sketched(batch, kv, size, width, codes)
        return lambda: op(q, k, v, *basis, *made, **options)

    yield "bench", case(1, 28, 4, 131072, 128)
    yield "uncounted", case(1, 28, 4, 131072, 128, count=False)
    yield "token is there", case(1, 28, 4, 131072, 128, token=False, ring=False)
    yield "drop 16 bytes", case(1, 28, 4, 131072, 128, tail="drop", codes=16)
    yield "drop 32 bytes", case(1, 28, 4, 131072, 128, tail="drop", codes=32)
    yield "batch=8 1M", case(8, 28, 4, 1048576, 128, lengths=new(8))
    yield "fp16 D=80", case(2, 8, 2, 1003, 80, FP16, top_k=100, lengths=new(2))
    yield "fp32 D=64", case(2, 9, 3, 4096, 64, FP32, lengths=new(2))
    yield "D=256", case(1, 4, 1, 32768, 256)
    few = {"token": False, "ring": False, "queries": 4}
    yield "4 queries", case(1, 28, 4, 131072, 128, **few, hint=new(1, 4, dtype=FP32))
    yield "4 queries, padded", case(2, 28, 4, 4096, 128, **few, **padding(2, 4096))
    capped = {"softcap": 30.0, "sinks": new(28, dtype=FP32)}
    yield "padded", case(2, 28, 4, 4096, 128, **capped, **padding(2, 4096))


def paged_sketch(pages, kv, page, width, codes):
    """Codes of pages."""
    fine, coarse = {16: (16, 32), 24: (32, 32), 32: (32, 64)}[codes]
    shapes = (fine // 2,), (coarse // 4,), ()
    made = [new(pages, kv, page, *shape, dtype=torch.uint8) for shape in shapes]
    return made, fine + coarse


@cases
def encode_pages(op: Any) -> Cases:
    def case(pages, kv, page, width, slots, dtype=BF16, codes=32, wide=INT64, bands=64):
        k, v = (new(pages, kv, page, width, dtype=dtype) for _ in range(2))
        made, rank = paged_sketch(pages, kv, page, width, codes)
        encoder = new(kv, width + 1, rank, dtype=FP32)
        turns = new(bands, 2, width // 2, dtype=FP32)
        places = new(slots, dtype=wide), new(slots, dtype=wide)
        return lambda: op(k, v, encoder, turns, *made, *places)

    yield "a step", case(65536, 4, 16, 128, 8)
    yield "a prompt", case(8192, 8, 128, 128, 16384)
    yield "fp16 D=80 16 bytes", case(64, 2, 48, 80, 100, FP16, 16, torch.int32)
    yield "fp32 D=64 24 bytes", case(64, 4, 16, 64, 33, FP32, 24)
    yield "D=256", case(4096, 1, 16, 256, 8192)


@cases
def sketch_pages(op: Any) -> Cases:
    def case(rows, heads, kv, size, width, dtype=BF16, page=16, codes=32, **options):
        pages = rows * size // page
        q = new(rows, heads, 1, width, dtype=dtype)
        k, v = (new(pages, kv, page, width, dtype=dtype) for _ in range(2))
        made, rank = paged_sketch(pages, kv, page, width, codes)
        scorer = new(kv, width, rank + 1, dtype=FP32)
        turns = new(-(-size // 2048), 2, width // 2, dtype=FP32)
        where = new(rows, size // page), new(rows)
        return lambda: op(q, k, v, scorer, turns, *made, *where, scale=0.1, **options)

    yield "bench", case(1, 28, 4, 131072, 128, top_k=16384)
    yield "8 rows", case(8, 28, 4, 131072, 128, top_k=16384)
    yield "1M", case(1, 28, 4, 1 << 20, 128, top_k=16384)
    yield "group of 4, pages of 128", case(8, 32, 8, 32768, 128, page=128)
    yield "fp16 D=80 16 bytes", case(2, 8, 2, 4800, 80, FP16, page=48, codes=16, top_k=100)
    yield "fp32 D=64 24 bytes", case(2, 9, 3, 4096, 64, FP32, codes=24)
    yield "D=256", case(1, 4, 1, 32768, 256)
    capped = {"softcap": 30.0, "sinks": new(28, dtype=FP32)}
    yield "capped", case(2, 28, 4, 16384, 128, **capped)


@cases
def sketch_host_decode(op: Any) -> Cases:
    from attnplug.ops import FixedPart

    def case(batch, heads, kv, size, width, dtype=BF16, token=True, **options):
        q, k, v = attention(batch, heads, kv, 1, size, width, dtype)
        options = {"scale": 0.1, "lengths": new(1), **options}
        if token:
            options["new"] = tuple(new(batch, kv, 1, width, dtype=dtype) for _ in range(2))
            options["recent"] = new(batch, heads, 520, width, dtype=dtype)
            options["hint"] = new(batch, kv, dtype=FP32)
        fixed = FixedPart(new(batch, kv, 2, 640, width, dtype=dtype), new(batch, kv, 2))
        basis, made = sketched(batch, kv, size, width)
        return lambda: op(q, k, v, *basis, *made, fixed, **options)

    yield "bench", case(1, 28, 4, 1048576, 128)
    yield "token is there", case(1, 28, 4, 131072, 128, token=False)
    yield "fp16 D=80", case(2, 8, 2, 1003, 80, FP16, top_k=100, lengths=new(2))
    yield "fp32 D=256", case(1, 4, 1, 32768, 256, FP32)
    yield "padded", case(2, 28, 4, 4096, 128, softcap=30.0, **padding(2, 4096))


BOUND = {"tolerance": None, "k_min": 2, "ranking": 1, "explore": 0.0}
PAPER = BOUND | {"coverage": 0.995, "k_max": 128, "v_tol": 0.05}


@cases
def certified_attention(op: Any) -> Cases:
    from attnplug.ops import QuantizedKV, Scratch

    def case(batch, heads, kv, size, width, dtype=BF16, slots=0, block=64, **options):
        q, k, v = attention(batch, heads, kv, 1, size, width, dtype)
        rows, tier = (batch, kv), tier_of(QuantizedKV, k, block)
        if slots:
            options["scratch"] = Scratch(
                new(*rows, slots, block, width, dtype=dtype), *(new(*rows, slots) for _ in "abc"),
                new(*rows, 16, 3, dtype=INT64),
            )  # fmt: skip
        options["telemetry"] = new(*rows, heads // kv, 16, dtype=torch.float64)
        return lambda: op(q, k, v, tier, scale=0.1, block=block, **options)

    one, bench = {"lengths": new(1)}, (1, 32, 8, 131072, 128)
    yield "bound", case(*bench, **one, **BOUND)
    yield "default", case(*bench, **one)
    yield "default scratch", case(*bench, **one, slots=256)
    yield "paper scratch", case(*bench, **one, **PAPER, slots=256)
    yield "bound scratch", case(*bench, **one, **BOUND, slots=128)
    yield "few blocks", case(1, 28, 4, 1000, 128, **one)
    yield "bound few blocks", case(1, 28, 4, 1000, 128, **one, **BOUND | {"ranking": 0})
    yield "many blocks", case(1, 28, 4, 1 << 20, 128, **one)
    yield "bound batch=4 block=16", case(4, 32, 8, 65536, 128, block=16, **BOUND)
    yield "group=8", case(1, 32, 4, 32768, 128, **one)
    yield "fp16 D=64", case(2, 8, 2, 4003, 64, FP16, block=32, lengths=new(2), ranking=4, k_min=4)
    yield "fp32 D=80", case(1, 4, 4, 1024, 80, FP32, block=16)
    capped = {"softcap": 30.0, "sinks": new(28, dtype=FP32)}
    yield "padded", case(2, 28, 4, 8192, 128, **capped, **padding(2, 8192))
    yield "padded no mask", case(2, 28, 4, 8192, 128, **capped, **padding(2, 9, mask=False))
