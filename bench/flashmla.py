"""latent_attention over picked tokens beside FlashMLA's sparse kernels, on one Hopper GPU.

    python bench/flashmla.py LIBRARY --out rows.jsonl

LIBRARY is `vllm/_flashmla_C.abi3.so` of a vLLM wheel that was built for the torch at hand: with
torch 2.11 that of vLLM 0.20.2, which `bench/vllm_pack.sh` unpacks into WORK/0.20.2/tree. DeepSeek's
sizes: 128 heads, latents of 512 and 64 numbers, 2,048 picks a query. Both are compared with each
other before they are timed, in turn, with the L2 emptied by caches that rotate.

FlashMLA's prefill kernel reads latents in bfloat16, as ours does. Its decode kernel reads fp8 with
four float32 scales and a rotated part in bfloat16, 656 bytes a token, where ours reads 1,152 in
bfloat16. Its prefill kernel also takes the queries of a step, `prefill kernel` below.
"""

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import torch
from _latent_checks import HEADS, LATENT, PICKS, ROPE, SCALE, latent_inputs, picks_of, run_latent
from _op_rows import microseconds, sets_for

from attnplug.bench.provenance import provenance

PAGE = 64  # tokens of a page of FlashMLA's fp8 cache
QUARTER = 128  # channels of a scale
GREATEST = 448.0  # of float8_e4m3fn


def quantized(latents: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashMLA's fp8 pages of the latents, and what they stand for in bfloat16."""
    parts = latents.float().unflatten(-1, (-1, QUARTER))
    scales = parts.abs().amax(-1, keepdim=True) / GREATEST
    codes = (parts / scales).to(torch.float8_e4m3fn)
    stands_for = (codes.float() * scales).flatten(-2).to(latents.dtype)
    tokens = latents.shape[0] * latents.shape[1]
    pieces = [codes.flatten(-2), scales.squeeze(-1).contiguous(), rope]
    page = torch.cat([x.reshape(tokens, -1).view(torch.uint8) for x in pieces], 1)
    return page.view(-1, PAGE, 1, page.shape[1]).view(torch.float8_e4m3fn), stands_for


def joined(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `[queries,heads,576]` and keys `[tokens,1,576]` of all rows, as FlashMLA's."""
    q_latent, q_rope, latents, rope = tensors
    q = torch.cat([q_latent, q_rope], -1).flatten(0, 1).contiguous()
    return q, torch.cat([latents, rope], -1).flatten(0, 1)[:, None].contiguous()


def places(picks: torch.Tensor, tokens: int) -> torch.Tensor:
    """Picks of all rows as places in what `joined` gives, `[queries,1,picks]`."""
    rows = torch.arange(len(picks), device=picks.device, dtype=picks.dtype) * tokens
    return (picks + rows[:, None, None]).flatten(0, 1)[:, None].contiguous()


def by_prefill_kernel(tensors: tuple[torch.Tensor, ...], picks: torch.Tensor) -> Any:
    """A call of FlashMLA's prefill kernel."""
    return functools.partial(_prefill, *joined(tensors), places(picks, tensors[2].shape[1]))


def _prefill(q: torch.Tensor, keys: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    kernel = torch.ops._flashmla_C.sparse_prefill_fwd
    return kernel(q, keys, at, SCALE, LATENT, None, None, None)[0]


class Decoder:
    """A step by FlashMLA's decode kernel, whose schedule is made in the first."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], pages: torch.Tensor, picks: torch.Tensor):
        self.q = torch.cat(tensors[:2], -1).contiguous()
        self.pages, self.at = pages, places(picks, tensors[2].shape[1]).view(picks.shape)
        self.schedule: tuple[Any, Any] = (None, None)

    def __call__(self) -> torch.Tensor:
        kernel, none = torch.ops._flashmla_C.sparse_decode_fwd, (None, None, None)
        args = (self.q, self.pages, self.at, None, None, *self.schedule, *none)
        out, _, *schedule = kernel(*args, LATENT, SCALE, None)
        self.schedule = schedule[0], schedule[1]
        return out


def close(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The error as a share of the greatest number. Both round their sums to bfloat16, and their
    weights: 2^-8 each."""
    error = ((found.float() - wanted.float()).abs().max() / wanted.float().abs().max()).item()
    assert error < 2**-6, f"they differ by {error:.3g} of the greatest number"
    return error


def time_calls(calls: list[Any], one_at_a_time: bool) -> float:
    if not one_at_a_time:
        return microseconds(calls * -(-4 // len(calls)))["p50_us"]
    calls[0]()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(9):
        begin.record()
        calls[0]()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def compare(batch: int, queries: int, tokens: int) -> list[dict[str, Any]]:
    held = batch * tokens * (LATENT + ROPE) * 2
    count = min(8, sets_for(batch * queries * PICKS * (LATENT + ROPE) * 2, held))
    count = count if queries == 1 else 1
    sets = [latent_inputs(batch, queries, tokens, seed=10 * seed) for seed in range(count)]
    picks = [picks_of(batch, queries, tokens, PICKS, seed) for seed in range(count)]
    pairs = list(zip(sets, picks, strict=True))
    own = [functools.partial(run_latent, *pair) for pair in pairs]
    theirs = [by_prefill_kernel(*pair) for pair in pairs]
    shape = batch, queries, HEADS, LATENT
    variants = {"attnplug, bf16": (own, 0.0)}
    error = close(theirs[0]().view(shape), own[0]())
    variants["FlashMLA's prefill kernel, bf16"] = theirs, error
    if queries == 1:
        coded = []
        for tensors, chosen in pairs:
            pages, stands_for = quantized(*tensors[2:])
            coded.append(Decoder(tensors, pages, chosen))
            if len(coded) == 1:
                wanted = run_latent((*tensors[:2], stands_for, tensors[3]), chosen)
        error = close(coded[0]().view(shape), wanted)
        variants["FlashMLA's decode kernel, fp8"] = coded, error
    rows = []
    flops = 2.0 * batch * queries * HEADS * PICKS * (2 * LATENT + ROPE)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(3):
        for name, (calls, _) in variants.items():
            times[name].append(time_calls(calls, one_at_a_time=queries > 1))
    for name, (_, error) in variants.items():
        took = sorted(times[name])[1]
        row = {"case": f"{batch} x {queries} of {tokens}", "variant": name, "p50_us": took}
        rows.append(
            row | {"tflop_per_s": flops / took / 1e6, "error": error, "times_us": times[name]}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.ops.load_library(str(asked.library))
    cases = [(1, 1, 1 << 15), (1, 1, 1 << 17), (8, 1, 1 << 15), (8, 1, 1 << 17), (32, 1, 1 << 15)]
    cases += [(1, 4096, 1 << 15), (1, 2048, 1 << 17)]
    for case in cases:
        for row in compare(*case):
            line = json.dumps(row | provenance())
            print(line, flush=True)
            with asked.out.open("a") as file:
                print(line, file=file)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
