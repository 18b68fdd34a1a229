"""FlashAttention 3 for transformers where its package is not: vLLM's build of it (peers.py), under
the names and arguments that transformers looks for.

transformers 5.17 to 5.23 imports the functions of `flash_attn_interface`. It believes in them where
importlib finds that module, and importlib.metadata says that `flash-attn-3` brought it. Within
`flash_attention_3()` both are so; `attending_by_flash` asks a model for it, too.

vLLM's build takes only rows of several lengths, and appends no keys. `flash_attn_func` counts its
rows, then. `flash_attn_with_kvcache` writes new keys by one small launch before it attends, which
FlashAttention's own build does in the same launch: an honest stand-in, a few microseconds slower.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import peers
import torch
import triton
import triton.language as tl
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.utils import import_utils

MODULE, DISTRIBUTION = "flash_attn_interface", "flash-attn-3"
NAME = "flash_attention_3"  # what a model is asked for
PACKAGES = ("flash_attn", MODULE, "kernels")  # from which transformers would get it


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """q `[N,Hq,D]`, k and v `[M,Hkv,D]`: rows side by side, which end where `cu_seqlens` say."""
    return peers.fa3(
        q,
        k,
        v,
        ends_q=cu_seqlens_q,
        ends_k=cu_seqlens_k,
        longest_q=max_seqlen_q,
        longest_k=max_seqlen_k,
        scale=scale_of(q, softmax_scale),
        causal=causal,
        window=window_size,
        softcap=softcap,
        sinks=s_aux,
    )


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> torch.Tensor:
    """q `[B,Sq,Hq,D]`, k and v `[B,Sk,Hkv,D]`, options as of `flash_attn_varlen_func`."""
    batch, tokens, keys = len(q), q.shape[1], k.shape[1]
    ends_q, ends_k = (
        torch.arange(0, (batch + 1) * n, n, dtype=torch.int32, device=q.device)
        for n in (tokens, keys)
    )
    rows = (x.flatten(0, 1) for x in (q, k, v))
    out = flash_attn_varlen_func(*rows, ends_q, ends_k, tokens, keys, **options)
    return out.unflatten(0, (batch, tokens))


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token a request: q `[B,1,Hq,D]`, new k and v `[B,1,Hkv,D]`, which go to the pages
    `[pages,page,Hkv,D]` behind the `cache_seqlens` `[B]` tokens that are there."""
    return peers.fa3(
        q,
        k_cache,
        v_cache,
        lengths=append(k_cache, v_cache, k, v, cache_seqlens, block_table),
        table=block_table,
        scale=scale_of(q, softmax_scale),
        causal=causal,
        window=window_size,
        softcap=softcap,
        sinks=s_aux,
    )


def scale_of(q: torch.Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


# --- new keys and values --------------------------------------------------------------------------


def append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cached: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    """Write the new keys and values of each row. Returns how many tokens it has then, in int32. One
    launch, which a CUDA graph may hold; a row that pads the batch has -1 cached tokens."""
    (rows, tokens, heads, dim), page = k.shape, k_cache.shape[1]
    assert tokens == 1 and k_cache.stride() == v_cache.stride()
    assert {x.stride(-1) for x in (k_cache, k, v, table)} == {1}
    lengths = torch.empty(rows, dtype=torch.int32, device=k.device)
    append_kernel.run(
        grid=(rows,),
        warmup=False,
        k_cache=k_cache,
        v_cache=v_cache,
        k=k,
        v=v,
        cached=cached,
        table=table,
        lengths=lengths,
        cache_strides=k_cache.stride()[:3],
        k_strides=(k.stride(0), k.stride(2)),
        v_strides=(v.stride(0), v.stride(2)),
        table_stride=table.stride(0),
        PAGE=page,
        D=dim,
        SIZE=heads * dim,
        PADDED=triton.next_power_of_2(heads * dim),
        **{"num_warps": 4},
    )
    return lengths


@triton.jit
def append_kernel(
    k_cache,
    v_cache,
    k,
    v,
    cached,
    table,
    lengths,
    cache_strides,  # page, token, head
    k_strides,  # row, head
    v_strides,
    table_stride,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A program writes a row's key and value, all heads."""
    row = tl.program_id(0).to(tl.int64)
    before = tl.load(cached + row).to(tl.int32)
    tl.store(lengths + row, tl.maximum(before + 1, 0))
    if before >= 0:
        channel = tl.arange(0, PADDED)
        head, inside = channel // D, channel < SIZE
        page = tl.load(table + row * table_stride + before // PAGE).to(tl.int64)
        to = page * cache_strides[0] + (before % PAGE) * cache_strides[1]
        to += head * cache_strides[2] + channel % D
        key = tl.load(k + row * k_strides[0] + head * k_strides[1] + channel % D, mask=inside)
        value = tl.load(v + row * v_strides[0] + head * v_strides[1] + channel % D, mask=inside)
        tl.store(k_cache + to, key, mask=inside)
        tl.store(v_cache + to, value, mask=inside)


# --- what transformers asks -----------------------------------------------------------------------


def is_needed() -> bool:
    """Whether transformers has no flash attention of its own here."""
    return not any(find_spec(name) for name in PACKAGES)


@contextmanager
def flash_attention_3() -> Iterator[None]:
    """transformers finds FlashAttention 3 within. Raises as `peers.load_fa3` where the library is
    missing, RuntimeError where a package is there, which then is the one to use."""
    if not is_needed():
        raise RuntimeError(f"no stand-in where one of {PACKAGES} is installed")
    peers.load_fa3()
    module = ModuleType(MODULE)
    module.__spec__ = ModuleSpec(MODULE, None)  # importlib asks a module in sys.modules for it
    for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache):
        setattr(module, function.__name__, function)
    origins = distributions()
    sys.modules[MODULE], origins[MODULE] = module, [DISTRIBUTION]
    forget_answers()
    try:
        yield
    finally:
        del sys.modules[MODULE], origins[MODULE]
        forget_answers()


def distributions() -> dict[str, list[str]]:
    """The dictionary in which transformers looks up what brought a module; a function keeps it from
    5.23 on."""
    if hasattr(import_utils, "PACKAGE_DISTRIBUTION_MAPPING"):
        return import_utils.PACKAGE_DISTRIBUTION_MAPPING
    return import_utils._package_distribution_mapping()


def forget_answers() -> None:
    """Have transformers look again, and import again: it keeps both for the life of a process."""
    import_utils.is_flash_attn_3_available.cache_clear()
    flash_utils._loaded_implementation = None


@contextmanager
def attending_by_flash(model: Any) -> Iterator[Any]:
    """The model attends by the stand-in within, and as before afterwards."""
    before = model.config._attn_implementation
    with flash_attention_3():
        model.set_attn_implementation(NAME)
        try:
            yield model
        finally:
            model.set_attn_implementation(before)
