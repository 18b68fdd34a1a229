"""transformers' sdpa of a sliding window's prompt, band by band."""

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

BAND = 1024  # queries of a sliding-window layer that attend together; fewer fill no GPU


def sdpa_in_bands(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa, `[B,T,Hq,D]`, and where that is shorter band by band: queries of a band
    in a sliding-window layer see no key more than a window before it, so time is T (band + window)
    instead of T T."""
    if mask is None or not _pays_in_bands(q, k, mask, kwargs):
        return sdpa_attention_forward(module, q, k, v, mask, **kwargs)[0], None
    window, tokens = kwargs["sliding_window"], q.shape[2]
    band = max(BAND, window)
    out = []
    for begin in range(0, tokens, band):
        queries = slice(begin, begin + band)
        keys = slice(max(0, begin - window) // 64 * 64, begin + band)  # kernels like it aligned
        rows = q[:, :, queries], k[:, :, keys], v[:, :, keys], mask[..., queries, keys]
        out.append(sdpa_attention_forward(module, *rows, **kwargs)[0])
    return torch.cat(out, 1), None


def _pays_in_bands(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, kwargs: dict[str, Any]
) -> bool:
    """Whether a long first prefill of a sliding-window layer can leave out what no query sees.
    Traced code would be compiled anew for every number of bands."""
    window = kwargs.get("sliding_window")
    if window is None or torch.compiler.is_compiling():
        return False
    square = mask.shape[-2:] == (q.shape[2], k.shape[2]) and q.shape[2] == k.shape[2]
    return square and q.shape[2] > 2 * max(BAND, window)
