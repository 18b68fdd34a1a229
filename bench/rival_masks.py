"""What the masks of other block-sparse prefills keep of exact attention, beside momo's of one size.

    python bench/rival_masks.py gemma3-270m --tokens 32768 --device cuda

Each window of prose goes through the model once, dense. In up to four of its full-attention layers
every mask is made of the same queries and keys, and reads `k` blocks of 64 keys for a block of 128
queries, beside the first block and the query block's own:

- `mean-pooling`: the k blocks whose mean key has the largest product with the query block's mean
  query, as MInference's block-sparse heads choose.
- `vertical-slash`: from the attention of the prompt's last 64 queries, as MInference's heads of
  that name: k / 2 blocks along the diagonals with most of it, the same for all query blocks, and as
  many keys as k / 2 blocks have, in the columns with most of it. Columns are read key by key.
- `momo(...)` and `random_blocks`, and the best list of k blocks (`oracle`).

`captured-mass` is the share of the exact softmax over what is read, a mean over layers, heads and
query blocks; the interval is a bootstrap over windows. Adds quality rows of the study `masks` to
bench/results/masks.json, one a policy, which hold each window's value in `samples`."""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from _results import run_of, write_rows

from attnplug import Momo
from attnplug.bench.rows import policy_name
from attnplug.eval.capture import capture_layers
from attnplug.eval.control import RandomBlocks
from attnplug.eval.mass import BlockMass, block_mass, captured_mass, oracle_blocks, visible_blocks
from attnplug.eval.measure import prose_window
from attnplug.eval.stats import bootstrap_mean
from attnplug.models.layers import find_attention_layers
from attnplug.models.pretrained import load
from attnplug.policies import AttentionCall

BLOCK, QUERY_BLOCK = 64, 128
LOOKED_AT = 64  # last queries, whose attention chooses columns and diagonals
STUDY = "masks"
RESULTS = Path(__file__).parent / "results" / f"{STUDY}.json"


def blocks_of(x: torch.Tensor, size: int) -> torch.Tensor:
    """Means `[B,H,N,D]` of each `size` tokens of x `[B,H,T,D]`; a last, shorter part counts."""
    parts = x.float().split(size, 2)
    return torch.stack([part.mean(2) for part in parts], 2)


def mean_pooling(call: AttentionCall, mass: BlockMass, top_k: int) -> torch.Tensor:
    """Lists `[B,Hq,NQ,k]` of the blocks that the pooled queries and keys rank highest."""
    group = call.q.shape[1] // call.k.shape[1]
    keys = blocks_of(call.k, BLOCK).repeat_interleave(group, 1)
    scores = blocks_of(call.q, QUERY_BLOCK) @ keys.transpose(2, 3)
    return listed(scores, mass, top_k)


def listed(scores: torch.Tensor, mass: BlockMass, top_k: int) -> torch.Tensor:
    """The top_k blocks by score among those that are not read anyway, -1 where there are fewer."""
    scores = scores.masked_fill(mass.fixed() | ~mass.causal(), float("-inf"))
    best, index = scores.topk(min(top_k, scores.shape[-1]), dim=-1)
    return index.masked_fill(best == float("-inf"), -1).to(torch.int32)


def last_attention(call: AttentionCall) -> torch.Tensor:
    """The attention `[Hq,LOOKED_AT,T]` of the last queries of the one sequence."""
    tokens, group = call.q.shape[2], call.q.shape[1] // call.k.shape[1]
    keys = call.k[0].float().repeat_interleave(group, 0)
    scores = call.q[0, :, -LOOKED_AT:].float() @ keys.transpose(1, 2) * call.scale
    at = torch.arange(tokens, device=scores.device)
    return scores.masked_fill(at > at[-LOOKED_AT:, None], float("-inf")).softmax(-1)


def diagonals(attention: torch.Tensor, tokens: int) -> torch.Tensor:
    """The sum `[Hq,T]` of attention at each distance from the query."""
    at = torch.arange(tokens, device=attention.device)
    distance = (at[-LOOKED_AT:, None] - at).clamp(min=0)
    seen = attention * (at <= at[-LOOKED_AT:, None])
    found = attention.new_zeros(len(attention), tokens)
    return found.scatter_add_(1, distance.flatten().expand(len(attention), -1), seen.flatten(1))


def slash_blocks(score: torch.Tensor, mass: BlockMass, count: int) -> torch.Tensor:
    """Lists `[1,Hq,NQ,count]`: the blocks that the best bands of 64 diagonals pass through, three
    of each query block. Best bands first, until `count` distances are had."""
    heads, rows = len(score), len(mass.query_blocks)
    bands = torch.nn.functional.pad(score, (0, -score.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    order = bands.sum(-1).argsort(dim=-1, descending=True).tolist()
    index = torch.full((1, heads, rows, count), -1, dtype=torch.int32)
    first = mass.query_blocks.cpu() * (QUERY_BLOCK // BLOCK)
    for head, best in enumerate(order):
        touched = (each for band in best for each in (band + 1, band, band - 1) if each > 0)
        far = torch.tensor(list(itertools.islice(dict.fromkeys(touched), count)), dtype=torch.int64)
        found = first[:, None] - far
        index[0, head, :, : len(far)] = found.masked_fill(found < 0, -1).to(torch.int32)
    return index.to(score.device)


def vertical_slash(call: AttentionCall, mass: BlockMass, top_k: int) -> float:
    """What the mask keeps: its diagonals' blocks, and of all other blocks its columns."""
    attention, tokens = last_attention(call), call.q.shape[2]
    seen = visible_blocks(mass, slash_blocks(diagonals(attention, tokens), mass, top_k // 2))
    columns = attention.sum(1).topk(min(tokens, top_k // 2 * BLOCK), dim=-1).indices
    group, kept = call.q.shape[1] // call.k.shape[1], captured_by(mass, seen)
    at = torch.arange(tokens, device=call.q.device)
    for head, (row, number) in itertools.product(
        range(call.q.shape[1]), enumerate(mass.query_blocks.tolist())
    ):
        queries = slice(number * QUERY_BLOCK, min((number + 1) * QUERY_BLOCK, tokens))
        scores = call.q[0, head, queries].float() @ call.k[0, head // group].float().T * call.scale
        weights = scores.masked_fill(at > at[queries, None], float("-inf")).softmax(-1).mean(0)
        weights = weights.masked_fill(seen[0, head, row].repeat_interleave(BLOCK)[:tokens], 0.0)
        kept[0, head, row] += weights[columns[head]].sum()
    return kept.mean().item()


def captured_by(mass: BlockMass, seen: torch.Tensor) -> torch.Tensor:
    return (mass.values * seen).sum(-1)


def measure(call: AttentionCall, top_k: int) -> dict[str, float]:
    """Policy: captured mass, of one layer."""
    shape = {"query_block": QUERY_BLOCK, "block": BLOCK}
    mass = block_mass(call.q, call.k, scale=call.scale, dtype=torch.float32, **shape)
    momo, control = Momo(top_k=top_k, min_tokens=0, **shape), RandomBlocks(top_k=top_k, **shape)
    masks = {
        policy_name(momo): momo.select(call).blocks,
        f"random_blocks(k={top_k})": control.select(call).blocks,
        f"mean-pooling(k={top_k})": mean_pooling(call, mass, top_k),
        f"oracle(k={top_k})": oracle_blocks(mass, top_k),
    }
    found = {name: captured_mass(mass, index).mean().item() for name, index in masks.items()}
    return found | {f"vertical-slash(k={top_k})": vertical_slash(call, mass, top_k)}


def layers_of(model: Any, count: int) -> list[int]:
    """Up to `count` layers with full attention, spread over all, as `captured-mass` takes them."""
    served = [layer.index for layer in find_attention_layers(model) if not layer.reason]
    return sorted({served[int((i + 0.5) * len(served) / count)] for i in range(count)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--blocks", default="16,64", help="budgets k")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file to add rows to")
    options = parser.parse_args()
    model, tokenizer = load(options.model, device=options.device)
    model = model.float()
    samples: dict[str, list[float]] = {}
    for number in range(options.windows):
        ids = prose_window(tokenizer, options.tokens, number).to(options.device)
        calls = capture_layers(model, ids, layers_of(model, options.layers)).values()
        for top_k in map(int, options.blocks.split(",")):
            found = [measure(call, top_k) for call in calls]
            for policy in found[0]:
                value = sum(each[policy] for each in found) / len(found)
                samples.setdefault(policy, []).append(value)
                print(number, policy, round(value, 4), flush=True)
    run = run_of(torch.device(options.device).type)
    write(options.results, options.model, options.tokens, samples, run)


def write(
    path: Path, model: str, tokens: int, samples: dict[str, list[float]], run: dict[str, str]
) -> None:
    """Put the rows into the file, in the place of those that ask the same."""
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    for policy, values in samples.items():
        mean, key = bootstrap_mean(values), (policy, model, tokens)
        known = [row for row in known if (row["policy"], row["model"], row["n"]) != key]
        known.append({
            "study": STUDY, "task": "captured-mass", "model": model, "n": tokens,
            "trials": len(values), "policy": policy, "dense": 1.0, "value": mean.value,
            "low": mean.low, "high": mean.high, "samples": values, **run,
        })  # fmt: skip
    write_rows(path, known)


if __name__ == "__main__":
    main()
