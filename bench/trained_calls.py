"""Models that are sparse by training, through the public API: whole calls of generate, and a step
beside transformers' own.

    python bench/trained_calls.py --tokens 32768,131072 [--family deepseek_v32] --out rows.jsonl

Three layers of a family at its real widths, with few experts and random bf16 weights. `call` rows
are seconds of generate for 1 and for 65 new tokens under `trained`, prompt and all, the median of
later calls and the first one. `step` rows are a token over a cache of `tokens` tokens: ours is the
time from a call's second token to its last; transformers' is a forward pass over its dynamic cache,
which random numbers fill, as its own prefill of such a prompt asks for scores of queries by heads
by tokens.
`--family minimax_m3_vl_text` has layers that pick blocks, and `qwen4_exp_text` layers that pick
blocks by compressed keys, one of them between two of linear attention; so `glm5_next_text`, whose
layer picks pools. `deepseek_v4` has a layer of each of its three kinds. Of these two transformers'
own model reads the prompt in chunks, before its step. `--family deepseek_v3` has no indexer, so
that `dense` reads its latents.
`--prefill` lists lengths at which transformers' prefill is tried, too, and `--chunk` N has
generate read prompts in chunks of N tokens. `--profile` says how long each kernel of a call of 65
new tokens ran, and of one of 33. `--small` is for a CPU.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
)
from transformers.generation.streamers import BaseStreamer
from whole_calls import kernels

import attnplug
from attnplug.models.decode_loop import Decoding
from attnplug.models.names import CACHE

NEW = 65
SMALL = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 32,
    "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "index_n_heads": 4, "index_head_dim": 32, "index_topk": 64, "intermediate_size": 64,
    "moe_intermediate_size": 32,
}  # fmt: skip
M3, QWEN = "minimax_m3_vl_text", "qwen4_exp_text"
LATENT = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
BLOCKS = {
    "layer_types": ["minimax_m3_sparse"] * 3, "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_local_experts": 8, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
SMALL_BLOCKS = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "index_n_heads": 2, "index_head_dim": 32, "index_block_size": 16, "index_topk_blocks": 2,
    "intermediate_size": 32, "dense_intermediate_size": 64, "shared_intermediate_size": 32,
}  # fmt: skip
# Widths of the indexer as engines have them: no config of transformers says them.
POOLS = {
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 8,
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
SMALL_POOLS = {
    "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "indexer_head_dim": 32,
    "indexer_budget": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "hc_lowrank": 16,
}  # fmt: skip
ENTRIES = {
    "layer_types": [
        "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["moe"] * 3, "n_routed_experts": 8, "eos_token_id": None,
}  # fmt: skip
SMALL_ENTRIES = {
    "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "q_lora_rank": 32,
    "qk_rope_head_dim": 16, "o_groups": 2, "o_lora_rank": 32, "index_n_heads": 4,
    "index_head_dim": 32, "index_topk": 16, "moe_intermediate_size": 32, "sliding_window": 16,
}  # fmt: skip
INDEXED = {
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "indexer_types": ["full"] * 3, "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "eos_token_id": None,
}  # fmt: skip
SMALL_INDEXED = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32,
    "q_lora_rank": 32, "qk_rope_head_dim": 0, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "qk_head_dim": 32, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 64,
    "intermediate_size": 64, "moe_intermediate_size": 32, "linear_num_heads": 2,
    "linear_head_dim": 32,
}  # fmt: skip
V4, GLM = "deepseek_v4", "glm5_next_text"
OPTIONS = {
    M3: (BLOCKS, SMALL_BLOCKS), QWEN: (POOLS, SMALL_POOLS), V4: (ENTRIES, SMALL_ENTRIES),
    GLM: (INDEXED, SMALL_INDEXED),
}  # of others (LATENT, SMALL)  # fmt: skip
EYE = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32,
    "out_hidden_size": 64, "projection_intermediate_size": 32,
}  # fmt: skip
READ = V4, GLM  # whose cache keeps more than tokens, so that the model reads a prompt into it
CHUNK = 512  # tokens of it at a time: transformers' scores are queries by heads by entries


def make(family: str, small: bool, device: str) -> Any:
    kind = CONFIG_MAPPING[family]
    own, smaller = OPTIONS.get(family, (LATENT, SMALL))
    options: dict[str, Any] = {
        "num_hidden_layers": 3, "num_experts_per_tok": 4, "vocab_size": 4096, "pad_token_id": 0,
        "max_position_embeddings": 1 << 18, **own,
    }  # fmt: skip
    options |= smaller if small else {}
    if family == GLM:  # is no causal model of its own, but part of the one that sees
        whole, build = CONFIG_MAPPING["glm5_next"], AutoModelForImageTextToText
        config = whole(text_config=options, vision_config=EYE, image_token_id=1, video_token_id=2)
    else:
        config, build = kind(**options), AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device(device):
        model = build.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    return model


def wait(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock(BaseStreamer):
    """When a call's second token was there, behind all work before it. transformers' loop tells it
    as a streamer, which attnplug's loop does not take: that is listened to (`Bench.step`)."""

    def __init__(self, device: str, known: int) -> None:
        self.device, self.known, self.second = device, known, 0.0

    def put(self, value: torch.Tensor | None = None) -> None:
        self.known += 1
        if self.known == 2:
            self.second = wait(self.device)

    def end(self) -> None:
        pass


class Bench:
    def __init__(self, model: Any, family: str, device: str, out: Path, chunk: int | None):
        self.model, self.device, self.file = model, device, out.open("a")
        self.chunk = chunk
        self.about = {
            "family": family,
            "card": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        } | ({"chunk": chunk} if chunk else {})

    def row(self, **values: Any) -> None:
        line = json.dumps(self.about | values)
        print(line, flush=True)
        print(line, file=self.file, flush=True)

    def prompt(self, tokens: int, seed: int) -> torch.Tensor:
        made = torch.Generator(self.device).manual_seed(seed)
        return torch.randint(1, 4096, (1, tokens), generator=made, device=self.device)

    def call(self, tokens: int, new: int, seed: int, streamer: Clock | None = None) -> float:
        ids = self.prompt(tokens, seed)
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": new, "streamer": streamer}
        options |= {"prefill_chunk_size": self.chunk} if self.chunk else {}
        begin = wait(self.device)
        self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return wait(self.device) - begin

    def calls(self, tokens: int) -> None:
        """Rows of `trained`, and what a step of it takes."""
        for new in (1, NEW):
            first = self.call(tokens, new, 1)
            later = [self.call(tokens, new, seed) for seed in range(2, 5)]
            peak = torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else None
            self.row(
                case="call", policy="trained", n=tokens, new=new, first_s=first,
                call_s=statistics.median(later), peak_gib=peak,
            )  # fmt: skip
        step = statistics.median(self.step(tokens, seed) for seed in range(5, 8))
        self.row(case="step", policy="trained", n=tokens, step_ms=1e3 * step)

    def step(self, tokens: int, seed: int) -> float:
        """Seconds a token, from a call's second one to its last, in the loop that decoded the call
        before this one."""
        own, streams = Decoding.count_token, bool(attnplug.report(self.model).loop)
        clock = Clock(self.device, -1 if streams else 0)  # a streamer is given the prompt first

        def count_token(decoding: Decoding) -> None:
            own(decoding)
            clock.put()

        Decoding.count_token = count_token
        try:
            self.call(tokens, NEW, seed, clock if streams else None)
        finally:
            Decoding.count_token = own
        assert clock.second > 0
        return (wait(self.device) - clock.second) / (NEW - 2)

    def filled(self, tokens: int) -> DynamicCache:
        """transformers' cache with random latents and rotated keys, or keys and values, and index
        keys. Linear attention keeps no tokens, and begins anew."""
        config, cache = self.model.config, DynamicCache(config=self.model.config)
        options = {"device": self.device, "dtype": torch.bfloat16}
        for index in range(config.num_hidden_layers):
            if getattr(config, "layer_types", {index: ""})[index] == "linear_attention":
                continue
            if config.model_type in OPTIONS:
                shape = 1, config.num_key_value_heads, tokens, config.head_dim
                cache.update(torch.randn(shape, **options), torch.randn(shape, **options), index)
            if config.model_type == M3:
                keys = torch.randn(1, 1, tokens, config.index_head_dim, **options)
                cache.layers[index].update_index(keys)
                continue
            names = ("indexer_head_dim", "index_head_dim")
            width = next((vars(config)[name] for name in names if name in vars(config)), 0)
            if config.model_type == QWEN:
                positions = torch.arange(tokens, device=self.device).expand(3, 1, -1)
                cache.layers[index].indexer_position_ids = positions
            else:
                latents = torch.randn(1, 1, tokens, config.kv_lora_rank, **options)
                rope = torch.randn(1, 1, tokens, config.qk_rope_head_dim, **options)
                cache.update(latents, rope, index)
            if hasattr(cache.layers[index], "update_indexer"):
                cache.update_indexer(torch.randn(1, tokens, width, **options), index)
        return cache

    def read(self, tokens: int) -> DynamicCache:
        """transformers' cache of a prompt that the model has read, a chunk at a time."""
        cache, ids = DynamicCache(config=self.model.config), self.prompt(tokens, 1)
        with torch.no_grad():
            for chunk in ids.split(CHUNK, 1):
                self.model(chunk, use_cache=True, logits_to_keep=1, **{CACHE: cache})
        return cache

    def stock_step(self, tokens: int) -> None:
        """A forward pass of one token over a full cache, eager, as generate runs it there."""
        fill = self.read if self.about["family"] in READ else self.filled
        cache, took = fill(tokens), []
        ids = self.prompt(1, 1)
        for _ in range(6):
            begin = wait(self.device)
            with torch.no_grad():
                self.model(ids, use_cache=True, **{CACHE: cache})
            took.append(wait(self.device) - begin)
        self.row(case="step", policy="stock", n=tokens, step_ms=1e3 * statistics.median(took[1:]))

    def stock_prefill(self, tokens: int) -> None:
        try:
            self.call(tokens, 1, 1)
            seconds = statistics.median([self.call(tokens, 1, seed) for seed in (2, 3)])
            self.row(case="call", policy="stock", n=tokens, new=1, call_s=seconds)
        except torch.cuda.OutOfMemoryError as error:
            self.row(case="call", policy="stock", n=tokens, new=1, failed=str(error)[:120])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="32768,131072")
    parser.add_argument("--prefill", default="2048,8192,32768")
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--family", default="deepseek_v32")
    parser.add_argument("--out", type=Path, default=Path("/dev/null"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make(asked.family, asked.small, device)
    bench = Bench(model, asked.family, device, asked.out, asked.chunk)
    lengths = [int(each) for each in asked.tokens.split(",")]
    for tokens in lengths:
        bench.stock_step(tokens)
    shorter = [int(each) for each in asked.prefill.split(",") if each]
    for tokens in shorter:
        bench.stock_prefill(tokens)
    with attnplug.applied(bench.model, "trained"):
        for tokens in dict.fromkeys([*shorter, *lengths]):
            bench.calls(tokens)
            for new in (NEW, NEW // 2 + 1) if asked.profile else ():
                kernels(lambda: bench.call(tokens, new, 9))  # noqa: B023 - called here
        print(attnplug.report(bench.model).loop, attnplug.report(bench.model).last)


if __name__ == "__main__":
    main()
