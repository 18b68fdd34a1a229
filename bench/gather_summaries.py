"""What gather's forms of a block's band lose of the attention that exact bands find, on a CPU.

    python bench/gather_summaries.py smollm2-135m --tokens 8192 [--windows 2] [--every 2]

Each window of prose goes through the model once, dense. For the last 32 positions of its layers
with full attention, `select_blocks` lists k of the blocks of 16, by three forms of summaries:

- exact: the edges as they are.
- rows: INT8 codes of a cache of rows, from the row's first block, one width for all channels.
- pages: INT8 codes of pages, two edges, with a scale for each block.

Prints a JSON line for each k and form. `mass` is the share of the exact softmax that the kept
blocks hold, `relative` that share over what exact edges keep. `p1` is the 1st percentile of
`relative` over layers, heads and positions. `overlap` is the part of the list that exact edges list
as well.
"""

import argparse
import json

import torch
from gather_mass import full_layers

from attnplug.eval.capture import capture_layers
from attnplug.eval.measure import prose_window
from attnplug.models.pretrained import load
from attnplug.ops import block_bounds, page_bounds, select_blocks
from attnplug.ops.gather.block_bounds import empty_bounds
from attnplug.ops.gather.page_bounds import empty_page_bounds
from attnplug.policies import AttentionCall

STEPS, BLOCK, SINK, LOCAL = 32, 16, 2, 4


def listed(layer: AttentionCall, form: str, k: int) -> torch.Tensor:
    """The list of each of the last positions, int32 `[Hkv,STEPS,k]`."""
    q, keys = layer.q[:, :, -STEPS:].contiguous(), layer.k.contiguous()
    options = {"scale": layer.scale, "block": BLOCK, "top_k": k, "sink": SINK, "local": LOCAL}
    options["scoring"] = "band"
    if form == "pages":
        pages = keys.unflatten(2, (-1, BLOCK))[0].transpose(0, 1).contiguous()
        state = empty_page_bounds(pages, BLOCK, 2, dtype=torch.int8)
        page_bounds(pages, state, torch.arange(keys.shape[2]), block=BLOCK, band=True)
        table = torch.arange(len(pages), dtype=torch.int32)[None]
        rows = {"lengths": torch.tensor([keys.shape[2]]), "table": table}
        return select_blocks(q, pages, state, None, **options, **rows)[0]
    coded = form == "rows"
    bounds = empty_bounds(keys, BLOCK, 1 if coded else 2, dtype=torch.int8 if coded else None)
    progress = torch.zeros(1, 2, dtype=torch.int32)
    block_bounds(keys, bounds, progress, block=BLOCK, band=True)
    return select_blocks(q, keys, bounds, progress, **options)[0]


def masses(layer: AttentionCall) -> torch.Tensor:
    """The softmax's share of each block for the last positions, `[Hq,STEPS,blocks]`."""
    size, group = layer.k.shape[2], layer.q.shape[1] // layer.k.shape[1]
    keys = layer.k[0].repeat_interleave(group, 0)
    logits = layer.q[0, :, -STEPS:] @ keys.transpose(1, 2) * layer.scale
    later = torch.arange(size) > torch.arange(size - STEPS, size)[:, None]
    shares = logits.masked_fill(later, -torch.inf).softmax(-1)
    return shares.unflatten(-1, (-1, BLOCK)).sum(-1)


def keep(layer: AttentionCall, index: torch.Tensor) -> torch.Tensor:
    """Which blocks are kept, bool `[Hkv,STEPS,blocks]`."""
    size = layer.k.shape[2]
    own = torch.arange(size - STEPS, size) // BLOCK
    j = torch.arange(size // BLOCK)
    always = (j < SINK) | ((j > own[:, None] - LOCAL) & (j <= own[:, None]))
    taken = torch.zeros(*index.shape[:2], len(j) + 1, dtype=torch.bool)
    taken.scatter_(2, index.long() % taken.shape[2], True)  # -1: the last, unused
    return taken[:, :, :-1] | always


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--k", default="16,64")
    options = parser.parse_args()
    model, tokenizer = load(options.model, device="cpu")
    model = model.float()
    layers = full_layers(model.config)[:: options.every]
    found: dict[tuple[int, str], list[tuple[torch.Tensor, ...]]] = {}
    for number in range(options.windows):
        ids = prose_window(tokenizer, options.tokens, number).reshape(1, -1)
        with torch.no_grad():
            for layer in capture_layers(model, ids, layers).values():
                shares, group = masses(layer), layer.q.shape[1] // layer.k.shape[1]
                for k in map(int, options.k.split(",")):
                    right = keep(layer, listed(layer, "exact", k))
                    best = (shares * right.repeat_interleave(group, 0)).sum(-1)
                    for form in ("exact", "rows", "pages"):
                        own = keep(layer, listed(layer, form, k))
                        mass = (shares * own.repeat_interleave(group, 0)).sum(-1)
                        same = (own & right).sum(-1) / right.sum(-1)
                        found.setdefault((k, form), []).append((mass, mass / best, same))
    for (k, form), parts in found.items():
        mass, relative, same = (
            torch.cat([x.flatten() for x in xs]) for xs in zip(*parts, strict=True)
        )
        row = {"model": options.model, "n": options.tokens, "k": k, "form": form}
        row |= {"mass": mass.mean(), "relative": relative.mean(), "overlap": same.mean()}
        row["p1"] = relative.quantile(0.01)
        known = {x: round(float(y), 4) if torch.is_tensor(y) else y for x, y in row.items()}
        print(json.dumps(known), flush=True)


if __name__ == "__main__":
    main()
