"""Stand-ins for what SGLang gives an attention backend, with SGLang's own names of fields and
methods: those that attnplug reads, and no others. test_sglang_real runs the same batches over
SGLang's own classes, where these are installed. FlashAttention's kernel is torch's attention."""

import dataclasses
import enum
import itertools
import types
from typing import Any

import torch

FP8 = torch.float8_e4m3fn
ForwardMode = enum.Enum("ForwardMode", "EXTEND DECODE MIXED IDLE TARGET_VERIFY")
ForwardMode.is_decode_or_idle = lambda self: self.name in ("DECODE", "IDLE")  # pyright: ignore
ForwardMode.is_extend_or_draft_extend_or_mixed = lambda self: (  # pyright: ignore
    self.name in ("EXTEND", "MIXED")
)


class AttentionType(enum.Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class RadixAttention(torch.nn.Module):
    """A layer, as the model has it."""

    def __init__(self, num_heads: int, head_dim: int, scaling: float, num_kv_heads: int, layer_id):
        super().__init__()
        self.tp_q_head_num = num_heads
        self.tp_k_head_num = self.tp_v_head_num = num_kv_heads
        self.head_dim = self.qk_head_dim = self.v_head_dim = head_dim
        self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, 0.0
        self.sliding_window_size, self.is_cross_attention = -1, False
        self.use_irope, self.xai_temperature_len = False, -1
        self.pos_encoding_mode, self.logit_capping_method = "NONE", "tanh"
        self.k_scale = self.v_scale = None
        self.attn_type = AttentionType.DECODER


class MHATokenToKVPool:
    """Keys and values of all layers, a slot a token; page 0 is for what pads batches."""

    post_capture_active = False

    def __init__(self, size: int, page_size: int, layers: int, kv_heads: int, head_dim: int, dtype):
        shape, self.dtype = (size + page_size, kv_heads, head_dim), dtype
        nothing = torch.full(shape, torch.nan).to(dtype)
        if dtype == FP8:  # stored as bytes, in which torch can write
            nothing = nothing.view(torch.uint8)
        self.k_buffer = [nothing.clone() for _ in range(layers)]
        self.v_buffer = [nothing.clone() for _ in range(layers)]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k_buffer[layer_id].view(self.dtype), self.v_buffer[layer_id].view(self.dtype)

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None) -> None:
        assert len(loc_info) == len(cache_k) == len(cache_v)
        if self.dtype == FP8:
            if k_scale is not None:
                cache_k.div_(k_scale)  # in place, as SGLang does
            if v_scale is not None:
                cache_v.div_(v_scale)
            cache_k, cache_v = (x.to(FP8).view(torch.uint8) for x in (cache_k, cache_v))
        self.k_buffer[layer.layer_id][loc_info] = cache_k
        self.v_buffer[layer.layer_id][loc_info] = cache_v


class ReqToTokenPool:
    """The slots of each request's tokens; row 0 is for what pads batches."""

    def __init__(self, size: int, max_context_len: int):
        self.size = size
        self.req_to_token = torch.zeros(size + 1, max_context_len, dtype=torch.int32)


@dataclasses.dataclass
class ForwardBatch:
    """What a backend is told of a batch."""

    forward_mode: Any
    batch_size: int
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens_cpu: torch.Tensor | None = None
    extend_seq_lens: torch.Tensor | None = None
    extend_seq_lens_cpu: list[int] | None = None
    extend_prefix_lens_cpu: list[int] | None = None
    spec_info: Any = None
    _attn_output: torch.Tensor | None = None


@dataclasses.dataclass
class FlashAttentionMetadata:
    """What FlashAttention knows of a batch."""

    cache_seqlens_int32: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    page_table: torch.Tensor
    max_seq_len_q: int = 1
    max_seq_len_k: int = 0
    scheduler_metadata: torch.Tensor | None = None


def starts_of(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def flash_attention(q, k_cache, v_cache, *, page_table, cache_seqlens, cu_seqlens_q, scale, window):
    """A row of no keys gives NaN, of which nothing may be seen."""
    out, page = torch.full_like(q, torch.nan), k_cache.shape[1]
    edges = cu_seqlens_q.tolist()
    assert edges[0] == 0 and edges[-1] == len(q)
    for row, (first, last) in enumerate(itertools.pairwise(edges)):
        seen, count = int(cache_seqlens[row]), last - first
        if seen == 0 or count == 0:
            continue
        pages = page_table[row, : -(-seen // page)].long()
        k, v = (x[pages].flatten(0, 1)[:seen].transpose(0, 1)[None] for x in (k_cache, v_cache))
        at = torch.arange(seen - count, seen)[:, None] - torch.arange(seen)
        mask = (at >= 0) & ((window < 0) | (at <= window))
        out[first:last] = torch.nn.functional.scaled_dot_product_attention(
            q[first:last].transpose(0, 1)[None], k, v, mask, scale=scale, enable_gqa=True
        )[0].transpose(0, 1)
    return out


class FlashAttentionBackend:
    """The base: it keeps a batch's metadata, writes keys, and serves all rows of a layer."""

    def __init__(self, model_runner: Any):
        self.device, self.page_size = model_runner.device, model_runner.page_size
        self.max_context_len = model_runner.model_config.context_len
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.max_num_pages = -(-self.max_context_len // self.page_size)
        self.fa_skip_kv_cache = False
        self.has_local_attention = False
        self.forward_metadata: Any = None
        self.served: list[str] = []  # which calls it had, and with how many queries

    def _table(self, rows: torch.Tensor) -> torch.Tensor:
        return self.req_to_token[rows][:, :: self.page_size] // self.page_size

    def init_forward_metadata(self, forward_batch: Any) -> None:
        lengths = forward_batch.seq_lens.to(torch.int32)
        queries = torch.ones_like(lengths)
        if not forward_batch.forward_mode.is_decode_or_idle():
            queries = torch.tensor(forward_batch.extend_seq_lens_cpu, dtype=torch.int32)
        self.forward_metadata = FlashAttentionMetadata(
            lengths,
            starts_of(queries),
            starts_of(lengths),
            self._table(forward_batch.req_pool_indices),
            max_seq_len_q=int(queries.max()),
            scheduler_metadata=torch.zeros(1),
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.graphs = {}
        self.state = FlashAttentionMetadata(
            torch.zeros(max_bs, dtype=torch.int32),
            torch.arange(max_bs + 1, dtype=torch.int32),
            torch.zeros(max_bs + 1, dtype=torch.int32),
            torch.zeros(max_bs, self.max_num_pages, dtype=torch.int32),
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        rows = forward_batch.batch_size
        if in_capture:
            self.graphs[rows] = FlashAttentionMetadata(
                self.state.cache_seqlens_int32[:rows],
                self.state.cu_seqlens_q[: rows + 1],
                self.state.cu_seqlens_k[: rows + 1],
                self.state.page_table[:rows],
            )
        made = self.forward_metadata = self.graphs[rows]
        made.cache_seqlens_int32.copy_(forward_batch.seq_lens)
        made.cu_seqlens_k.copy_(starts_of(forward_batch.seq_lens))
        made.page_table.copy_(self._table(forward_batch.req_pool_indices))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        pass

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def get_paged_mha_kv_cache(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        shape = -1, self.page_size, layer.tp_k_head_num, layer.head_dim
        return k.view(shape), v.view(shape)

    def get_fused_kv_write_buffers(self, layer: Any, forward_batch: Any) -> Any:
        return (*self.token_to_kv_pool.get_kv_buffer(layer.layer_id), forward_batch.out_cache_loc)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **given):
        return self._attend("decode", q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **given):
        return self._attend("extend", q, k, v, layer, forward_batch, save_kv_cache)

    def _attend(self, kind, q, k, v, layer, forward_batch, save_kv_cache):
        if k is not None and save_kv_cache:
            scales = layer.k_scale, layer.v_scale
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, *scales)
        self.served.append(f"{kind} {len(q)}")
        keys, values = self.get_paged_mha_kv_cache(layer)
        m = self.forward_metadata
        if keys.dtype == FP8:  # queries have no scale
            q, keys, values = q.to(FP8).float(), keys.float(), values.float()
            if layer.k_scale is not None:
                keys, values = keys * layer.k_scale, values * layer.v_scale
        made = flash_attention(
            q.contiguous().view(-1, layer.tp_q_head_num, layer.head_dim),
            keys,
            values,
            page_table=m.page_table,
            cache_seqlens=m.cache_seqlens_int32,
            cu_seqlens_q=m.cu_seqlens_q,
            scale=layer.scaling,
            window=layer.sliding_window_size,
        )
        if forward_batch._attn_output is not None:
            made = forward_batch._attn_output.view(made.shape).copy_(made)
        return made.view(-1, layer.tp_q_head_num * layer.v_head_dim)


token_pool, request_pool, forward_batch = MHATokenToKVPool, ReqToTokenPool, ForwardBatch


def server_args(**changes: Any) -> types.SimpleNamespace:
    """SGLang's arguments that attnplug reads, as `--attention-backend attnplug` leaves them."""
    whole = dict(
        attention_backend="attnplug",
        prefill_attention_backend=None,
        decode_attention_backend=None,
        speculative_algorithm=None,
        dllm_algorithm=None,
        disaggregation_mode="null",
        enable_dp_attention=False,
        attn_dp_size=1,
        dcp_size=1,
        attn_cp_size=1,
        enable_two_batch_overlap=False,
        enable_pdmux=False,
        enable_torch_compile=False,
        enable_hierarchical_cache=False,
        enable_lmcache=False,
        enable_flexkv=False,
        radix_cache_backend=None,
        enable_unified_memory=False,
        enable_kv_cache_sharding=False,
        enable_hisparse=False,
        prefill_only_disable_kv_cache=False,
        chunked_prefill_size=8192,
        cuda_graph_config=types.SimpleNamespace(prefill=types.SimpleNamespace(backend="breakable")),
    )
    assert changes.keys() <= whole.keys()
    return types.SimpleNamespace(**whole | changes)


def model_runner(layers, pool, requests, *, page_size: int, context: int) -> types.SimpleNamespace:
    """What attnplug and the base read of SGLang's model runner."""
    return types.SimpleNamespace(
        device="cpu",
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        kv_cache_dtype_str="auto",
        page_size=page_size,
        use_mla_backend=False,
        model=torch.nn.ModuleList(layers),
        model_config=types.SimpleNamespace(
            context_len=context, num_hidden_layers=len(layers), is_encoder_decoder=False
        ),
        token_to_kv_pool=pool,
        req_to_token_pool=requests,
        server_args=server_args(),
    )
