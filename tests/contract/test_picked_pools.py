"""`trained` on layers whose model picks pools of tokens (GLM-5.3), at lengths where a query reads a
part of them."""

import pytest
import torch
from indexed_cases import GLM5, HAS_GLM5, PICKING, Largest, since, tiny_glm5
from test_indexed import TOLERANCE, ids_of, new_tokens
from transformers import DynamicCache, StaticCache

import attnplug
from attnplug.models.indexed import why_not_indexed
from attnplug.models.layers import find_attention_layers
from attnplug.models.names import CACHE
from attnplug.models.picked_pools import _make_keys, _real, pick_pools

pytestmark = since(HAS_GLM5, "5.20")
TOKENS = 70  # 17 pools of 4, of which a query reads 4
CACHES = {
    "none": lambda model: None,
    "ours": lambda model: attnplug.make_cache(model, 90),
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(model.config, max_cache_len=90),
}
PLAIN = {"layer_types": [PICKING] * 4}  # layers that can be cropped


@pytest.fixture
def model(request):
    return tiny_glm5(**getattr(request, "param", {}))


plain = pytest.mark.parametrize("model", [PLAIN], indirect=True, ids=["plain"])


def near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    return bool((found - wanted).abs().max() < tolerance * wanted.abs().max())


def masks() -> dict[str, torch.Tensor]:
    """Of two rows: all real, one padded on the left, and one with hidden tokens among real ones."""
    whole = torch.ones(2, TOKENS, dtype=torch.long)
    left, holes = whole.clone(), whole.clone()
    left[0, :13] = 0
    holes[0, :5] = holes[0, [20, 21, 40]] = holes[1, 33] = 0
    return {"whole": whole, "left": left, "holes": holes}


def padded(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    mask = masks()[name]
    return ids_of(2, TOKENS) * mask, mask


@torch.no_grad()
def test_a_query_reads_a_part_of_its_pools(model):
    """Otherwise the other tests would show nothing."""
    ids = ids_of(1, TOKENS)
    wanted = model(ids).logits
    for module in model.modules():
        if hasattr(module, "index_kpool"):
            module.index_topk = 80
    assert not near(model(ids).logits[:, 40:], wanted[:, 40:])


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("queries", [TOKENS, 40, 3, 1])
@pytest.mark.parametrize("name", masks())
@torch.no_grad()
def test_picks_are_the_models_own(name, queries, tail):
    """Of a prompt, of a part of one and of steps behind a cache, whose pools begin anywhere."""
    model = tiny_glm5(index_kpool_always_select_tail=tail)
    layer = model.model.language_model.layers[0].self_attn
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, TOKENS, 128, generator=generator)
    resid = layer.q_a_layernorm(layer.q_a_proj(hidden))
    mask = masks()[name].bool()
    ours = attnplug.make_cache(attnplug.apply(model, "trained"), 90)
    attnplug.remove(model)
    stock = StaticCache(model.config, max_cache_len=90)
    sets = []
    for cache, pick in ((stock, layer.indexer), (ours, None)):
        for begin, end in ((0, TOKENS - queries), (TOKENS - queries, TOKENS)):
            if begin == end:
                continue
            none = hidden.new_zeros(2, 1, end - begin, 32)
            cache.update(none, none[..., :0], 0)
            here = hidden[:, begin:end], resid[:, begin:end], mask[:, begin:end], cache
            found = pick(*here) if pick is not None else pick_pools(layer.indexer, *here)
        sets.append([[sorted(set(query) - {-1}) for query in row] for row in found.tolist()])
        if pick is None:
            real = found[found >= 0].numel()
            assert real == sum(len(query) for row in sets[-1] for query in row)  # none twice
    assert sets[0] == sets[1]
    assert any(query for row in sets[0] for query in row)


@pytest.mark.parametrize("hidden", masks())
@pytest.mark.parametrize("name", CACHES)
@torch.no_grad()
def test_prompts_and_steps(model, name, hidden):
    """Whole, in chunks and token by token."""
    ids, mask = padded(hidden)
    shown = mask.bool()
    wanted = model(ids, attention_mask=mask, use_cache=False).logits
    attnplug.apply(model, "trained")
    cache = CACHES[name](model)
    if cache is None:
        found = model(ids, attention_mask=mask, use_cache=False).logits
        assert near(found[shown], wanted[shown])
        return
    for begin, end in ((0, 27), (27, 55), (55, 56), (56, 57), (57, 60), (60, TOKENS)):
        told = {"attention_mask": mask[:, :end], "use_cache": True, CACHE: cache}
        found = model(ids[:, begin:end], **told).logits
        part = shown[:, begin:end]
        assert near(found[part], wanted[:, begin:end][part]), (begin, end)


@torch.no_grad()
def test_keys_of_pools_stay_in_the_cache(model):
    """A step makes one, and those before stay what they would be made anew."""
    ids, mask = padded("left")
    attnplug.apply(model, "trained")
    cache = attnplug.make_cache(model, 90)
    told = {"use_cache": True, CACHE: cache}
    model(ids[:, :50], attention_mask=mask[:, :50], **told)
    for t in range(50, TOKENS):
        model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], **told)
    indexer = model.model.language_model.layers[2].self_attn.indexer
    layer = cache.layers[2]
    real = _real(layer.indexer_keys, TOKENS)
    assert real.first.tolist() == [13, 0]
    anew = _make_keys(indexer, layer.indexer_keys, real, TOKENS, torch.zeros_like(real.first), 14)
    torch.testing.assert_close(layer.pool_keys[:, :14], anew)
    assert cache.layers[3].pool_keys is None  # it takes those of the layer before


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
        {"prefill_chunk_size": 23},
        {"max_new_tokens": 30},
    ],
    ids=str,
)
@torch.no_grad()
def test_generate(model, options):
    ids = ids_of(2, TOKENS)
    wanted = new_tokens(model, ids, **options)
    attnplug.apply(model, "trained")
    assert torch.equal(new_tokens(model, ids, **options), wanted)


@pytest.mark.parametrize("policy", ["auto", "momo+gather+trained"])
@torch.no_grad()
def test_other_policies_leave_these_layers_to_trained(model, policy):
    ids = ids_of(1, TOKENS)
    wanted = model(ids).logits
    with attnplug.applied(model, policy):
        assert {layer.prefill for layer in attnplug.report(model).layers} == {"trained"}
        assert near(model(ids).logits, wanted)


@torch.no_grad()
def test_remove_puts_everything_back(model):
    ids = ids_of()
    wanted = model(ids).logits
    before = {id(module): {*vars(module)} for module in model.modules()}
    attnplug.remove(attnplug.apply(model, "trained"))
    assert {id(module): {*vars(module)} for module in model.modules()} == before
    assert torch.equal(model(ids).logits, wanted)


@plain
@torch.no_grad()
def test_a_cache_is_cropped_repeated_and_selected(model):
    ids = ids_of(2, TOKENS)
    attnplug.apply(model, "trained")
    wanted = model(ids, use_cache=False).logits[:, -4:]
    cache = attnplug.make_cache(model, 90)

    def last(cache) -> torch.Tensor:
        return model(ids[:, -4:], use_cache=True, **{CACHE: cache}).logits

    model(ids[:, :-4], use_cache=True, **{CACHE: cache})
    model(ids_of(2, 7), use_cache=True, **{CACHE: cache})
    cache.crop(-7)
    assert near(last(cache), wanted)
    cache.crop(-4)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 1]))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert near(last(cache), wanted)
    cache.crop(-4)
    other = attnplug.make_cache(model, 120)
    other.adopt(cache)
    assert near(last(other), wanted)
    cache.reset()
    model(ids[:1, :-4], use_cache=True, **{CACHE: cache})
    found = model(ids[:1, -4:], use_cache=True, **{CACHE: cache}).logits
    assert near(found, wanted[:1])


@torch.no_grad()
def test_a_returned_cache_serves_the_next_turn(model):
    ids = ids_of(1, 30)
    told = {"return_dict_in_generate": True}
    stock = new_tokens(model, ids, **told)
    turn = torch.cat([stock.sequences, ids_of(1, 90)], 1)
    wanted = new_tokens(model, turn, **{CACHE: stock[CACHE]})
    attnplug.apply(model, "trained")
    ours = new_tokens(model, ids, **told)
    assert torch.equal(ours.sequences, stock.sequences)
    assert torch.equal(new_tokens(model, turn, **{CACHE: ours[CACHE]}), wanted)


@torch.no_grad()
def test_autocast(model):
    ids = ids_of(1, TOKENS)
    exact = model(ids).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = model(ids).logits
    attnplug.apply(model, "trained")
    cache = attnplug.make_cache(model, 90)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for options in ({"use_cache": False}, {"use_cache": True, CACHE: cache}):
            found = model(ids, **options).logits
            assert (found - exact).norm() < 2 * (stock - exact).norm()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@plain
@torch.no_grad()
def test_compiled_steps(model):
    """Prompt and steps in one graph each, which transformers' own indexer breaks."""
    ids = ids_of(1, TOKENS)
    wanted = model(ids).logits
    attnplug.apply(model, "trained")
    cache = attnplug.make_cache(model, 90)
    model(ids[:, :60], use_cache=True, **{CACHE: cache})
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in range(60, TOKENS):
            told = {"position_ids": torch.tensor([[t]]), "use_cache": True, CACHE: cache}
            found = compiled(ids[:, t : t + 1], **told).logits
            assert near(found, wanted[:, t : t + 1])


@plain
@torch.no_grad()
def test_no_tensor_of_queries_by_keys(model):
    ids = ids_of(1, 2048)
    with Largest() as stock:
        wanted = model.model(ids, use_cache=False).last_hidden_state
    attnplug.apply(model, "trained")
    with Largest() as ours:
        found = model.model(ids, use_cache=False).last_hidden_state
    assert stock.found >= 4 * 16 * 2048 * 512  # a score of each head, query and pool
    assert ours.found <= 4 << 20
    assert near(found, wanted)


def test_code_that_is_not_known_is_left_to_the_model(model):
    module = model.model.language_model.layers[0].self_attn
    known, picks = type(module), type(module.indexer)

    class Reads(known):
        def build_attention_mask_from_topk(self, *args, **kwargs):
            return super().build_attention_mask_from_topk(*args, **kwargs)

    class Picks(picks):
        def get_pooled_states(self, packed_states):
            return super().get_pooled_states(packed_states * 2)

    for owner, kind in ((module, Reads), (module.indexer, Picks)):
        before, kind.__module__ = type(owner), known.__module__
        owner.__class__ = kind
        assert "does not know" in why_not_indexed(module)
        with attnplug.applied(model, "trained"):
            layers = attnplug.report(model).layers
            assert {layer.prefill for layer in layers} == {"sdpa (dense)"}
        owner.__class__ = before
    assert not any(why_not_indexed(x.module) for x in find_attention_layers(model))


@torch.no_grad()
def test_picks_that_do_not_arrive_are_refused(model):
    attnplug.apply(model, "trained")
    module = model.model.language_model.layers[0].self_attn
    module.build_attention_mask_from_topk = lambda **kwargs: torch.ones(1, 1, TOKENS, TOKENS).bool()
    with pytest.raises(attnplug.UnsupportedCallError, match="without its picks"):
        model(ids_of(1, TOKENS))


@pytest.mark.gpu
@pytest.mark.parametrize("options", GLM5)
@pytest.mark.parametrize("hidden", ["whole", "left"])
@torch.no_grad()
def test_on_a_gpu(hidden, options):
    """In float32: the tokens of transformers there, and its logits in chunks and steps."""
    model = tiny_glm5(**options).cuda()
    ids, mask = (each.cuda() for each in padded(hidden))
    wanted = new_tokens(model, ids, attention_mask=mask, max_new_tokens=20)
    logits = model(ids[1:]).logits
    attnplug.apply(model, "trained")
    assert torch.equal(new_tokens(model, ids, attention_mask=mask, max_new_tokens=20), wanted)
    cache = attnplug.make_cache(model, 90)
    for begin, end in ((0, 27), (27, 55), (55, 56), (56, TOKENS)):
        found = model(ids[1:, begin:end], use_cache=True, **{CACHE: cache}).logits
        assert near(found, logits[:, begin:end], 1e-4)  # its products round otherwise
