"""gather's step between a model's other kernels, and over a row that is short in a large room: how
long it takes on one GPU.

    python bench/gather_room.py --out rows.jsonl [--seconds 100]

A whole model's step of the default took 20 to 37 us a layer more than the rows of its steps say
(docs/log/gather.md, 2026-11-25). Those go through one kind of step after the other, in caches as
long as their rows. Here steps of dense and of gather run by themselves, behind thirty other small
kernels and behind the products of a layer, of one or of 28 layers, whose own times are taken off,
in rooms of one and of 32 times a row; the default's also under other plans of
ops/gather/select_plan.py, after a check that these list the same blocks."""

import argparse
import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _op_rows import Rows, dense_steps, microseconds
from gather_ops import (
    DEFAULT,
    PAPER,
    Layer,
    plan_of,
    sets_of,
    time_choice,
    time_scores,
    time_steps,
)

from attnplug import Gather

ROOMS = [(1 << 15, 1 << 20), (1 << 15, 1 << 15), (1 << 17, 1 << 20)]  # tokens, room
CHOICES = [{}, {"spaced": False}, {"direct": False}]
SHORT_LIST = Gather(k=8, **PAPER)


def other_code() -> Callable[[], Any]:
    """Thirty small kernels of torch that read next to nothing: then a step's own code is no
    longer in the instruction caches."""
    x = torch.rand(64, device="cuda")
    names = "sin cos exp log tanh sigmoid sqrt rsqrt abs neg ceil floor round sign erf log2 atan"
    alone = [getattr(torch, name) for name in names.split()]
    pairs = [torch.add, torch.mul, torch.div, torch.maximum, torch.pow, torch.fmod, torch.atan2]
    along = [torch.cumsum, torch.cumprod, torch.amin, torch.argmax, torch.sum, torch.var]

    def run() -> None:
        for fn in alone:
            fn(x)
        for fn in pairs:
            fn(x, x)
        for fn in along:
            fn(x, 0)

    return run


def weights(layers: int) -> Callable[[], Any]:
    """Products with the matrices of a layer, 403 MB, of the next layer each time. With many layers
    the TLBs, too, have lost what a step reads before it comes again."""
    make = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    vector, matrices = make(8192), [make(8192, 8192) for _ in range(3 * layers)]
    following = itertools.cycle(matrices)

    def run() -> None:
        for _ in range(3):
            torch.mv(next(following), vector)

    return run


def time_room(rows: Rows, tokens: int, room: int) -> None:
    """All steps over rows of so many tokens in so much room."""
    layers = [Layer(1, tokens, seed, room) for seed in range(sets_of(1, tokens, room))]
    dense = dense_steps(layers)
    places = {
        "alone": None,
        "code": other_code(),
        "a layer's weights": weights(1),
        "28 layers' weights": weights(28),
    }
    for where, between in places.items():
        case = f"n={tokens} room={room} {where}"
        rows.attempt("dense", case, "dense", microseconds, dense, between)
        for layer in layers:
            layer.summarise(SHORT_LIST)
        rows.attempt("step", case, str(SHORT_LIST), time_steps, layers, SHORT_LIST, None, between)
        for layer in layers:
            layer.summarise(DEFAULT)
        for choice in CHOICES:
            time_choice_of_plan(rows, case, layers, choice, between)


def time_choice_of_plan(
    rows: Rows,
    case: str,
    layers: list[Layer],
    choice: dict[str, bool],
    between: Callable[[], Any] | None,
) -> None:
    """The default's step under another plan; by itself also its two first kernels."""
    base = plan_of(layers[0], DEFAULT)
    plan, name = base._replace(select=base.select._replace(**choice)), str(choice)
    rows.attempt("step", case, name, time_steps, layers, DEFAULT, plan, between)
    if between is None:
        rows.attempt("score", case, name, time_scores, layers, DEFAULT, plan.select)
        rows.attempt("select", case, name, time_choice, layers, DEFAULT, plan.select)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100, help="begin nothing after so many")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    rows = Rows(options.out, options.seconds)
    for tokens, room in ROOMS:
        time_room(rows, tokens, room)
        torch.cuda.empty_cache()
    print(f"{rows.failed} failed; {torch.cuda.get_device_name()}, torch {torch.__version__}")
    return rows.failed > 0


if __name__ == "__main__":
    sys.exit(main())
