"""SGLang's own classes on a CPU, with the names of sglang_stand_in: its batches, pools, layers and
FlashAttention backend, whose kernels alone are torch's here. Its wheel has no kernels: a package
`sgl_kernel` that is empty stands in for the one that has them."""

import sys
import types
import warnings
from typing import Any

import sglang_stand_in
import torch


def _pretend_kernels() -> None:
    package, flash = types.ModuleType("sgl_kernel"), types.ModuleType("sgl_kernel.flash_attn")
    package.__path__ = []
    package.merge_state_v2 = None  # pyright: ignore
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata"):
        setattr(flash, name, None)
    sys.modules.setdefault("sgl_kernel", package)
    sys.modules.setdefault("sgl_kernel.flash_attn", flash)


_pretend_kernels()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what a CPU cannot do
    import sglang.srt.layers.attention.flashattention_backend as flash
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.layers.radix_attention import RadixAttention  # noqa: F401
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: F401
    from sglang.srt.runtime_context import get_context


class FlashAttentionBackend(flash.FlashAttentionBackend):
    """SGLang's, which notes its calls of attention."""

    def __init__(self, model_runner: Any):
        super().__init__(model_runner)
        self.served: list[str] = []

    def forward_decode(self, q, *args: Any, **given: Any):
        self.served.append(f"decode {len(q)}")
        return super().forward_decode(q, *args, **given)

    def forward_extend(self, q, *args: Any, **given: Any):
        self.served.append(f"extend {len(q)}")
        return super().forward_extend(q, *args, **given)


def attention(q, k_cache, v_cache, *, out=None, **given: Any) -> torch.Tensor:
    """In the place of `flash_attn_with_kvcache`."""
    assert given["causal"] and not given["softcap"] and given.get("sinks") is None
    assert q.dtype == k_cache.dtype == v_cache.dtype
    if q.dtype == sglang_stand_in.FP8:  # one scale for all rows and heads, or none
        scales = (given.get(name) for name in ("k_descale", "v_descale"))
        k, v = (1.0 if x is None else x.unique() for x in scales)
        q, k_cache, v_cache = q.float(), k_cache.float() * k, v_cache.float() * v
    made = sglang_stand_in.flash_attention(
        q,
        k_cache,
        v_cache,
        page_table=given["page_table"],
        cache_seqlens=given["cache_seqlens"],
        cu_seqlens_q=given["cu_seqlens_q"],
        scale=given["softmax_scale"],
        window=given["window_size"][0],
    )
    longest = given["cu_seqlens_q"].diff().max()
    assert longest <= given["max_seqlen_q"] and given["page_table"].dtype == torch.int32
    return made if out is None else out.copy_(made)


def schedule(*, batch_size: int, **_: Any) -> torch.Tensor:
    """In the place of `get_scheduler_metadata`."""
    return torch.zeros(1 + -(-batch_size // 4) * 4, dtype=torch.int32)


flash.flash_attn_with_kvcache = attention
sys.modules["sgl_kernel.flash_attn"].get_scheduler_metadata = schedule  # pyright: ignore
flash.get_device_capability = lambda *_: (9, 0)
_override = get_context().override_server_args(
    attention_backend="attnplug", device="cpu", page_size=1, chunked_prefill_size=8192
)


def server_args(**changes: Any) -> Any:
    """The arguments as SGLang resolves them; what a test changes it asks of a view beside them."""
    whole = resolved_view(_override.install() if not _override._installed else _server())
    return types.SimpleNamespace(
        **{name: getattr(whole, name) for name in vars(sglang_stand_in.server_args())} | changes
    )


def _server() -> Any:
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()


def token_pool(size: int, page_size: int, layers: int, kv_heads: int, head_dim: int, dtype) -> Any:
    pool = MHATokenToKVPool(
        size, page_size, dtype, kv_heads, head_dim, layers, "cpu", enable_memory_saver=False
    )
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(127 if buffer.dtype == torch.uint8 else torch.nan)  # in fp8 NaN's byte
    return pool


def request_pool(size: int, max_context_len: int) -> Any:
    return ReqToTokenPool(size, max_context_len, "cpu", enable_memory_saver=False)


def forward_batch(**fields: Any) -> Any:
    rows = fields["batch_size"]
    given = dict(input_ids=torch.zeros(len(fields["out_cache_loc"]), dtype=torch.int64))
    given |= dict(seq_lens_sum=int(fields["seq_lens"].sum()))
    made = ForwardBatch(**given, **fields)
    made.positions = torch.zeros(rows, dtype=torch.int64)
    return made


def model_runner(layers, pool, requests, *, page_size: int, context: int) -> Any:
    server_args()  # SGLang's backend asks the process's arguments
    attention_layer = layers[0]
    made = sglang_stand_in.model_runner(
        layers, pool, requests, page_size=page_size, context=context
    )
    made.server_args = _server()
    made.sliding_window_size = None
    made.kv_cache_dtype = pool.dtype
    made.kv_cache_dtype_str = "fp8_e4m3" if pool.dtype == sglang_stand_in.FP8 else "auto"
    made.is_draft_worker = False
    made.attention_chunk_size = None
    config = made.model_config
    config.attention_arch = AttentionArch.MHA
    config.is_local_attention_model = False
    config.head_dim = attention_layer.head_dim
    config.hf_text_config = types.SimpleNamespace(
        num_attention_heads=attention_layer.tp_q_head_num, attn_logit_softcapping=None
    )
    config.get_num_kv_heads = lambda *_: attention_layer.tp_k_head_num
    made.kv_index_translator = KVIndexTranslator(
        req_to_token=requests.req_to_token,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=pool,
        page_size=page_size,
        device="cpu",
    )
    return made
