"""A few queries at once over a long cache: gather beside dense, one layer of Qwen2.5-7B's heads.

    python bench/few_queries.py --tokens 131072,1000000 --queries 1,2,4,8,16 --out rows.jsonl

Random keys fill the cache. A row has the microseconds of a call of the policy as a user's own loop
makes it (`eager_us`, the host among them), and of the same call in a CUDA graph (`graph_us`).
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import attnplug
from attnplug.call import AttentionCall
from attnplug.models.hf import binding_of

HEADS, KV_HEADS, WIDTH, CALLS = 28, 4, 128, 50
CONFIG = Qwen2Config(
    hidden_size=HEADS * WIDTH, num_hidden_layers=1, num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, intermediate_size=256, vocab_size=1000,
    max_position_embeddings=1 << 20, dtype="bfloat16",
)  # fmt: skip


@torch.inference_mode()
def timed(model: Any, policy: str, tokens: int, queries: int) -> dict[str, Any]:
    with attnplug.applied(model, policy):
        layer = attnplug.make_cache(model, tokens + 64).layers[0]
        empty = torch.empty((1, KV_HEADS, 0, WIDTH), dtype=model.dtype, device="cuda")
        layer.lazy_initialization(empty, empty)
        keys, values = layer._buffers()[:2]
        for buffer in (keys, values):
            buffer[:, :, :tokens].normal_()
        layer.cumulative_length.fill_(tokens)
        layer.counted = tokens
        if hasattr(layer, "summarise"):
            layer.summarise(None, None)
        binding: Any = binding_of(model.model.layers[0].self_attn)
        q = torch.randn((1, HEADS, queries, WIDTH), dtype=model.dtype, device="cuda")

        def once() -> str:
            lengths = layer.cumulative_length.reshape(1)
            call = AttentionCall(q, keys, values, WIDTH**-0.5, lengths=lengths, state=layer)
            binding.policy.attend(call)
            return call.served_by

        served = [once() for _ in range(5)][-1]
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(CALLS):
            once()
        torch.cuda.synchronize()
        eager = (time.perf_counter() - begun) / CALLS
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once()
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        replay = begin.elapsed_time(end) / CALLS
    return {
        "policy": policy, "n": tokens, "queries": queries, "served_by": served,
        "eager_us": round(eager * 1e6, 1), "graph_us": round(replay * 1e3, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="131072,1000000")
    parser.add_argument("--queries", default="1,2,4,8,16")
    parser.add_argument("--policies", default="dense;gather(min_tokens=0)")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(CONFIG).to(torch.bfloat16).eval()
    for tokens in map(int, asked.tokens.split(",")):
        for queries in map(int, asked.queries.split(",")):
            for policy in asked.policies.split(";"):
                row = timed(model, policy, tokens, queries)
                row |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
                print(json.dumps(row), flush=True)
                if asked.out is not None:
                    with asked.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
