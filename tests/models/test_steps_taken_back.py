"""Steps that generate has run past the end of all rows, and takes back: what stays of them in
sketch's layers. Compiled steps run further ahead here than they do elsewhere, also on a CPU."""

import pytest
import torch
from loop_cases import ENDS, compiling

import attnplug
from attnplug.models import decode_loop
from attnplug.models.cache import PlugCache, PlugLayer
from attnplug.policies._sketch_layer import QUERIES, RING, SPARE, SketchLayer, refit
from attnplug.testing.policy import tiny_model

POLICY = "sketch(k=4, audit=3, min_tokens=0)"


def test_no_device_is_further_ahead_than_a_crop_is_exact():
    assert max(decode_loop.LAG.values()) <= SPARE


def turns(tokens: int, device, monkeypatch, lag: int) -> tuple[list[torch.Tensor], PlugCache]:
    """Tokens of two turns of two rows, of which the first ends early, and their cache."""
    monkeypatch.setitem(decode_loop.LAG, torch.device(device).type, lag)
    random = torch.Generator().manual_seed(2)
    prompt, more = (torch.randint(41, 97, (2, n), generator=random).to(device) for n in (tokens, 3))
    torch._dynamo.reset()
    with attnplug.applied(tiny_model(device=device), POLICY) as model:
        options = dict(compile_config=compiling(), return_dict_in_generate=True)
        first = model.generate(prompt, max_new_tokens=40, eos_token_id=ENDS, **options)
        assert tokens + 2 < first.sequences.shape[1] < tokens + 40
        refit(first.past_key_values)
        ids = torch.cat([first.sequences, more], 1)
        options |= dict(past_key_values=first.past_key_values, max_new_tokens=5)
        second = model.generate(ids, eos_token_id=None, **options)
    return [first.sequences, second.sequences], second.past_key_values


def state(layer: SketchLayer) -> dict[str, torch.Tensor]:
    """All that later steps read or count."""
    tokens = int(layer.cumulative_length)
    assert layer.keys is not None and layer.recent is not None and layer.audits is not None
    kept = torch.arange(max(0, tokens - QUERIES), tokens) % RING
    counts = [layer.seen, layer.fitted_at, layer.due, layer.audit_due, layer.without_query]
    found = {
        "keys": layer.keys[:, :, :tokens],
        "queries": layer.recent[:, :, kept],
        "audits": layer.audits,
        "counts": torch.tensor(counts),
    }
    return found | {f"basis {at}": each for at, each in enumerate(layer.basis or ())}


@pytest.mark.parametrize("tokens", [690, 704, 5])
def test_sketch_forgets_them(tokens, device, monkeypatch):
    """Beside audits, and bases made anew: of a prompt of 5 tokens, behind 69. A GPU's kernels sum
    picks in any order, so that numbers may differ there, but no count and no token."""
    wanted, plain = turns(tokens, device, monkeypatch, 0)
    found, cache = turns(tokens, device, monkeypatch, SPARE)
    assert all(map(torch.equal, found, wanted))
    for one, other in zip(cache.layers, plain.layers, strict=True):
        mine, theirs = state(one), state(other)
        for name in theirs if device == "cpu" else ("counts",):
            assert torch.equal(mine[name], theirs[name]), name
        assert torch.equal(mine["audits"][..., 0], theirs["audits"][..., 0])  # how many


def test_the_host_waits_for_them_before_a_layer_has_work(monkeypatch):
    """No layer is prepared for a step that no row takes, though steps run ahead."""
    begun: list[int] = []

    class Counted(PlugLayer):
        def prepare_step(self, tokens, mask):
            begun.append(tokens)

        @classmethod
        def due_layers(cls, layers, tokens):
            return layers if tokens % 2 else []

    monkeypatch.setitem(decode_loop.LAG, "cpu", 3)
    torch._dynamo.reset()
    with attnplug.applied(tiny_model(), "dense") as model:
        cache = attnplug.make_cache(model, 64)
        for at, layer in enumerate(cache.layers):
            cache.layers[at] = Counted(max_cache_len=layer.max_cache_len)
        ids = torch.randint(41, 97, (3, 20), generator=torch.Generator().manual_seed(9))
        options = dict(compile_config=compiling(), past_key_values=cache, eos_token_id=ENDS)
        out = model.generate(ids, max_new_tokens=40, **options)
    fed = out.shape[1] - 1  # the last token is not
    assert 21 < out.shape[1] < 60
    assert begun == [at for at in range(20, fed) if at % 2 for _ in cache.layers]
