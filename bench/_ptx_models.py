"""The cases of `bench/ptx.py fits`: what the default policies launch for layers of real models."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import _ptx_latent  # noqa: F401 - the import adds its cases to CASES, as that of _ptx_tokens does
import torch
from _ptx_inputs import BF16, CASES, FP8, FP32, INT64, attention, new, padding, summaries
from _ptx_tokens import sketched, tier_of

# (query heads, KV heads, head dimension)
MODELS = {
    "Qwen2.5-7B": (28, 4, 128),
    "Llama-3.1-8B": (32, 8, 128),
    "SmolLM2": (9, 3, 64),
    "Gemma-3-4B": (8, 4, 256),
}
QUICK = ("Qwen2.5-7B", "Gemma-3-4B")  # whose heads differ in size
# Head dimensions that kernels pad, and the widest, for which gvr has no kernels.
WIDTHS = {f"heads of {width}": (8, 2, width) for width in (48, 208, 512)}
PAGE = 16
# What `trained` launches for layers of DeepSeek-V3.2, GLM-5.3 and MiniMax-M3, and sketch on pages:
# the cases of `bench/ptx.py record`, and of these the few of the quick form.
OPS = {
    "index_topk": ("fp8 prefill",),
    "latent_attention": ("prefill", "fp32"),
    "block_maxima": ("fp32 D=256",),
    "pool_keys": (),
    "encode_pages": (),
    "sketch_pages": ("D=256",),
}


class Case(NamedTuple):
    """A call of public ops with one layer's shapes."""

    name: str
    call: Callable[[], Any]
    fp8: bool = False  # for cards that convert it


class Layer(NamedTuple):
    """A layer of a model, in a dtype."""

    heads: int
    kv_heads: int
    width: int
    dtype: torch.dtype

    def qkv(self, batch: int, queries: int, size: int) -> tuple[torch.Tensor, ...]:
        return attention(batch, self.heads, self.kv_heads, queries, size, self.width, self.dtype)

    def token(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = batch, self.kv_heads, 1, self.width
        return new(*shape, dtype=self.dtype), new(*shape, dtype=self.dtype)

    def pages(self, rows: int, room: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """(q, k, v) of a served step, and the table of its pages."""
        _, k, v = self.qkv(8192, 1, PAGE)
        q = new(rows, self.heads, 1, self.width, dtype=self.dtype)
        return (q, k, v), new(rows, room // PAGE)

    # ---- what a policy calls ----------------------------------------------------------------

    def decode(self, batch: int, size: int, **more: Any) -> None:
        from attnplug import ops

        ops.dense_decode(*self.qkv(batch, 1, size), scale=0.1, lengths=new(batch), **more)

    def decode_pages(self, rows: int = 8) -> None:
        from attnplug import ops

        qkv, table = self.pages(rows, 131072)
        ops.dense_decode(*qkv, scale=0.1, table=table, lengths=new(rows))

    def flash(self, batch: int, queries: int, size: int, **more: Any) -> None:
        from attnplug import ops

        options = {"scale": 0.1, "gamma": 1, "top_k": 0, "exact_k": 0, **more}
        ops.query_sparse_attention(*self.qkv(batch, queries, size), **options)

    def momo(self, size: int, top_k: int, gamma: int) -> None:
        from attnplug import ops

        q, k, v = self.qkv(1, size, size)
        grid = {"scale": 0.1, "block": 64, "query_block": 128, "sink": 1}
        near = new(1, size // 128)
        ops.measure_blocks(q, k, None, near, gamma=gamma, top_k=top_k, **grid)
        index = new(1, self.heads, size // 128, top_k)
        ops.block_sparse_attention(q, k, v, index, window=128, **grid)

    def gather(self, batch: int, size: int) -> None:
        from attnplug import ops

        q, k, v = self.qkv(batch, 1, size)
        made = summaries(k, 16, 1, True)
        ops.block_bounds(k, *made, block=16, lengths=new(batch), band=True)
        options = {"scale": 0.1, "block": 16, "top_k": 256, "sink": 8, "local": 32}
        ops.gather_decode(
            *(q, k, v), *self.token(batch), *made, new(batch), scoring="band", **options
        )

    def gather_host(self, size: int) -> None:
        from attnplug import ops

        q, k, v = self.qkv(1, 1, size)
        block, local, slots, row = 64, 4, 256, (1, self.kv_heads)
        near = ops.ResidentBlocks(
            new(*row, 2, local * block, self.width, dtype=self.dtype),
            new(*row, slots, 2, block, self.width, dtype=self.dtype),
            new(*row, size // block), new(*row, slots), new(*row, slots),
            new(*row, 3, dtype=INT64),
        )  # fmt: skip
        options = {"scale": 0.1, "block": block, "top_k": 32, "local": local}
        made = summaries(k, block, int8=True)
        ops.tiered_decode(q, k, v, *made, near, new=self.token(1), lengths=new(1), **options)

    def gather_pages(self, rows: int) -> None:
        from attnplug.ops.gather.gather_rows import gather_rows

        (q, k, v), table = self.pages(rows, 131072)
        held = new(1, self.kv_heads, 8192 * PAGE, self.width, dtype=self.dtype)
        bounds, _ = summaries(held, 16)
        options = {
            "scale": 0.1,
            "block": 16,
            "top_k": 256,
            "sink": 8,
            "local": 32,
            "scoring": "band",
        }
        slots, out = new(rows, dtype=INT64), new(*q.shape, dtype=self.dtype)
        gather_rows(q, k, v, bounds, table, new(rows), new(rows), out, slots=slots, **options)

    def gather_fp8(self, rows: int) -> None:
        """A served step over pages in fp8, in one chain and in halves, and what notes a prompt's
        keys."""
        from attnplug.ops import page_bounds
        from attnplug.ops.gather.gather_pieces import gather_pieces, merge_pieces
        from attnplug.ops.gather.gather_rows import gather_rows

        (q, k, v), table = self.pages(rows, 131072)
        k, v = new(*k.shape, dtype=FP8), new(*v.shape, dtype=FP8)
        bounds, _ = summaries(new(1, self.kv_heads, 8192 * PAGE, self.width), 16, int8=True)
        options = {"scale": 0.1, "block": 16, "top_k": 256, "sink": 8, "local": 32}
        options |= {name: new(1, dtype=FP32) for name in ("k_scale", "v_scale")}
        options |= {"scoring": "band", "slots": new(rows, dtype=INT64)}
        lengths, out = new(rows), new(*q.shape, dtype=self.dtype)
        gather_rows(q, k, v, bounds, table, lengths, new(rows), out, **options)
        pieces = gather_pieces(q, k, v, bounds, table, lengths, **options)
        merge_pieces(pieces, lengths, out)
        page_bounds(k, bounds, new(4096, dtype=INT64), block=16, band=True)

    def gvr(self, batch: int, size: int) -> None:
        from attnplug import ops

        q, k, v = self.qkv(batch, 1, size)
        codes, steps = new(*k.shape, dtype=torch.int8), new(*k.shape[:3], dtype=FP32)
        kept = {"sink": 16, "window": 256, "lengths": new(batch)}
        ops.top_tokens(q, codes, steps, 2048, **kept)
        index = new(batch, self.kv_heads, 1, 2048)
        ops.gather_tokens_attention(q, k, v, index, scale=0.1, **kept)

    def sketch(self, batch: int, size: int) -> None:
        from attnplug import ops

        q, k, v = self.qkv(batch, 1, size)
        basis, made = sketched(batch, self.kv_heads, size, self.width)
        ops.encode_keys(k, v, basis[0], *made, lengths=new(batch))
        recent = new(batch, self.heads, 520, self.width, dtype=self.dtype)
        hint = new(batch, self.kv_heads, dtype=FP32)
        ops.sketch_decode(
            *(q, k, v, *basis, *made),
            scale=0.1, lengths=new(batch), new=self.token(batch), recent=recent, hint=hint,
        )  # fmt: skip

    def sketch_host(self, size: int) -> None:
        from attnplug import ops

        q, k, v = self.qkv(1, 1, size)
        basis, made = sketched(1, self.kv_heads, size, self.width)
        fixed = ops.FixedPart(
            new(1, self.kv_heads, 2, 640, self.width, dtype=self.dtype), new(1, self.kv_heads, 2)
        )
        options = {"scale": 0.1, "lengths": new(1), "new": self.token(1)}
        ops.sketch_host_decode(q, k, v, *basis, *made, fixed, **options)

    def certified(self, batch: int, size: int, block: int = 64) -> None:
        from attnplug import ops

        q, k, v = self.qkv(batch, 1, size)
        tier = tier_of(ops.QuantizedKV, k, block)
        ops.quantize_kv(k, v, tier, block=block, lengths=new(batch))
        rows = batch, self.kv_heads, self.heads // self.kv_heads, 18
        telemetry = new(*rows, dtype=torch.float64)
        options = {"scale": 0.1, "lengths": new(batch), "telemetry": telemetry}
        ops.certified_attention(q, k, v, tier, block=block, **options)

    def stream(self, size: int, search: str) -> None:
        from attnplug import ops

        q, k, v = self.qkv(1, size, size)
        index, _ = ops.stream_mask(q, k, search=search)
        ops.stream_edges(q, k, v, index, scale=0.1)

    def elementwise(self, batch: int, tokens: int) -> None:
        from attnplug.ops.layer import gated, rms_norm, rotate

        hidden = self.heads * self.width
        x = new(batch, tokens, hidden, dtype=self.dtype)
        rms_norm(x, new(hidden, dtype=self.dtype), 1e-6)
        heads = new(batch, tokens, self.heads, self.width, dtype=self.dtype)
        rms_norm(heads, new(self.width, dtype=self.dtype), 1e-6, unit_offset=True)
        q, k, _ = self.qkv(batch, tokens, tokens)
        cos = new(1, tokens, self.width, dtype=self.dtype)
        rotate(q, k, cos, cos)
        for activation in ("silu", "gelu_tanh"):
            wide = new(batch, tokens, 4 * hidden, dtype=self.dtype)
            gated(wide, wide, activation)

    # ---- the cases --------------------------------------------------------------------------

    def few(self) -> Iterator[Case]:
        """Those that have been over a limit, or may be."""
        yield Case("dense decode, 32K", lambda: self.decode(1, 32768))
        yield Case("norms, rotary, activations", lambda: self.elementwise(1, 32768))
        yield Case("norms, rotary, activations of a step", lambda: self.elementwise(8, 1))
        yield Case("dense decode, pages", self.decode_pages)
        yield Case("dense chunk of 32K", lambda: self.flash(1, 2048, 32768, lengths=new(1)))
        yield Case("momo 32K", lambda: self.momo(32768, 128, 16))
        yield Case("gather 32K, batch 64", lambda: self.gather(64, 32768))
        yield Case("gather, pages of 8 rows", lambda: self.gather_pages(8))
        yield Case("gather 128K on the host", lambda: self.gather_host(131072))
        if self.dtype == BF16:
            for rows in (1, 8):
                name = f"gather, fp8 pages, batch {rows}"
                yield Case(name, lambda rows=rows: self.gather_fp8(rows), fp8=True)
        if self.width <= 256:
            yield Case("gvr 32K", lambda: self.gvr(1, 32768))

    def all(self) -> Iterator[Case]:
        yield from self.few()
        for batch, size in ((1, 4096), (1, 131072), (8, 32768)):
            name = f"dense decode, {size >> 10}K, batch {batch}"
            yield Case(name, lambda batch=batch, size=size: self.decode(batch, size))
        yield Case("dense padded decode", lambda: self.decode(2, 32768, key_mask=mask(2, 32768)))
        yield Case("dense padded prompt", lambda: self.flash(2, 4096, 4096, **padding(2, 4096)))
        yield Case("momo 16K", lambda: self.momo(16384, 64, 16))
        yield Case("momo 128K", lambda: self.momo(131072, 128, 32))
        yield Case("gather 128K", lambda: self.gather(1, 131072))
        yield Case("gather 128K, batch 8", lambda: self.gather(8, 131072))
        yield Case("gather, pages of a row", lambda: self.gather_pages(1))
        yield Case("gvr 128K, batch 8", lambda: self.gvr(8, 131072))
        yield Case("sketch 128K", lambda: self.sketch(1, 131072))
        yield Case("sketch 32K, batch 8", lambda: self.sketch(8, 32768))
        yield Case("sketch 128K on the host", lambda: self.sketch_host(131072))
        yield Case("certified 128K", lambda: self.certified(1, 131072))
        yield Case("certified 32K, batch 8", lambda: self.certified(8, 32768))
        yield Case("stream by bounds", lambda: self.stream(32768, "bounds"))
        yield Case("stream by branches", lambda: self.stream(8192, "branches"))


def mask(batch: int, size: int) -> torch.Tensor:
    return new(batch, size, dtype=torch.bool)


def op_cases(quick: bool) -> Iterator[Case]:
    """Those of ops that no layer above calls, or few of them."""
    from attnplug import ops

    for name, few in OPS.items():
        for title, call in CASES[name](getattr(ops, name)):
            if title in few or not quick:
                yield Case(f"{name}, {title}", call, fp8="fp8" in title)


def model_cases(quick: bool, only: str | None) -> Iterator[Case]:
    """All cases, or few of two models; of those whose name has `only` in it."""
    for model in QUICK if quick else MODELS:
        for dtype in (BF16, FP32):
            layer = Layer(*MODELS[model], dtype)
            # In float32 the largest heads ask for the most, and so they stand for all.
            if dtype == FP32 and (quick or layer.width < 128):
                continue
            for case in layer.few() if quick else layer.all():
                name = f"{model}, {case.name}" + (" float32" if dtype == FP32 else "")
                if only is None or only in name:
                    yield case._replace(name=name)
    for name, heads in () if quick else WIDTHS.items():
        for case in Layer(*heads, BF16).few():
            if only is None or only in f"{name}, {case.name}":
                yield case._replace(name=f"{name}, {case.name}")
    yield from (case for case in op_cases(quick) if only is None or only in case.name)
    if quick:  # and what was over a limit in float32
        largest, usual = (Layer(*MODELS[name], FP32) for name in ("Gemma-3-4B", "Qwen2.5-7B"))
        size = 1, 2048, 32768
        for case in (
            Case("Gemma-3-4B, gvr 16K float32", lambda: largest.gvr(1, 16384)),
            Case("Qwen2.5-7B, chunk of 32K float32", lambda: usual.flash(*size, lengths=new(1))),
        ):
            if only is None or only in case.name:
                yield case
