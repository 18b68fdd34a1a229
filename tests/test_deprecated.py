"""Old names work for one release, are the new things themselves, and warn with the new name."""

import importlib

import pytest

OLD = {
    "attnplug.policies.base.Policy": "attnplug.policies.policy.Policy",
    "attnplug.policies.base.parse_policy": "attnplug.policies.grammar.parse_policy",
    "attnplug.policies.base.Sink": "attnplug.call.Sink",
}


def get(path: str):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("old", OLD)
def test_an_old_name_warns_with_the_new_one(old):
    with pytest.warns(DeprecationWarning, match=f"^{old} is now {OLD[old]};") as caught:
        assert get(old) is get(OLD[old])
    assert caught[0].filename == __file__


@pytest.mark.parametrize("module", sorted({old.rpartition(".")[0] for old in OLD}))
def test_a_name_that_never_was_is_missing(module):
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'Nonesuch'"):
        get(f"{module}.Nonesuch")
