"""What the package exports is what it says: sorted, importable, documented."""

import inspect

import pytest

import attnplug
import attnplug.ops
import attnplug.policies
import attnplug.testing

MODULES = [attnplug, attnplug.ops, attnplug.policies, attnplug.testing]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_all_is_sorted_and_complete(module):
    assert list(module.__all__) == sorted(set(module.__all__))
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", "").startswith("attnplug")
    }
    assert public == {name for name in module.__all__ if name in public}, public


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_export_is_documented(module):
    for name in module.__all__:
        value = getattr(module, name)
        assert callable(value) and inspect.getdoc(value), f"{module.__name__}.{name}"


def test_the_ops_are_torch_ops_with_fakes():
    import torch

    for name in attnplug.ops.__all__:
        assert hasattr(torch.ops.attnplug, name)
