"""What the package exports is what it says: sorted, complete, documented."""

import ast
import inspect
import subprocess
import sys

import pytest
import torch

import attnplug
import attnplug.ops
import attnplug.policies
import attnplug.testing

MODULES = [attnplug, attnplug.ops, attnplug.policies, attnplug.testing]


def isort_key(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, as ruff sorts __all__."""
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, name


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_all_is_sorted(module):
    assert list(module.__all__) == sorted(set(module.__all__), key=isort_key)


@pytest.mark.parametrize("module", [attnplug, attnplug.ops, attnplug.testing])
def test_all_is_complete(module):
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", "").startswith("attnplug")
    }
    missing = sorted(public - set(module.__all__))
    assert not missing, f"{module.__file__}: __all__ needs {', '.join(missing)}"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_export_is_documented(module):
    exported = {name: getattr(module, name) for name in module.__all__}
    undocumented = [n for n, v in exported.items() if callable(v) and not inspect.getdoc(v)]
    assert not undocumented


def test_every_method_is_at_the_top():
    """`attnplug.Gather`, at run time and for type checkers, which read the import as it stands."""
    own = {
        cls.__name__
        for cls in attnplug.policies.methods().values()
        if cls.__module__.startswith("attnplug.policies.")
    }
    typed = next(
        {alias.name for alias in node.names}
        for node in ast.walk(ast.parse(inspect.getsource(attnplug)))
        if isinstance(node, ast.ImportFrom) and node.module == "attnplug.policies"
    )
    for found, place in ((attnplug.__all__, "__all__"), (typed, "the TYPE_CHECKING import")):
        missing = sorted(own - set(found))
        assert not missing, f"attnplug/__init__.py: {place} needs {', '.join(missing)}"


def test_every_error_is_exported():
    errors = {
        name
        for name, value in vars(attnplug.errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert errors <= set(attnplug.__all__)


def test_the_ops_are_torch_ops():
    functions = [n for n in attnplug.ops.__all__ if not inspect.isclass(getattr(attnplug.ops, n))]
    for name in functions:
        assert isinstance(getattr(torch.ops.attnplug, name).default, torch._ops.OpOverload)


def test_trace_is_there_without_an_import_of_its_own():
    code = "import attnplug, sys; assert 'pyarrow' not in sys.modules; print(attnplug.trace.read)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "function read" in found.stdout
    with pytest.raises(AttributeError, match="has no attribute 'traces'"):
        attnplug.traces  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
