"""A step's token that `update` leaves to the attention op: it is attended to, written and counted
once, whatever comes after `update`."""

import pytest
import torch

import attnplug
from attnplug import Dense, Gather, Policy
from attnplug.models.cache import PlugLayer
from attnplug.policies import AttentionCall
from attnplug.policies.gather import GatherLayer
from attnplug.testing import tiny_model

GATHER = Gather(k=2, block=16, local=2, min_tokens=0)
SIZE, LENGTH, DIM = 160, 130, 64


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_with(length: int, batch: int = 2) -> GatherLayer:
    layer = GATHER.cache_layer(SIZE)
    layer.update(*random(0, 2, batch, 2, SIZE, DIM)[:, :, :, :length])
    return layer


def call_of(layer: PlugLayer) -> AttentionCall:
    keys, values = layer._buffers()
    q = random(1, keys.shape[0], 4, 1, DIM)
    lengths = layer.cumulative_length.reshape(1)
    return AttentionCall(q, keys, values, DIM**-0.5, lengths=lengths, state=layer)


def pair() -> tuple[GatherLayer, GatherLayer]:
    """The same layer twice: with a token written, and with it pending."""
    written, deferring = layer_with(LENGTH), layer_with(LENGTH)
    token = random(2, 2, 2, 2, 1, DIM)
    written.update(*token)
    deferring.defer_next = True
    keys, values = deferring.update(*token)
    assert keys is deferring.keys and values is deferring.values
    assert deferring.pending is not None and int(deferring.cumulative_length) == LENGTH
    return written, deferring


def same(a: PlugLayer, b: PlugLayer) -> None:
    assert b.pending is None and not b.defer_next
    assert int(a.cumulative_length) == int(b.cumulative_length)
    for x, y in zip(a._buffers(), b._buffers(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("k", [0, 2])
def test_gather_takes_it(k):
    written, deferring = pair()
    policy = Policy(decode=Gather(k=k, block=16, local=2, min_tokens=0))
    want, got = policy.attend(call_of(written)), policy.attend(call_of(deferring))
    assert torch.equal(got, want)
    same(written, deferring)
    assert torch.equal(written.progress, deferring.progress)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(decode=Dense()),
        Policy(decode=Gather(k=2, block=16, local=2)),  # dense below its crossover
        Policy(decode=Gather(k=2, block=32, local=2, min_tokens=0)),  # not its layer
    ],
    ids=["dense", "below the crossover", "of other options"],
)
def test_whoever_does_not_take_it_sees_it_written(policy):
    written, deferring = pair()
    want, got = policy.attend(call_of(written)), policy.attend(call_of(deferring))
    assert torch.equal(got, want)
    same(written, deferring)


ROWS = torch.tensor([1, 1])
LATER = {
    "update": lambda layer: layer.update(*random(3, 2, 2, 2, 1, DIM)),
    "crop": lambda layer: layer.crop(-3),
    "reorder": lambda layer: layer.reorder_cache(ROWS),
    "repeat": lambda layer: layer.batch_repeat_interleave(2),
    "select": lambda layer: layer.batch_select_indices(ROWS),
    "flush": lambda layer: layer.flush(),
}


@pytest.mark.parametrize("name", LATER)
def test_whatever_touches_the_layer_writes_it_first(name):
    written, deferring = pair()
    LATER[name](written)
    LATER[name](deferring)
    same(written, deferring)


def test_a_reset_forgets_it():
    _, deferring = pair()
    deferring.reset()
    same(layer_with(0), deferring)


def test_who_adopts_the_layer_gets_it():
    written, deferring = pair()
    other = GATHER.cache_layer(SIZE)
    other.adopt(deferring)
    same(written, other)


def test_several_tokens_are_never_deferred():
    layer = layer_with(LENGTH)
    layer.defer_next = True
    layer.update(*random(2, 2, 2, 2, 3, DIM))
    assert layer.pending is None and int(layer.cumulative_length) == LENGTH + 3


def generate(model, ids, mask):
    options = {"max_new_tokens": 40, "do_sample": False, "attention_mask": mask}
    out = model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
    return torch.stack(out.logits)


def padded(batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 50, (batch, 70), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1:, :20] = 0
    return ids, mask


def count_taken(monkeypatch) -> list[int]:
    """How often a layer's token was taken."""
    taken = [0]
    take = PlugLayer.take_pending

    def counted(self):
        taken[0] += self.pending is not None
        return take(self)

    monkeypatch.setattr(PlugLayer, "take_pending", counted)
    return taken


def test_generate_defers_and_gives_the_same(monkeypatch):
    model, (ids, mask) = tiny_model(), padded()
    with attnplug.applied(model, Policy(decode=GATHER)):
        taken = count_taken(monkeypatch)
        got = generate(model, ids, mask)
        assert taken[0] == 39 * model.config.num_hidden_layers
        monkeypatch.setattr(GatherLayer, "defers_write", False)
        want = generate(model, ids, mask)
    assert (got - want).abs().max() < 1e-5


@torch.no_grad()
def test_the_cache_is_whole_after_every_step(monkeypatch):
    """Whoever goes on with it, another policy or the bare model, reads all tokens."""
    model = tiny_model()
    ids = padded(1)[0][:, :60]
    with attnplug.applied(model, Policy(decode=GATHER)):
        cache = attnplug.make_cache(model, SIZE)
        model(ids[:, :50], past_key_values=cache)
        taken = count_taken(monkeypatch)
        for t in range(50, 55):
            model(ids[:, t : t + 1], past_key_values=cache)
        assert taken[0] == 5 * model.config.num_hidden_layers
        assert all(layer.pending is None for layer in cache.layers)
    with attnplug.applied(model, "dense"):
        model(ids[:, 55:56], past_key_values=cache)
    logits = model(ids[:, 56:], past_key_values=cache).logits
    layer = cache.layers[0]
    assert int(layer.cumulative_length) == 60 and not layer.defer_next
    keys = tiny_model()(ids, use_cache=True).past_key_values.layers[0].keys  # no policy there
    assert (layer.keys[:, :, :60] - keys).abs().max() < 1e-5
    assert logits.isfinite().all()


@torch.no_grad()
def test_a_copy_of_the_buffers_is_never_left_without_it(monkeypatch):
    """A model that hands attention something else than the cache's own buffers does not defer."""
    model = tiny_model()
    ids = padded(1)[0]
    with attnplug.applied(model, Policy(decode=GATHER)):
        cache = attnplug.make_cache(model, SIZE)
        update = GatherLayer.update
        monkeypatch.setattr(
            GatherLayer, "update", lambda *a, **k: tuple(x.clone() for x in update(*a, **k))
        )
        model(ids[:, :50], past_key_values=cache)
        taken = count_taken(monkeypatch)
        model(ids[:, 50:51], past_key_values=cache)
    assert taken[0] == 0 and int(cache.layers[0].cumulative_length) == 51


@torch.no_grad()
def test_compiled_steps_defer_without_recompiling():
    torch._dynamo.reset()
    model, ids = tiny_model(), padded(1)[0]
    with attnplug.applied(model, Policy(decode=GATHER)):
        one, two = (attnplug.make_cache(model, SIZE) for _ in range(2))
        for cache in (one, two):
            model(ids[:, :50], past_key_values=cache)
        step = torch.compile(
            lambda token, cache: model(token, past_key_values=cache).logits,
            fullgraph=True,
            backend="aot_eager",
        )
        with torch._dynamo.config.patch(error_on_recompile=True):
            for t in range(50, 70):
                token = ids[:, t : t + 1]
                got, want = step(token, one), model(token, past_key_values=two).logits
                assert (got - want).abs().max() < 1e-5
    same(two.layers[0], one.layers[0])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's own, torch 2.11
@torch.no_grad()
def test_compiled_code_copies_no_cache():
    """The op's writes reach the cache itself: nothing of its size is allocated."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    model, ids = tiny_model().cuda(), padded(1)[0].cuda()
    with attnplug.applied(model, Policy(decode=GATHER)):
        cache = attnplug.make_cache(model, SIZE)
        model(ids[:, :50], past_key_values=cache)
        step = torch.compile(
            lambda token, cache: model(token, past_key_values=cache).logits, fullgraph=True
        )
        _, codes = run_and_get_code(step, ids[:, 50:51], cache)
    assert any("gather_decode" in code for code in codes)
    made = [line for code in codes for line in code.splitlines() if "= empty_strided" in line]
    assert made and not any(f" {SIZE}, " in line for line in made)
    assert int(cache.layers[0].cumulative_length) == 51
