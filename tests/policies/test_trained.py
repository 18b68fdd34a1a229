"""The policy `trained` in strings, and what it refuses."""

import pytest
import torch

import attnplug
from attnplug.call import LayerShape
from attnplug.policies import Policy, Trained, parse

PLAIN = LayerShape(8, 2, 64, 0.0, False, torch.device("cpu"))
INDEXED = LayerShape(8, 8, 64, 0.0, False, torch.device("cpu"), indexed=True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("trained", "trained"),
        ("momo+gather+trained", "momo+gather+trained"),
        ("auto", "auto"),
        ("prefill=momo, trained=trained", "momo+trained"),
        ("stream+trained", "stream+trained"),
    ],
)
def test_strings(text, told):
    policy = parse(text)
    assert str(policy) == told
    assert str(parse(str(policy))) == told


def test_serves_what_an_indexer_picks_and_nothing_else():
    policy, _ = parse("momo+gather+trained").resolve(INDEXED, 1)
    assert policy == Policy(prefill=Trained(), decode=Trained())
    policy, _ = parse("momo+gather+trained").resolve(PLAIN, 1)
    assert (str(policy.prefill), str(policy.decode)) == ("momo", "gather")
    policy, _ = parse("trained").resolve(PLAIN, 1)
    assert (str(policy.prefill), str(policy.decode)) == ("dense", "dense")


def test_auto_takes_it_unasked_and_others_do_not():
    policy, why = parse("auto").resolve(INDEXED, 1)
    assert policy.attends_latents
    assert "picks what the layer reads" in why
    assert not parse("momo+sketch").resolve(INDEXED, 1)[0].attends_latents


def test_a_layer_without_an_indexer_is_refused():
    assert Trained().refusal(PLAIN) == "trained: the layer has no indexer"
    assert Trained().refusal(INDEXED) is None


def test_two_terms_for_these_layers_are_refused():
    with pytest.raises(attnplug.PolicyError, match="both want to be the trained method"):
        parse("trained+trained")
