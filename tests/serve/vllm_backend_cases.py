"""A layer of vLLM's on a CPU, and the batches that it is given: vLLM's FlashAttention classes with
torch in the place of its two kernels."""

import itertools
import types

import torch

from attnplug.serve.vllm.options import REQUESTS

HEADS, KV_HEADS, WIDTH, PAGE, PAGES = 4, 2, 64, 16, 80
COVERING = "momo(min_tokens=64, top_k=512)+gather(min_tokens=100)"
NAME = "model.layers.0.self_attn.attn"


FP8 = torch.float8_e4m3fn
SCALES = {"_q_scale": 0.02, "_k_scale": 0.03, "_v_scale": 1.7}  # of a layer in fp8


def flash_attention(q, k, v, out, cu_seqlens_q, seqused_k, block_table, softmax_scale, **more):
    """What FlashAttention's varlen kernel does with a paged cache; a row of no keys gives NaN here,
    of which nothing may be seen."""
    assert q.dtype == k.dtype == v.dtype
    if k.dtype == FP8:
        whats = ((q, "q_descale"), (k, "k_descale"), (v, "v_descale"))
        q, k, v = (x.float() * more[name][0, 0] for x, name in whats)
    edges = cu_seqlens_q.tolist()
    assert edges[0] == 0 and edges[-1] <= len(q)
    for row, (first, last) in enumerate(itertools.pairwise(edges)):
        length = int(seqused_k[row])
        pages = block_table[row, : -(-length // PAGE)].long()
        out[first:last] = torch.nan
        if length and last > first:
            keys, values = (x[pages].flatten(0, 1)[:length].transpose(0, 1)[None] for x in (k, v))
            seen = torch.ones(last - first, length, dtype=torch.bool).tril(length - (last - first))
            out[first:last] = torch.nn.functional.scaled_dot_product_attention(
                q[first:last].transpose(0, 1)[None],
                keys,
                values,
                seen,
                scale=softmax_scale,
                enable_gqa=True,
            )[0].transpose(0, 1)


def quantize_queries(q, scale):
    """What vLLM's kernel does with queries `[tokens, Hq D]`."""
    assert q.dim() == 2
    return (q / scale).to(FP8), scale


def write_cache(key, value, key_cache, value_cache, slot_mapping, dtype, k_scale, v_scale):
    slots = slot_mapping[slot_mapping >= 0]
    if dtype == "fp8":
        key, value = ((x / s).to(FP8) for x, s in ((key, k_scale), (value, v_scale)))
        key, value = key.view(torch.uint8), value.view(torch.uint8)
    key_cache[slots // PAGE, slots % PAGE] = key[: len(slots)]
    value_cache[slots // PAGE, slots % PAGE] = value[: len(slots)]


def configuration(policy: str | dict, **changes):
    """What the backend reads of vLLM's configuration."""
    given = dict(
        additional_config={"attnplug": policy},
        kv_transfer_config=None,
        speculative_config=None,
        parallel_config=types.SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            dcp_comm_backend="ag",
            cp_kv_cache_interleave_size=1,
            use_ubatching=False,
            rank=0,
            world_size=1,
            data_parallel_index=0,
        ),
        cache_config=types.SimpleNamespace(cache_dtype="auto", block_size=PAGE),
        model_config=types.SimpleNamespace(
            dtype=torch.bfloat16,
            use_mla=False,
            get_total_num_hidden_layers=lambda: 100,
            model="made/up",
            runner_type="generate",
            logits_processors=[REQUESTS],
            max_model_len=512,
            is_hybrid=False,
            is_mm_prefix_lm=False,
            rswa_window=None,
            hf_config=types.SimpleNamespace(model_type="made-up"),
            get_head_size_v=lambda: WIDTH,
            get_num_attention_heads=lambda _: HEADS,
            get_num_kv_heads=lambda _: KV_HEADS,
            get_head_size=lambda: WIDTH,
        ),
        scheduler_config=types.SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256),
        compilation_config=types.SimpleNamespace(
            cudagraph_mode=types.SimpleNamespace(has_full_cudagraphs=lambda: False),
            max_cudagraph_capture_size=8,
            static_forward_context={},
        ),
        kernel_config=types.SimpleNamespace(enable_jit_warmup=False),
        attention_config=types.SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
    )
    return types.SimpleNamespace(**given | changes)


def requests_made(monkeypatch, config, tokenizer=None):
    """What tells of requests, with this tokenizer."""
    import attnplug.serve.vllm.requests as requests

    monkeypatch.setattr(requests, "cached_tokenizer_from_config", lambda _: tokenizer)
    return requests.Requests(config, torch.device("cpu"), False)


def empty_cache(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A layer's cache as FlashAttention has it in this version, heads outside of a page. Bytes are
    NaN in fp8."""
    nothing: float = 127 if dtype == torch.uint8 else torch.nan
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    shape_of = getattr(FlashAttentionBackend, "get_kv_cache_shape", None)
    stacked = () if shape_of is None else shape_of(PAGES, PAGE, KV_HEADS, WIDTH)
    if len(stacked) < 5:
        return torch.full((PAGES, KV_HEADS, PAGE, 2 * WIDTH), nothing, dtype=dtype)
    shape = *stacked[:2], KV_HEADS, PAGE, WIDTH
    return torch.full(shape, nothing, dtype=dtype).transpose(2, 3)


class Layer:
    """A layer of one row set: its backend objects, its cache, and all tokens of each row. With
    `cache` "fp8" all of these are numbers that fp8 holds, times the layer's scales."""

    def __init__(self, plug, monkeypatch, policy: str | dict, tokenizer=None, cache="auto"):
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        self.config = configuration(policy)
        flash = __import__("vllm.v1.attention.backends.flash_attn", fromlist=["x"])
        impl = __import__("attnplug.serve.vllm.impl", fromlist=["x"])
        for module in (plug, impl, flash):
            for name in ("get_current_vllm_config", "get_current_vllm_config_or_none"):
                monkeypatch.setattr(module, name, lambda: self.config, raising=False)
        fp8 = cache == "fp8"
        if fp8:
            for name in ("flash_attn_supports_fp8", "flash_attn_supports_kv_cache_dtype"):
                monkeypatch.setattr(flash, name, lambda *_, **__: True, raising=False)
            monkeypatch.setattr(impl._custom_ops, "scaled_fp8_quant", quantize_queries)
        self.config.cache_config.cache_dtype = cache
        self.impl = plug.PlugImpl(HEADS, WIDTH, 0.125, KV_HEADS, None, None, cache)
        scales = {name: torch.tensor(x if fp8 else 1.0) for name, x in SCALES.items()}
        self.layer = types.SimpleNamespace(layer_name=NAME, impl=self.impl, **scales)
        self.requests = requests_made(monkeypatch, self.config, tokenizer)
        layers = {NAME: self.layer}
        monkeypatch.setattr(plug, "get_layers_from_vllm_config", lambda *_: layers)
        shape = dict(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=WIDTH)
        stored = torch.uint8 if fp8 else torch.float32
        spec = FullAttentionSpec(dtype=stored, **shape)
        self.builder = plug.PlugBuilder(spec, [NAME], self.config, torch.device("cpu"))
        self.builder.aot_schedule = False
        self.cache = empty_cache(stored)
        order = torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(2)) + 1
        self.table = order[: 2 * 32].reshape(2, 32).to(torch.int32)
        draw = torch.Generator().manual_seed(1)
        shapes = ((2, 400, HEADS, WIDTH), (2, 400, KV_HEADS, WIDTH), (2, 400, KV_HEADS, WIDTH))
        self.q, self.k, self.v = (torch.randn(shape, generator=draw) for shape in shapes)
        if fp8:
            made = zip((self.q, self.k, self.v), scales.values(), strict=True)
            self.q, self.k, self.v = ((x / s).to(FP8).float() * s for x, s in made)

    def step(self, parts: list[tuple[int, int, int]], padding: int = 0) -> torch.Tensor:
        """One batch: row r from token `first` to `last - 1`, for each (r, first, last)."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        tokens = [(r, t) for r, first, last in parts for t in range(first, last)]
        rows, places = (torch.tensor(x) for x in zip(*tokens, strict=True))
        q, k, v = (x[rows, places] for x in (self.q, self.k, self.v))
        slots = self.table[rows, places // PAGE].long() * PAGE + places % PAGE
        q, k, v = (torch.cat([x, torch.zeros(padding, *x.shape[1:])]) for x in (q, k, v))
        slots = torch.cat([slots, torch.full((padding,), -1)])
        starts = [0]
        for _, first, last in parts:
            starts.append(starts[-1] + last - first)
        starts += [starts[-1] + n + 1 for n in range(padding)]  # as FULL graphs pad: one token each
        seen = [last for _, _, last in parts] + [0] * padding
        table = torch.cat(
            [self.table[[r for r, _, _ in parts]], torch.zeros(padding, 32, dtype=torch.int32)]
        )
        self.impl.do_kv_cache_update(self.layer, k, v, self.cache, slots)
        metadata = self.builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=torch.tensor(starts, dtype=torch.int32),
                query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
                seq_lens=torch.tensor(seen, dtype=torch.int32),
                seq_lens_cpu_upper_bound=torch.tensor(seen, dtype=torch.int32),
                num_reqs=len(seen),
                num_actual_tokens=len(q),
                max_query_len=max(last - first for _, first, last in parts),
                max_seq_len=max(seen),
                block_table_tensor=table,
                slot_mapping=slots,
            ),
        )
        out = torch.full((len(q), HEADS, WIDTH), torch.nan)
        self.impl.forward(self.layer, q, k, v, self.cache, metadata, out)
        return out[: len(tokens)]

    def exact(self, parts: list[tuple[int, int, int]]) -> torch.Tensor:
        """fp64 attention of the batch's rows."""
        made = []
        for r, first, last in parts:
            seen = torch.ones(last - first, last, dtype=torch.bool).tril(first)
            out = torch.nn.functional.scaled_dot_product_attention(
                self.q[r, first:last].double().transpose(0, 1)[None],
                self.k[r, :last].double().transpose(0, 1)[None],
                self.v[r, :last].double().transpose(0, 1)[None],
                seen,
                scale=0.125,
                enable_gqa=True,
            )
            made.append(out[0].transpose(0, 1))
        return torch.cat(made)
