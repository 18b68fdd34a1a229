"""`bench/ptx.py plans`: how ops cut their work on cards that are not here; compiles nothing."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _ptx_gpu import TARGETS, aim
from _ptx_inputs import CASES, KEPT, MADE
from _ptx_models import model_cases
from triton.runtime.jit import JITFunction

# Arguments and constants of kernels that a plan decides; those of a `spec` are M and N.
PLANNED = re.compile(
    r"^(\w*(TILE|STAGES|ROWS|CHUNK|PARTS?|ROOM|RING|REPEAT|AHEAD|COLUMNS|SPLITS)\w*"
    r"|splits|programs|parts|pieces|places|whole_splits|num_warps|num_stages|maxnreg|launch_pdl)$"
)
BUNDLES = ("cache", "rows", "SHAPE", "TURNS", "WHOLE_TURNS", "CHUNKS", "scanned")
OF_SPEC = ("M", "N", "DP", "D_PAD", "BLOCK")


def plans(path: Path, targets: list[str], processors: list[int]) -> int:
    """Write {card | multiprocessors | case: launches}. Without `processors` each target has its
    own, and the cases of all ops are there beside those of the models."""
    import attnplug.ops
    from attnplug.ops.common import device

    found: dict[str, list[dict[str, Any]]] = {}
    for name in targets:
        for count in processors or [TARGETS[name].processors]:
            aim(TARGETS[name]._replace(processors=count))
            device.card.cache_clear()
            for case, call in _calls(attnplug.ops, TARGETS[name].fp8, everything=not processors):
                launches: list[dict[str, Any]] = []
                JITFunction.run = _note_only(launches)  # pyright: ignore
                call()
                found[f"{name} | {count} | {case}"] = launches
                KEPT.clear()
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return 0


def _calls(ops: Any, fp8: bool, everything: bool) -> Iterator[tuple[str, Any]]:
    for case in model_cases(quick=False, only=None):
        if fp8 or not case.fp8:
            yield case.name, case.call
    for op, made in CASES.items() if everything else ():
        MADE.clear()
        for name, call in made(getattr(ops, op)):
            yield f"{op} | {name}", call


def _unbundled(kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """A launch's arguments, and what of them the bundles of `ops/common/views.py` hold."""
    for name, value in kwargs.items():
        if name == "q" and isinstance(value, tuple):
            yield name, value.at  # pyright: ignore
        elif name in BUNDLES and isinstance(value, tuple):
            prefix = "WHOLE_" if name == "WHOLE_TURNS" else ""
            yield from ((prefix + field, x) for field, x in value._asdict().items())  # pyright: ignore
        else:
            yield name, value


def _note_only(launches: list[dict[str, Any]]) -> Any:
    """What a launch does instead: note what a plan has decided."""

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        noted: dict[str, Any] = {"kernel": self.fn.__name__, "grid": [int(x) for x in grid]}
        for name, value in _unbundled(kwargs):
            if name in ("q", "Q") and isinstance(value, torch.Tensor):
                noted |= {"itemsize": value.element_size(), "width": value.shape[-1]}
            elif PLANNED.match(name) and isinstance(value, int | bool):
                noted[name] = int(value)
            elif name in ("key_mask", "KEY_MASK", "table"):
                noted[name] = value is not None
            elif name in ("spec", "SPEC"):
                noted |= {x: int(getattr(value, x)) for x in OF_SPEC if hasattr(value, x)}
        launches.append(noted)

    return run
