"""Where vLLM keeps the keys and values of a layer: views of its cache."""

import torch
from packaging.version import Version

from attnplug.serve.paged.pages import Pages
from attnplug.serve.vllm import version

# Where FlashAttention stacks keys and values in a cache of five dimensions: outside of the pages
# before vLLM 0.23, and inside of them later.
STACKED = 0 if Version(version() or "0") < Version("0.23") else 1


def pages(kv_cache: torch.Tensor, *, heads_first: bool, stacked: int = 0) -> Pages:
    """Keys and values of a layer's cache as strided views `[pages, Hkv, page, D]`.

    kv_cache: `[pages, Hkv, page, 2 D]` in newer versions, a token's value behind its key. In older
    ones of five dimensions: keys and values are stacked along dimension `stacked`, each
    `[pages, Hkv, page, D]` where `heads_first` (vLLM's CPU backend), otherwise
    `[pages, page, Hkv, D]` (FlashAttention's, in whatever order it lies in memory).
    """
    if kv_cache.dim() == 4:
        return Pages(*kv_cache.chunk(2, -1))
    k, v = kv_cache.unbind(stacked)
    return Pages(k, v) if heads_first else Pages(k.transpose(1, 2), v.transpose(1, 2))


def flash_pages(kv_cache: torch.Tensor) -> Pages:
    """`pages` of a cache as FlashAttention has it in the installed vLLM."""
    return pages(kv_cache, heads_first=False, stacked=STACKED)
