"""The other implementations that the ops are timed against, called as a user would call them."""

import functools
import importlib.util
import lzma
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from attnplug.bench.quick import attend_by_torch

# FlashAttention-3 as the PyPI wheel vllm 0.20.2 ships it (torch 2.11, CUDA 13): copy that one file
# here to bench against it, or the .so.xz that bench/gpu_pack.sh makes. It is never committed.
FA3_LIBRARY = Path(__file__).resolve().parent.parent / ".peers" / "_vllm_fa3_C.abi3.so"
FA3_PACKED = FA3_LIBRARY.with_name(f"{FA3_LIBRARY.name}.xz")


def unpack() -> None:
    """Write each library that came to `.peers` as .xz beside it, unless it is there already."""
    for packed in sorted(FA3_LIBRARY.parent.glob("*.xz")):
        library = packed.with_suffix("")
        if not library.exists():
            own = library.with_name(f"{library.name}.{os.getpid()}")  # others may unpack it, too
            with lzma.open(packed) as read, own.open("wb") as written:
                shutil.copyfileobj(read, written)
            own.replace(library)


def load_fa3() -> None:
    """Have torch know FlashAttention-3's op. Raises FileNotFoundError where the library is missing,
    RuntimeError where it does not have the op."""
    if hasattr(torch.ops._vllm_fa3_C, "fwd"):
        return
    unpack()
    made = "bench/gpu_pack.sh makes it, and a call must carry .peers"
    if not FA3_LIBRARY.exists():
        raise FileNotFoundError(f"neither {FA3_LIBRARY} nor {FA3_PACKED.name} is there: {made}")
    torch.ops.load_library(str(FA3_LIBRARY))
    if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
        raise RuntimeError(f"{FA3_LIBRARY} has no op _vllm_fa3_C.fwd: {made}")


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
    found = FA3_LIBRARY.exists() or FA3_PACKED.exists()
    return ["cudnn", "fa3"] if found else ["cudnn"]


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
    load_fa3()
    batch, _, tokens, _ = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v))
    ends = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=q.device)
    rows = dict(ends_q=ends, ends_k=ends, longest_q=tokens, longest_k=tokens)
    return functools.partial(fa3, q, k, v, scale=scale, causal=True, splits=1, **rows)


def fa3(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    ends_q: torch.Tensor | None = None,
    ends_k: torch.Tensor | None = None,
    longest_q: int | None = None,
    longest_k: int | None = None,
    lengths: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    splits: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """FlashAttention-3's op, whose build for vLLM takes rows of several lengths only: either of
    q `[N,Hq,D]` that end at `ends_q` and k `[M,Hkv,D]` at `ends_k`; or of q `[B,Sq,Hq,D]` over
    pages `[pages,page,Hkv,D]`, by a `table` and the `lengths` of keys. 0 splits: it decides."""
    out, *_ = torch.ops._vllm_fa3_C.fwd(
        q, k, v,
        None, None, None, None,  # new keys, new values, q of values, out
        ends_q, ends_k, None, None, lengths,  # row ends of q and k, of new keys; lengths used
        longest_q, longest_k,
        table, None, None, None, None, None,  # page table, batch index, padding, rotary
        None, None, None,  # scales of fp8
        scale, causal, window[0], window[1], softcap,
        True, None, splits, None, 0, sinks, 1, 0, None,  # rotary kind, scheduler
    )  # fmt: skip
    return out
