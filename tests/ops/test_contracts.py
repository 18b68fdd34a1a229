"""What holds for every registered op: `torch.library.opcheck` passes, so that its fake gives what
the op gives and its schema says what it writes; and what it does not take it refuses by name."""

import re
import subprocess
import sys

import pytest
import torch
from contracts import CONTRACTS, Contract
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only, tree_unflatten

from attnplug.errors import ArgumentError, GradientError
from attnplug.testing.op import opcheck_calls

every_op = pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.ops[0])


REGISTERED = """
import importlib, pkgutil
import torch, attnplug.ops, attnplug.policies
for package in (attnplug.ops, attnplug.policies):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
for schema in torch._C._jit_get_all_schemas():
    if schema.name.startswith("attnplug::"):
        print(schema.name.partition("::")[2])
"""


def test_no_op_is_missing():
    """In a process of its own: other tests register ops of their own, such as those of the docs."""
    command = [sys.executable, "-c", REGISTERED]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registered = set(said.split())
    held = {name for contract in CONTRACTS for name in contract.ops}
    missing = sorted(registered - held)
    assert not missing, f"tests/ops/contracts.py: CONTRACTS needs a row for {', '.join(missing)}"
    assert held == registered


@every_op
def test_opcheck(contract, device):
    reached = set()
    for case in contract.cases():
        case = tree_map_only(torch.Tensor, lambda x: x.to(device), case)
        reached |= opcheck_calls(lambda case=case: contract.call(**case))
    assert {f"attnplug::{name}" for name in contract.ops} <= reached


def changed(contract: Contract, change, kinds):
    """(path, argument, the arguments with it changed) for each tensor that `kinds` is true of."""
    leaves, spec = tree_flatten_with_path(next(contract.cases()))
    values = [value for _, value in leaves]
    for place, (path, value) in enumerate(leaves):
        if isinstance(value, torch.Tensor) and kinds(value):
            others = [*values[:place], change(value), *values[place + 1 :]]
            yield path, tree_unflatten(others, spec)


def accepted(contract, change, error=ArgumentError, kinds=lambda x: True, skip=(), named=False):
    """Changed tensors that the op does not refuse as itself; if `named`, those it does not name."""
    found = []
    for path, case in changed(contract, change, kinds):
        if path[0].key in skip:
            continue
        name = getattr(path[-1], "name", path[0].key)  # of a member of a named tuple its own
        said = rf"\b{name}(?:\b|_)" if named else ""
        try:
            contract.call(**case)
        except error as refusal:
            message = str(refusal)
            if not message.startswith(contract.names) or not re.search(said, message):
                found.append(f"{keystr(path)}: {message}")
        else:
            found.append(keystr(path))
    return found


def other_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int64 if x.is_floating_point() else torch.float32)


@every_op
def test_refuses_other_dtypes(contract):
    assert not accepted(contract, other_dtype, named=True)


@every_op
def test_refuses_other_shapes(contract):
    assert not accepted(contract, lambda x: x[None], skip=contract.reshaped)


@every_op
def test_refuses_other_devices(contract):
    assert not accepted(contract, lambda x: x.to("meta"))


@every_op
def test_refuses_gradients(contract):
    def graded(x):
        return x.clone().requires_grad_()

    floats, skip = torch.is_floating_point, contract.ungraded
    assert not accepted(contract, graded, GradientError, floats, skip)
