"""One rank of the faults in tests/contract/test_pieces.py: calls that differ between ranks, or that
one of them cannot serve, and at last a rank that ends on the way. What every call raised goes to
`FOLDER/found-RANK.json`."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from compile_once import share_references
from torch.distributed.device_mesh import init_device_mesh

import attnplug
from attnplug.testing import tiny_model

TOKENS = 64


def raised_by(call: Callable[[], Any]) -> list[Any]:
    """[error, message, seconds]"""
    begun = time.monotonic()
    try:
        call()
    except attnplug.AttnplugError as error:
        return [type(error).__name__, str(error), time.monotonic() - begun]
    return ["", "", time.monotonic() - begun]


def faults(rank: int, mesh: Any) -> dict[str, list[Any]]:
    model = attnplug.apply(tiny_model(), "dense")
    other = attnplug.apply(tiny_model(seed=1), "dense")
    ids = torch.arange(2, 2 + TOKENS)[None]
    padded = torch.ones_like(ids)
    padded[0, :rank] = 0
    second = rank == 1

    def prefill(model=model, ids=ids, mask=None, **options):
        return lambda: attnplug.prefill(model, ids, mask, mesh=mesh, **options)

    found = {
        "lengths": raised_by(prefill(ids=ids[:, rank:])),
        "tokens": raised_by(prefill(ids=ids + rank)),
        "models": raised_by(prefill(other if second else model)),
        "rooms": raised_by(prefill(max_length=TOKENS + rank)),
        "padding": raised_by(prefill(mask=padded)),
        "short": raised_by(prefill(ids=ids[:, :3])),
        "no room": raised_by(prefill(max_length=TOKENS - 1)),
        "no policy": raised_by(prefill(tiny_model())),
    }
    for name, policy in {
        "stream": "prefill=stream(top_k=2, block=16, query_block=16)",
        "off the grid": "momo(gamma=16, block=16, query_block=64, min_tokens=0)",
    }.items():
        found[name] = raised_by(prefill(attnplug.apply(tiny_model(), policy)))
    sliced = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))
    found["mesh"] = raised_by(lambda: attnplug.prefill(model, ids, mesh=sliced))
    found["named mesh"] = raised_by(lambda: attnplug.prefill(model, ids, mesh=sliced["two"]))
    return found


def killed(rank: int, mesh: Any) -> dict[str, list[Any]]:
    """What the first rank meets where the second ends between two layers."""
    model = attnplug.apply(tiny_model(), "dense")
    ids = torch.arange(2, 2 + TOKENS)[None]
    if rank == 1:
        model.model.layers[1].register_forward_pre_hook(lambda *_: os._exit(0))
    found = {"killed": raised_by(lambda: attnplug.prefill(model, ids, mesh=mesh))}
    names = {layer.self_attn.config._attn_implementation for layer in model.model.layers}
    found["names"] = [*names, "", 0.0]
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    share_references()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = faults(rank, mesh)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    found |= killed(rank, mesh)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # the other rank is gone


if __name__ == "__main__":
    main(Path(sys.argv[1]))
