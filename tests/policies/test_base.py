"""The policy grammar, composition and registration."""

import dataclasses
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug import Dense, Momo, Policy, PolicyError
from attnplug.policies import Phase, Stream, methods, names, parse, register

OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "gamma": st.sampled_from([None, 1, 2, 8, 32]),
        "top_k": st.integers(8, 128),
        "selection": st.sampled_from(["exact", "tournament", "estimated"]),
        "merge": st.sampled_from(["mass", "mean"]),
        "min_tokens": st.none() | st.integers(0, 10**6),
        "window": st.integers(0, 512),
    },
)


@given(OPTIONS)
def test_text_and_object_are_the_same_policy(options):
    if "merge" in options:  # of rows with lists
        options.setdefault("selection", "exact")
    policy = Policy(prefill=Momo(**options))
    assert parse(str(policy)) == policy


@pytest.mark.parametrize(
    "text, same",
    [
        ("dense", "dense"),
        ("momo", "momo"),
        ("momo()", "momo"),
        ("momo+dense", "momo"),
        ("dense + momo", "momo"),
        ("momo(gamma=None)", "momo"),
        (" momo( selection = 'exact' ) ", "momo(selection='exact')"),
        ("prefill=momo(gamma=8), decode=dense", "momo(gamma=8)"),
        ("decode=dense", "dense"),
        ("stream+dense", "stream"),
        ("stream(top_k=8) + gather + momo", "momo+gather+stream(top_k=8)"),
        ("trace=stream, decode=gather", "gather+stream"),
        ("prefill=stream", "prefill=stream, decode=dense"),
        ("trace=stream, prefill=stream", "prefill=stream, decode=dense, trace=stream"),
    ],
)
def test_a_policy_has_one_spelling(text, same):
    assert str(parse(text)) == same


def test_missing_phases_are_dense():
    assert parse("momo").decode == Dense()
    assert Policy().prefill == Dense()


def test_a_method_in_the_wrong_phase_is_refused():
    with pytest.raises(PolicyError, match="momo cannot be the decode method, it serves prefill"):
        Policy(decode=Momo())
    with pytest.raises(PolicyError, match="prefill is 'momo', needs a method"):
        Policy(prefill="momo")  # pyright: ignore[reportArgumentType]


@pytest.fixture
def clean_registry(monkeypatch):
    import attnplug.policies as registry

    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))


def method(name: object, phases: object) -> type[Phase]:
    body = {"name": name, "phases": phases, "__doc__": "Someone else's.", "attend": Dense.attend}
    return dataclasses.dataclass(frozen=True)(type("Theirs", (Phase,), body))


@pytest.mark.usefixtures("clean_registry")
def test_a_registered_method_is_usable_by_name():
    theirs = register(method("theirs", frozenset({"decode"})))
    assert "theirs" in names()
    assert parse("momo+theirs") == Policy(prefill=Momo(), decode=theirs())
    register(theirs)  # again is harmless


@pytest.mark.usefixtures("clean_registry")
def test_a_method_of_both_phases_has_a_spelling_in_each():
    both = register(method("both", frozenset({"prefill", "decode"})))
    for policy in (
        Policy(both(), both()),
        Policy(prefill=both()),
        Policy(prefill=Momo(), decode=both()),
        Policy(prefill=Momo(), decode=both(), trace=Stream()),
        Policy(both(), both(), Stream()),
    ):
        assert parse(str(policy)) == policy
    assert str(Policy(prefill=both())) == "prefill=both, decode=dense"


@pytest.mark.parametrize(
    "text, message",
    [
        ("prefill=momo, encode=momo", "a phase is prefill, decode or trace, not encode"),
        ("trace=momo", "momo cannot be the trace method, it serves prefill"),
        ("decode=stream", "stream cannot be the decode method, it serves prefill and trace"),
        ("stream+stream(top_k=8)", "both want to be the trace method"),
        ("momo, dense", "join methods with"),
        ("decode=momo", "momo cannot be the decode method"),
        ("", "the policy is empty; there are"),
        ("  ", "the policy is empty; there are"),
        ("momo(gamma=16, gamma=32)", "gamma is given twice"),
        ("prefill=momo, prefill=dense", "prefill is given twice"),
        ("momo(**{'gamma': 16})", "write the options out"),
        ("momo) + (dense", "cannot be read"),
    ],
)
def test_a_bad_composition_is_refused(text, message):
    with pytest.raises(PolicyError, match=message):
        parse(text)


@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize(
    "name, phases, message",
    [
        ("momo", frozenset({"decode"}), "the name 'momo' is taken by Momo"),
        ("not a name", frozenset({"decode"}), "needs an identifier"),
        ("theirs", frozenset(), "needs some of 'prefill', 'decode', 'trace'"),
        ("theirs", frozenset({"encode"}), "needs some of 'prefill', 'decode', 'trace'"),
    ],
)
def test_a_bad_registration_is_refused(name, phases, message):
    with pytest.raises(PolicyError, match=message):
        register(method(name, phases))


def test_registering_something_else_is_refused():
    class Plain(Phase):
        name, phases = "plain", frozenset({"decode"})

    for cls in (dict, Plain):
        with pytest.raises(PolicyError, match="is not a dataclass that subclasses"):
            register(cls)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("clean_registry")
def test_entry_points_are_found(monkeypatch):
    import attnplug.policies as registry

    class Entry:
        def __init__(self, name):
            self.name = name

        def load(self):
            return method("packaged", frozenset({"prefill"}))

    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry("packaged")])
    assert "packaged" in methods()
    monkeypatch.setattr(registry, "_METHODS", {})
    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry("other")])
    with pytest.raises(PolicyError, match="the two must agree"):
        methods()


@pytest.mark.parametrize("value", ["attnplug_gone:Gone", "attnplug.policies:Gone"])
def test_an_entry_point_that_cannot_be_loaded_is_named(monkeypatch, value):
    import attnplug.policies as registry

    entry = EntryPoint("gone", value, "attnplug.policies")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    with pytest.raises(PolicyError, match=f"'gone' .* cannot be loaded from '{value}'"):
        parse("dense")
