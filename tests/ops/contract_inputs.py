"""What the small inputs of ops of every family are made of."""

from typing import Any

import torch
from cases import random
from paged_cases import make

Inputs = dict[str, Any]

FP8 = torch.float8_e4m3fn


def rows_of(size: int, *, mask: bool = True) -> Inputs:
    """Two rows of another length and beginning, and a mask."""
    rows = {"lengths": torch.tensor([size - 30, size]), "start": torch.tensor([0, 9])}
    return rows | ({"key_mask": torch.ones(2, size, dtype=torch.bool)} if mask else {})


def token(heads: int = 4) -> torch.Tensor:
    return random(0, 2, heads, 1, 64)


def keys(size: int) -> Inputs:
    return {name: random(seed, 2, 2, size, 64) for seed, name in enumerate("kv", 1)}


def new_token() -> tuple[torch.Tensor, torch.Tensor]:
    return random(3, 2, 2, 1, 64), random(4, 2, 2, 1, 64)


SINKS = random(2, 4)

CAPPED = {"softcap": 3.0, "sinks": SINKS}


def pages_of(room: int, page: int = 16) -> Inputs:
    """k, v, table and lengths of two rows on pages."""
    pages = make(0, [room - 14, room // 2], page=page, room=room // page, layout="tokens first")
    k, v = pages.kv.nan_to_num_()
    return {"k": k, "v": v, "table": pages.table.clamp_(min=0), "lengths": pages.lengths}


def prompt(tokens: int, size: int) -> Inputs:
    return {"q": random(0, 2, 4, tokens, 64), **keys(size)}
