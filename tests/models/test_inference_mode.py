"""A conversation whose turns are inside torch.inference_mode and outside of it: one cache serves
both, as transformers' own does."""

import pytest
import torch
from test_sliding import model_of

import attnplug
from attnplug.testing.policy import tiny_model

POLICIES = [
    "dense",
    "gather(k=16, block=16, sink=1, local=2, min_tokens=0)",
    "gather(k=16, block=16, sink=1, local=2, min_tokens=0, kv='host')",
    "sketch(k=4096, min_tokens=0)",
    "sketch(k=4096, min_tokens=0, kv='host')",
    "gvr(k=4096, min_tokens=0)",
    "certified(min_tokens=0)",
]
MODES = {
    "in-out": (True, False),
    "out-in-out": (False, True, False),
    "in-out-in": (True, False, True),
}


def turns(model, modes, first: dict, device: str = "cpu") -> list[torch.Tensor]:
    """The tokens of each turn of three rows, eight new ones each."""
    random = torch.Generator().manual_seed(4)
    ids = torch.randint(2, 97, (3, 40), generator=random).to(device)
    options, found = dict(max_new_tokens=8, return_dict_in_generate=True) | first, []
    for mode in modes:
        with torch.inference_mode(mode):
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        found.append(out.sequences)
        more = torch.randint(2, 97, (3, 5), generator=random).to(device)
        ids = torch.cat([out.sequences.clone(), more], 1)
        options |= dict(past_key_values=out.past_key_values)
    return found


ROOMS = "grows", "given", "kept"
# Each policy with each mode and with each room, and each mode with each room.
PAIRS = [
    (policy, mode, ROOMS[(turn + place) % len(ROOMS)])
    for turn, policy in enumerate(POLICIES)
    for place, mode in enumerate(MODES)
]


@pytest.mark.parametrize(("policy", "mode", "room"), PAIRS)
def test_turns_inside_and_outside_share_a_cache(policy, mode, room, device):
    modes = MODES[mode]
    wanted = turns(tiny_model(device=device), modes, {}, device)
    with attnplug.applied(tiny_model(device=device), policy) as model:
        if room == "kept":  # the next call's cache has room for all turns
            model.generate(torch.full((3, 9), 5, device=device), max_new_tokens=150)
        first = {"past_key_values": attnplug.make_cache(model, 150)} if room == "given" else {}
        found = turns(model, modes, first, device)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("modes", MODES.values(), ids=MODES)
@pytest.mark.parametrize("window", [8, 90])
def test_windows_too(window, modes):
    wanted = turns(model_of("gemma3", window), modes, {})
    with attnplug.applied(model_of("gemma3", window), "dense") as model:
        model.generate(torch.full((3, 9), 5), max_new_tokens=150)
        found = turns(model, modes, {})
    assert all(map(torch.equal, found, wanted))


@torch.no_grad()
def test_a_cache_of_inference_mode_crops_repeats_and_starts_anew():
    with attnplug.applied(tiny_model(), POLICIES[1]) as model:
        cache = attnplug.make_cache(model, 60)
        ids = torch.arange(5, 25)[None]
        with torch.inference_mode():
            wanted = model(ids, past_key_values=cache).logits[:, -1]
        cache.crop(-1)
        cache.batch_repeat_interleave(2)
        again = model(ids[:, -1:].repeat(2, 1), past_key_values=cache).logits[:, -1]
        assert (again - wanted).abs().max() < 1e-4
        with torch.inference_mode():
            model(ids.repeat(2, 1), past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 1]))
        cache.reset()
        anew = model(ids.repeat(2, 1), past_key_values=cache).logits[:, -1]
    assert (anew - wanted).abs().max() < 1e-4
