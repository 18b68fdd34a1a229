"""The other implementations that the ops are timed against, called as a user would call them."""

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from attnplug.bench.quick import attend_by_torch

# FlashAttention-3 as the PyPI wheel vllm 0.20.2 ships it (torch 2.11, CUDA 13): copy that one file
# here to bench against it. It is never committed.
FA3_LIBRARY = Path(__file__).resolve().parent.parent / ".peers" / "_vllm_fa3_C.abi3.so"


# MInference's block-sparse prefill (github.com/microsoft/MInference, MIT, commit of 2025-08-11):
# its minference/ops/block_sparse_flash_attention.py, copied here. Never committed either.
MINFERENCE = FA3_LIBRARY.with_name("minference_block_sparse.py")


def minference_block_sparse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, top_k: int
) -> Callable[[], torch.Tensor]:
    """Its whole block-sparse pipeline: mean-pooled blocks of 64 queries and keys, the top_k best
    of each row, one attention kernel. It wants K and V repeated for every query head, which is
    done beforehand and not timed."""
    name = MINFERENCE.stem
    spec = importlib.util.spec_from_file_location(name, MINFERENCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton finds a kernel's globals through it
    spec.loader.exec_module(module)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return functools.partial(module.block_sparse_attention, q, k, v, top_k)


def cudnn_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """cuDNN's SDPA without a mask, heads grouped by cuDNN itself: the fastest dense decode of
    torch 2.11 on Hopper (packing the group into query rows instead is ten times slower). k and v
    are cut to the valid length, which the host must know."""
    return attend_by_torch("cudnn", q, k, v, scale, False)


def causal_peers() -> list[str]:
    """The peers for causal prefill that this checkout has."""
    return ["cudnn", "fa3"] if FA3_LIBRARY.exists() else ["cudnn"]


def causal(
    peer: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> Callable[[], torch.Tensor]:
    """A zero-argument function that runs causal attention, inputs laid out as the peer likes."""
    return {"cudnn": _cudnn_causal, "fa3": _fa3_causal}[peer](q, k, v, scale)


def _cudnn_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> Callable[[], torch.Tensor]:
    return functools.partial(attend_by_torch, "cudnn", q, k, v, scale, True)


def _fa3_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> Callable[[], torch.Tensor]:
    torch.ops.load_library(str(FA3_LIBRARY))
    batch, _, tokens, _ = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v))
    ends = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=q.device)

    def run() -> torch.Tensor:
        out, *_ = torch.ops._vllm_fa3_C.fwd(
            q, k, v,
            None, None, None, None,  # new keys, new values, q of values, out
            ends, ends, None, None, None,  # row ends of q and k, of new keys; lengths used
            tokens, tokens,
            None, None, None, None, None, None,  # page table, batch index, padding, rotary
            None, None, None,  # scales of fp8
            scale, True, -1, -1, 0.0,  # causal, window, softcap
            True, None, 1, None, 0, None, 1, 0, None,  # rotary kind, scheduler, one split
        )  # fmt: skip
        return out

    return run
