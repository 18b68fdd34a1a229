"""Which of a step's pages are near already: those that the steps before listed, and those that a
query foreseen from the layer in front would list.

    python bench/page_turnover.py smollm2-135m --tokens 8192 --k 16

Each window of prose goes through the model once, dense. The queries of its last positions then list
pages as gather's default does, in every layer. Of a step's pages, means over layers, steps and
KV heads:

    listed-1, -8, -32     the share that one of so many steps before listed, too
    foreseen              the share that the query lists which this layer would make of the input of
                          the layer in front: what a fetch ahead could bring while that layer runs
    foreseen-or-listed-8  the share of either

Slots for a cache in host memory hold about eight lists at 1M tokens. Adds quality rows of the study
`page-turnover` to bench/results/page-turnover.json; the interval is a bootstrap over windows."""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from _results import run_of, write_rows
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from attnplug import Gather
from attnplug.bench.rows import policy_name
from attnplug.eval.capture import capture_layers
from attnplug.eval.measure import prose_window
from attnplug.eval.stats import bootstrap_mean
from attnplug.models.pretrained import load
from attnplug.policies import AttentionCall

STEPS, SPANS = 64, (1, 8, 32)  # positions that are measured have all spans in front of them
RESULTS = Path(__file__).parent / "results" / "page-turnover.json"
Pages = list[set[int]]  # of each KV head


def inputs_of(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """What goes into each layer at the last positions, `[1,STEPS,hidden]`."""
    found: list[torch.Tensor] = []

    def keep(_module: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        found.append((given[0] if given else options["hidden_states"])[:, -STEPS:].clone())

    hooks = [
        layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in model.base_model.layers
    ]
    model.base_model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def foreseen(model: Any, layer: int, before: torch.Tensor, tokens: int) -> torch.Tensor:
    """The queries `[1,Hq,STEPS,D]` that a layer of Llama's form makes of another layer's input."""
    own = model.base_model.layers[layer]
    query = own.self_attn.q_proj(own.input_layernorm(before))
    query = query.unflatten(-1, (-1, own.self_attn.head_dim)).transpose(1, 2)
    positions = torch.arange(tokens - STEPS, tokens)[None]
    angles = model.base_model.rotary_emb(before, positions)
    return apply_rotary_pos_emb(query, query, *angles)[0]


def listed(policy: Gather, made: AttentionCall, queries: torch.Tensor) -> list[tuple[Pages, Pages]]:
    """The pages of each step by the layer's own query, and by a foreseen one."""
    size = made.k.shape[2]
    cache = policy.cache_layer(size)
    cache.update(made.k[:, :, : size - STEPS], made.v[:, :, : size - STEPS])
    found = []
    for step, at in enumerate(range(size - STEPS, size)):
        cache.update(made.k[:, :, at : at + 1], made.v[:, :, at : at + 1])
        assert cache.keys is not None and cache.values is not None
        pages = []
        for query in (made.q[:, :, at : at + 1], queries[:, :, step : step + 1]):
            call = AttentionCall(
                query.contiguous(),
                cache.keys,
                cache.values,
                made.scale,
                lengths=cache.cumulative_length.reshape(1),
                state=cache,
            )
            if step == 0:
                policy.attend(call)  # makes the summaries of the prompt
            reads = policy.reads(call)
            assert reads is not None
            near = size // policy.block - policy.local  # the local pages, which are always near
            kept = reads.index[0, :, 0].tolist()
            pages.append([{page for page in row if policy.sink <= page < near} for row in kept])
        found.append((pages[0], pages[1]))
    return found


def shares(steps: list[tuple[Pages, Pages]]) -> dict[str, list[float]]:
    """Of each measured step and KV head the share of its pages that are near, by kind."""
    found = defaultdict(list)
    for number in range(max(SPANS), len(steps)):
        own, guessed = steps[number]
        for head, pages in enumerate(own):
            near = {}
            for span in SPANS:
                before = [step[0][head] for step in steps[number - span : number]]
                near[f"listed-{span}"] = set().union(*before)
            near["foreseen"] = guessed[head]
            near["foreseen-or-listed-8"] = guessed[head] | near["listed-8"]
            for kind, there in near.items():
                found[kind].append(len(pages & there) / len(pages))
    return found


def window_of(model: Any, ids: torch.Tensor, policy: Gather) -> dict[str, float]:
    """The shares in one window, means over its layers. The first layer has none in front."""
    count, tokens = len(model.base_model.layers), ids.shape[1]
    calls, inputs = capture_layers(model, ids, range(count)), inputs_of(model, ids)
    found = defaultdict(list)
    for layer in range(1, count):
        queries = foreseen(model, layer, inputs[layer - 1], tokens)
        for kind, each in shares(listed(policy, calls[layer], queries)).items():
            found[kind] += each
    return {kind: sum(each) / len(each) for kind, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--windows", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load(options.model, device="cpu")
    model, policy = model.float(), Gather(k=options.k, min_tokens=0)
    found = defaultdict(list)
    for number in range(options.windows):
        ids = prose_window(tokenizer, options.tokens, number).reshape(1, -1)
        with torch.inference_mode():
            for kind, share in window_of(model, ids, policy).items():
                found[kind].append(share)
                print(number, kind, round(share, 4), flush=True)
    about = {"study": "page-turnover", "policy": policy_name(policy), "dense": 1.0}
    about |= {"model": options.model, "n": options.tokens, "trials": options.windows, **run_of()}
    known = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    same = ("policy", "model", "n")
    known = [old for old in known if any(old[key] != about[key] for key in same)]
    for kind, each in found.items():
        mean = bootstrap_mean(each)
        values = {"value": mean.value, "low": mean.low, "high": mean.high}
        known.append(about | {"task": kind} | values)
    write_rows(RESULTS, known)


if __name__ == "__main__":
    main()
