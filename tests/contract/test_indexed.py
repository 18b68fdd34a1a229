"""`trained` on models whose layers pick their tokens by an indexer: what transformers computes, by
ops that keep neither scores nor masks of queries by keys."""

import copy
import io
import re

import pytest
import torch
from every_family import build, forms
from indexed_cases import Largest, models
from transformers import AutoModelForCausalLM

import attnplug
from attnplug.models.indexed import PICKING, picking_forward, why_not_indexed
from attnplug.models.layers import find_attention_layers
from attnplug.models.names import CACHE
from attnplug.ops.gvr.index_topk import WORKSPACE
from attnplug.policies._indexed_layer import IndexedLayer

# That the cache keeps of a token, with an indexer and without; of shared latents index keys alone.
NUMBERS = {"glm5_next": {32, 105}, "mistral_large4": {0, 32, 64, 96}, "minimax_m3": set()}
TOLERANCE = 1e-5  # of the largest logit
MADE = models()
pytestmark = pytest.mark.skipif(not MADE, reason="this transformers has no such family")


def ids_of(rows: int = 1, tokens: int = 30) -> torch.Tensor:
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(2))


def new_tokens(model, ids, **options) -> torch.Tensor:
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)} | (
        options
    )
    return model.generate(ids, **options)


@pytest.fixture(params=["glm_moe_dsa", "minimax_m3-0", "qwen4_exp-1"])
def model(request):
    if request.param not in MADE:
        pytest.skip("this transformers has no such family")
    return MADE[request.param]()


latents = pytest.mark.parametrize("model", ["glm_moe_dsa"], indirect=True)
blocks = pytest.mark.parametrize("model", ["minimax_m3-0"], indirect=True)


@pytest.mark.parametrize("name", MADE)
@torch.no_grad()
def test_every_family_computes_what_transformers_does(name):
    model = MADE[name]()
    wanted = {form: call(model) for form, call in forms().items()}
    attnplug.apply(model, "trained")
    layers = attnplug.report(model).layers
    indexed = [layer for layer in layers if layer.kind == "indexed"]
    assert indexed
    assert all(layer.prefill == layer.decode == "trained" for layer in indexed)
    numbers = {int(x) for layer in indexed for x in re.findall(r"latents, (\d+)", layer.reason)}
    assert numbers <= NUMBERS.get(name.partition("-")[0], {64, 96})
    for form, call in forms().items():
        error = (call(model) - wanted[form]).abs().max() / wanted[form].abs().max()
        assert error < TOLERANCE, (form, float(error))
    last = attnplug.report(model).last
    assert "trained" in str(last)


@torch.no_grad()
def test_generate_decodes_in_attnplugs_loop(model):
    ids = ids_of(2)
    wanted = new_tokens(model, ids)
    attnplug.apply(model, "trained")
    assert torch.equal(new_tokens(model, ids), wanted)
    assert not attnplug.report(model).loop
    made = attnplug.make_cache(model, 50)
    assert all(isinstance(layer, IndexedLayer) for layer in made.layers)


@pytest.mark.parametrize("policy", ["auto", "momo+gather+trained", "trained+stream"])
@torch.no_grad()
def test_other_policies_leave_these_layers_to_trained(model, policy):
    ids = ids_of()
    wanted = model(ids).logits
    with attnplug.applied(model, policy):
        assert {layer.prefill for layer in attnplug.report(model).layers} == {"trained"}
        assert (model(ids).logits - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@pytest.mark.parametrize("policy", ["momo", "gather(min_tokens=0)", {"0": "trained"}])
@torch.no_grad()
def test_without_trained_the_model_is_left_alone(model, policy):
    ids = ids_of()
    wanted = model(ids).logits
    with attnplug.applied(model, policy):
        for layer in attnplug.report(model).layers:
            assert layer.prefill == "sdpa (dense)"
            assert layer.reason
        assert torch.equal(model(ids).logits, wanted)


@torch.no_grad()
def test_remove_puts_everything_back(model):
    ids = ids_of()
    wanted = model(ids).logits
    before = {id(module): {*vars(module)} for module in model.modules()}
    attnplug.remove(attnplug.apply(model, "trained"))
    assert {id(module): {*vars(module)} for module in model.modules()} == before
    assert torch.equal(model(ids).logits, wanted)


@torch.no_grad()
def test_a_copy_and_a_saved_model_keep_the_policy(model):
    ids = ids_of()
    attnplug.apply(model, "trained")
    wanted = model(ids).logits
    assert torch.equal(copy.deepcopy(model)(ids).logits, wanted)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    PICKING.clear()  # as in another process
    assert torch.equal(torch.load(file, weights_only=False)(ids).logits, wanted)


@torch.no_grad()
def test_a_mask_of_the_users_own(model):
    """Two documents in one row, by a 4-dimensional mask."""
    ids = ids_of()
    mask = torch.ones(1, 1, 30, 30).tril().bool()
    mask[..., 12:, :12] = False
    additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    wanted = model(ids, attention_mask=mask).logits
    attnplug.apply(model, "trained")
    for own in (mask, additive):
        found = model(ids, attention_mask=own).logits
        assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@torch.no_grad()
def test_beams(model):
    ids = ids_of(2)
    wanted = new_tokens(model, ids, num_beams=3)
    attnplug.apply(model, "trained")
    assert torch.equal(new_tokens(model, ids, num_beams=3), wanted)


@torch.no_grad()
def test_a_cache_is_cropped_repeated_and_selected(model):
    ids = ids_of(2, 24)
    attnplug.apply(model, "trained")
    wanted = model(ids).logits[:, -4:]
    cache = attnplug.make_cache(model, 40)
    model(ids[:, :20], use_cache=True, **{CACHE: cache})
    model(ids_of(2, 6)[:, :6], use_cache=True, **{CACHE: cache})
    cache.crop(-6)
    found = model(ids[:, 20:], use_cache=True, **{CACHE: cache}).logits
    assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()
    cache.crop(-4)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 1]))
    cache.reorder_cache(torch.tensor([1, 0]))
    found = model(ids[:, 20:], use_cache=True, **{CACHE: cache}).logits
    assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()
    other = attnplug.make_cache(model, 64)
    cache.crop(-4)
    other.adopt(cache)
    found = model(ids[:, 20:], use_cache=True, **{CACHE: other}).logits
    assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@torch.no_grad()
def test_a_cache_grows_for_a_second_turn(model):
    ids = ids_of(1, 12)
    first = {"return_dict_in_generate": True}
    stock = new_tokens(model, ids, **first)
    turn = torch.cat([stock.sequences, ids_of(1, 70)], 1)
    wanted = new_tokens(model, turn, **{CACHE: stock[CACHE]})
    attnplug.apply(model, "trained")
    ours = new_tokens(model, ids, **first)
    assert torch.equal(ours.sequences, stock.sequences)
    assert torch.equal(new_tokens(model, turn, **{CACHE: ours[CACHE]}), wanted)


@torch.no_grad()
def test_a_long_prefill_is_attended_to_in_slabs(model, monkeypatch):
    ids = ids_of(2)
    wanted = model(ids).logits
    monkeypatch.setattr("attnplug.policies.trained.SLAB", 7)
    attnplug.apply(model, "trained")
    cache = attnplug.make_cache(model, 40)
    found = model(ids, use_cache=False).logits
    assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()
    model(ids[:, :10], use_cache=True, **{CACHE: cache})
    found = model(ids[:, 10:], use_cache=True, **{CACHE: cache}).logits
    assert (found - wanted[:, 10:]).abs().max() < TOLERANCE * wanted.abs().max()


@latents
def test_an_indexer_that_ends_otherwise_is_left_to_the_model(model):
    module = next(x.module for x in find_attention_layers(model) if x.module.indexer is not None)
    known = type(module.indexer)
    assert picking_forward(known) is not None

    class Other(known):
        def forward(self, hidden_states, cache=None):
            scores = hidden_states @ hidden_states.mT
            return scores.topk(self.index_topk).indices

    assert picking_forward(Other) is None
    module.indexer.__class__ = Other
    assert "does not know" in why_not_indexed(module)
    attnplug.apply(model, "trained")
    assert {layer.prefill for layer in attnplug.report(model).layers} == {"sdpa (dense)"}


@latents
def test_weights_that_are_no_plain_matrix_are_refused(model):
    class Quantized(torch.nn.Linear):
        pass

    for layer in find_attention_layers(model):
        layer.module.kv_b_proj.__class__ = Quantized
    attnplug.apply(model, "trained")
    reasons = {layer.reason for layer in attnplug.report(model).layers}
    assert any("Quantized" in reason for reason in reasons)


@latents
@torch.no_grad()
def test_weights_that_change_after_apply_are_refused(model):
    class Adapted(torch.nn.Linear):
        pass

    attnplug.apply(model, "trained")
    next(iter(find_attention_layers(model))).module.kv_b_proj.__class__ = Adapted
    with pytest.raises(attnplug.UnsupportedCallError, match="kv_b_proj became a Adapted"):
        model(ids_of())


@torch.no_grad()
def test_autocast(model):
    """bfloat16 within autocast, with and without a cache: as near to float32 as transformers is, in
    the sum of rows: where rounding changes a pick, or an expert, a row is far off."""
    ids = ids_of(4)
    exact = model(ids).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = model(ids).logits
    attnplug.apply(model, "trained")
    cache = attnplug.make_cache(model, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for options in ({"use_cache": False}, {"use_cache": True, CACHE: cache}):
            found = model(ids, **options).logits
            assert (found - exact).norm() < 2 * (stock - exact).norm()


@torch.no_grad()
def test_compiled_in_one_graph(model):
    ids = ids_of(1, 9)
    wanted = model(ids).logits
    attnplug.apply(model, "trained")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = compiled(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@latents
@torch.no_grad()
def test_no_tensor_of_queries_by_keys(model):
    """In a prefill of 2,048 tokens transformers keeps 2,048 x 2,048 scores of 16 heads; the largest
    tensor here is the scores' workspace, whose size is fixed."""

    ids = ids_of(1, 2048)
    with Largest() as stock:
        model.model(ids, use_cache=False)
    attnplug.apply(model, "trained")
    with Largest() as ours:
        model.model(ids, use_cache=False)
    assert stock.found >= 4 * 16 * 2048 * 2048
    assert ours.found <= WORKSPACE


def test_a_model_without_an_indexer_runs_dense():
    llama = build("llama")
    attnplug.apply(llama, "trained")
    assert {layer.prefill for layer in attnplug.report(llama).layers} == {"dense"}
    assert isinstance(llama, AutoModelForCausalLM._model_mapping[type(llama.config)])
