"""`bench/ptx.py digest`: what an H200 runs for each op, in a few characters a case, so that
bench/stale.py can tell a row whose kernels changed from a row whose helpers moved. What torch
computes has no kernel of ours: there it is the torch ops that run, in their order."""

import dataclasses
import hashlib
import importlib.util
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

REGISTER = re.compile(r"(%[a-z]+|\$L?_*\w*):\d+")
NUMBER = re.compile(r"(?<=^input )\d+ ")  # a tensor by the order in which a file's cases made it
LAUNCHED = ("grid", "shared", "warps", "maxnreg", "pdl")


def write_digests(recorded: Path, written: Path, root: Path) -> int:
    """Write {"code", "triton", "ops": {op: {case: digest}}, "defaults": {policy: {option:
    default}}} of what `record` wrote for the tree at `root`, whose package is imported.

    A case's digest is over its launches: their instructions in any order, without the names of
    registers and labels, the values they are given, and how they are cut and launched.
    """
    import triton
    from stale import ops_code

    from attnplug.policies import methods

    cases: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, launch in json.loads(recorded.read_text()).items():
        op, case, *_ = name.split(" | ")
        cases[op, case].append(_launch(launch, recorded.with_suffix(".ptx")))
    ops: dict[str, dict[str, str]] = defaultdict(dict)
    for (op, case), launches in sorted(cases.items()):
        ops[op][case] = _short("\n".join(launches))
    bases = _torch_ops_of_bases()
    if bases:
        ops["fit_bases"] = {"two layers": bases}
    defaults = {name: _defaults(method) for name, method in sorted(methods().items())}
    found = {"code": ops_code(root), "triton": triton.__version__}
    found |= {"ops": ops, "defaults": defaults}
    written.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _launch(launch: dict[str, Any], texts: Path) -> str:
    text = (texts / f"{launch['ptx'][:16]}.ptx").read_text()
    lines = sorted(REGISTER.sub(r"\1", line) for line in text.split("\n"))
    given = sorted(NUMBER.sub("", each.partition(" = ")[2]) for each in launch["passed"])
    return _short("\n".join([*lines, *given, *(f"{x}={launch[x]}" for x in LAUNCHED)]))


class _Noted(TorchDispatchMode):
    """Notes the torch ops that run, with the shapes of what they make and the numbers they get."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves
        made = [f"{x.dtype}{list(x.shape)}" for x in leaves(found) if isinstance(x, torch.Tensor)]
        given = [str(x) for x in leaves((args, kwargs)) if not isinstance(x, torch.Tensor)]
        self.lines.append(f"{func} {given} {made}")
        return found


def _torch_ops_of_bases() -> str:
    """A digest of what fits sketch's bases; "" in a tree that has no such function."""
    name = "attnplug.ops.sketch.basis"
    if importlib.util.find_spec(name) is None:
        return ""
    module = importlib.import_module(name)
    draw = torch.Generator().manual_seed(0)
    shapes = (1, 2, 300, 64), (1, 2, 300, 64), (1, 4, 16, 64)
    fits = [module.Fit(*(torch.randn(x, generator=draw) for x in shapes)) for _ in range(2)]
    with _Noted() as noted:
        module.fit_bases(fits)
    return _short("\n".join(noted.lines))


def _defaults(method: Any) -> dict[str, str]:
    return {each.name: repr(each.default) for each in dataclasses.fields(method)}


def same(
    ran: dict[str, Any], now: dict[str, Any], ops: set[str], policies: dict[str, set[str]]
) -> bool:
    """Whether both compile the same in every case that both have of these ops, and give these
    policies' options the same defaults, but for those that a row names. False where one of the ops
    was not looked at."""
    if ran["triton"] != now["triton"] or not ops or not ops <= ran["ops"].keys():
        return False
    cases = [(ran["ops"][op], now["ops"].get(op, {})) for op in ops]
    if not all(old.keys() & new.keys() for old, new in cases):
        return False
    for policy, named in policies.items():
        old, new = (each["defaults"].get(policy, {}) for each in (ran, now))
        if any(old[option] != new[option] for option in (old.keys() & new) - named):
            return False
    return all(old[key] == new[key] for old, new in cases for key in old.keys() & new)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
