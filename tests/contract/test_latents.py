"""`dense` on layers of multi-head latent attention: what transformers computes, from the latents of
the cache."""

import copy
import io

import accelerate
import pytest
import torch
from every_family import FEW, KINDS, build, forms
from indexed_cases import Largest
from latent_cases import models
from test_indexed import TOLERANCE, ids_of, new_tokens
from transformers import DynamicCache, StaticCache

import attnplug
from attnplug import plan
from attnplug.errors import ArgumentError
from attnplug.models.cache import PlugLayer
from attnplug.models.latents import why_not_latents
from attnplug.models.layers import find_attention_layers
from attnplug.models.names import CACHE, LATENT_NAME
from attnplug.plan_answer import plan_for, read_options

MADE = models()
pytestmark = pytest.mark.skipif(not MADE, reason="this transformers keeps no latents")
TOKENS = 60
CACHES = {
    "none": lambda model: None,
    "ours": lambda model: attnplug.make_cache(model, 80),
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(model.config, max_cache_len=80),
}


def near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    return bool((found - wanted).abs().max() < tolerance * wanted.abs().max())


def padded(hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows, of which the first begins with so many tokens of padding, and their mask."""
    ids = ids_of(2, TOKENS)
    mask = torch.ones_like(ids)
    ids[0, :hidden] = mask[0, :hidden] = 0
    return ids, mask


@pytest.fixture(params=["deepseek_v3"])
def model(request):
    if request.param not in MADE:
        pytest.skip("this transformers has no such family")
    return MADE[request.param]()


@pytest.mark.parametrize("calls", ["few", pytest.param("all", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MADE)
@torch.no_grad()
def test_every_family_computes_what_transformers_does(name, calls):
    model = MADE[name]()
    compared = {form: call for form, call in forms().items() if calls == "all" or form in FEW}
    wanted = {form: call(model) for form, call in compared.items()}
    attnplug.apply(model, "dense")
    full = [layer for layer in attnplug.report(model).layers if layer.kind == "full"]
    assert full
    assert all(layer.prefill == layer.decode == "dense" for layer in full)
    assert all("keeps latents, 64 numbers a token" in layer.reason for layer in full)
    for form, call in compared.items():
        error = (call(model) - wanted[form]).abs().max() / wanted[form].abs().max()
        assert error < TOLERANCE, (form, float(error))


@pytest.mark.parametrize("policy", ["auto", "trained", "dense+stream", "stream+trained"])
@torch.no_grad()
def test_policies_that_decode_by_dense_keep_latents(model, policy):
    ids = ids_of(2)
    wanted = new_tokens(model, ids)
    with attnplug.applied(model, policy):
        layers = attnplug.report(model).layers
        assert {layer.decode for layer in layers} == {"dense"}
        assert all(("not traced" in x.reason) == ("stream" in policy) for x in layers)
        assert torch.equal(new_tokens(model, ids), wanted)
        assert "decode by dense" in str(attnplug.report(model))
        assert not attnplug.report(model).loop
        made = attnplug.make_cache(model, 50)
        model(ids, use_cache=True, **{CACHE: made})
        shapes = {(tuple(x.keys.shape), tuple(x.values.shape)) for x in made.layers}
        assert shapes == {((2, 1, 50, 32), (2, 1, 50, 32))}


@pytest.mark.parametrize("policy", ["momo", "gather(min_tokens=0)", "momo+gather+trained", "exact"])
@torch.no_grad()
def test_methods_of_keys_and_values_leave_the_model_alone(model, policy):
    ids = ids_of()
    wanted = model(ids).logits
    with attnplug.applied(model, policy):
        for layer in attnplug.report(model).layers:
            assert layer.prefill == "sdpa (dense)"
            assert "latent" in layer.reason
        assert torch.equal(model(ids).logits, wanted)


@torch.no_grad()
def test_a_mapping_may_name_some_layers(model):
    ids = ids_of(2)
    wanted = new_tokens(model, ids)
    attnplug.apply(model, {"1-2": "dense"})
    decode = [layer.decode for layer in attnplug.report(model).layers]
    assert decode == ["sdpa (dense)", "dense", "dense", "sdpa (dense)"]
    assert torch.equal(new_tokens(model, ids), wanted)


@torch.no_grad()
def test_remove_puts_everything_back(model):
    ids = ids_of()
    wanted = model(ids).logits
    before = {id(module): {*vars(module)} for module in model.modules()}
    attnplug.apply(model, "dense")
    assert model.config._attn_implementation == LATENT_NAME
    attnplug.remove(model)
    assert {id(module): {*vars(module)} for module in model.modules()} == before
    assert torch.equal(model(ids).logits, wanted)


@torch.no_grad()
def test_a_copy_and_a_saved_model_keep_the_policy(model):
    ids = ids_of()
    attnplug.apply(model, "dense")
    wanted = model(ids).logits
    assert torch.equal(copy.deepcopy(model)(ids).logits, wanted)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(ids).logits, wanted)


@pytest.mark.parametrize("expands", [False, True])
@pytest.mark.parametrize("hidden", [0, 20])
@pytest.mark.parametrize("name", CACHES)
@torch.no_grad()
def test_prompts_chunks_and_steps(model, name, hidden, expands, monkeypatch):
    """Each chunk by latents or, a head at a time, by what is expanded."""
    ids, mask = padded(hidden)
    shown = mask.bool()
    wanted = model(ids, attention_mask=mask, use_cache=False).logits
    monkeypatch.setattr("attnplug.policies._absorbed.EXPANDED", 1)
    least = 3 if expands else 99
    monkeypatch.setattr("attnplug.policies.dense._expanding_pays", lambda call: least)
    monkeypatch.setattr("attnplug.policies.dense.LATENT_SLAB", 11)
    attnplug.apply(model, "dense")
    cache = CACHES[name](model)
    if cache is None:
        found = model(ids, attention_mask=mask, use_cache=False).logits
        assert near(found[shown], wanted[shown])
        return
    for begin, end in ((0, 27), (27, 50), (50, 51), (51, 53), (53, TOKENS)):
        told = {"attention_mask": mask[:, :end], "use_cache": True, CACHE: cache}
        found = model(ids[:, begin:end], **told).logits
        part = shown[:, begin:end]
        assert near(found[part], wanted[:, begin:end][part]), (begin, end)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
        {"prefill_chunk_size": 23},
        {"max_new_tokens": 30},
    ],
    ids=str,
)
@torch.no_grad()
def test_generate(model, options):
    rows = 1 if "prompt_lookup_num_tokens" in options else 2
    ids = ids_of(rows, TOKENS)
    wanted = new_tokens(model, ids, **options)
    attnplug.apply(model, "dense")
    assert torch.equal(new_tokens(model, ids, **options), wanted)


@torch.no_grad()
def test_a_cache_is_cropped_repeated_and_selected(model):
    ids = ids_of(2, 24)
    attnplug.apply(model, "dense")
    wanted = model(ids).logits[:, -4:]
    cache = attnplug.make_cache(model, 40)
    assert all(type(layer) is PlugLayer for layer in cache.layers)
    model(ids[:, :20], use_cache=True, **{CACHE: cache})
    model(ids_of(2, 6), use_cache=True, **{CACHE: cache})
    cache.crop(-6)
    assert near(model(ids[:, 20:], use_cache=True, **{CACHE: cache}).logits, wanted)
    cache.crop(-4)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 1]))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert near(model(ids[:, 20:], use_cache=True, **{CACHE: cache}).logits, wanted)
    other = attnplug.make_cache(model, 64)
    cache.crop(-4)
    other.adopt(cache)
    assert near(model(ids[:, 20:], use_cache=True, **{CACHE: other}).logits, wanted)


@torch.no_grad()
def test_a_returned_cache_serves_the_next_turn(model):
    ids = ids_of(1, 12)
    told = {"return_dict_in_generate": True}
    stock = new_tokens(model, ids, **told)
    turn = torch.cat([stock.sequences, ids_of(1, 70)], 1)
    wanted = new_tokens(model, turn, **{CACHE: stock[CACHE]})
    attnplug.apply(model, "dense")
    ours = new_tokens(model, ids, **told)
    assert torch.equal(ours.sequences, stock.sequences)
    assert torch.equal(new_tokens(model, turn, **{CACHE: ours[CACHE]}), wanted)


@pytest.mark.parametrize("own", ["sdpa", "eager"])
@torch.no_grad()
def test_a_mask_of_the_users_own(model, own):
    """Two documents in one row, by a 4-dimensional mask."""
    model.set_attn_implementation(own)
    ids = ids_of()
    mask = torch.ones(1, 1, 30, 30).tril().bool()
    mask[..., 12:, :12] = False
    additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    wanted = model(ids, attention_mask=additive).logits
    attnplug.apply(model, "dense")
    for each in (mask, additive):
        assert near(model(ids, attention_mask=each).logits, wanted)
    assert "mask of its own" in str(attnplug.report(model).last)


@torch.no_grad()
def test_autocast(model):
    """bfloat16 within autocast, with and without a cache: as near to float32 as transformers is."""
    ids = ids_of()
    exact = model(ids).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = model(ids).logits
    attnplug.apply(model, "dense")
    cache = attnplug.make_cache(model, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(ids, use_cache=False).logits
        steps = [model(x[None, None], use_cache=True, **{CACHE: cache}).logits for x in ids[0]]
    for each in (found, torch.cat(steps, 1)):
        assert (each - exact).norm() < 2 * (stock - exact).norm()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@torch.no_grad()
def test_compiled_in_one_graph(model):
    """The prompt, and steps without a recompilation."""
    ids = ids_of(1, 30)
    wanted = model(ids).logits
    attnplug.apply(model, "dense")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    whole = compiled(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    assert near(whole, wanted)
    cache = attnplug.make_cache(model, 40)
    model(ids[:, :20], use_cache=True, **{CACHE: cache})
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in range(20, 30):
            told = {"position_ids": torch.tensor([[t]]), "use_cache": True, CACHE: cache}
            found = compiled(ids[:, t : t + 1], **told).logits
            assert near(found, wanted[:, t : t + 1])


@torch.no_grad()
def test_no_tensor_of_queries_by_keys_and_no_step_that_expands_the_cache(model, monkeypatch):
    ids, tokens = ids_of(1, 2049), 2048
    attnplug.apply(model, "dense")
    cache = attnplug.make_cache(model, 2100)
    with Largest() as prompt:
        model.model(ids[:, :tokens], use_cache=True, **{CACHE: cache})
    with Largest() as step:
        model.model(ids[:, tokens:], use_cache=True, **{CACHE: cache})
    assert prompt.found < 4 * tokens * tokens / 2
    assert step.found < 4 * 2100 * (2 * 64)  # the keys of both heads


def test_code_that_is_not_known_is_left_to_the_model(model):
    module = find_attention_layers(model)[1].module
    known = type(module)

    class Expands(known):
        def expand_kv(self, kv_nope, k_rot):
            return super().expand_kv(kv_nope * 2, k_rot)

    class Reads(known):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    for kind in (Expands, Reads):
        module.__class__, kind.__module__ = kind, known.__module__
        assert "does not know" in why_not_latents(module)
        with attnplug.applied(model, "dense"):
            layers = attnplug.report(model).layers
            assert [x.index for x in layers if x.decode != "dense"] == [1]
            assert kind.__name__ in layers[1].reason
    module.__class__ = known
    assert not why_not_latents(module)


@torch.no_grad()
def test_weights_that_are_no_plain_matrix_are_refused(model):
    class Other(torch.nn.Linear):
        pass

    first = find_attention_layers(model)[0].module
    plain = type(first.kv_b_proj)
    first.kv_b_proj.__class__ = Other
    with attnplug.applied(model, "dense"):
        assert "expanded by a Other" in attnplug.report(model).layers[0].reason
    first.kv_b_proj.__class__ = plain
    attnplug.apply(model, "dense")
    first.kv_b_proj.__class__ = Other
    with pytest.raises(attnplug.UnsupportedCallError, match="kv_b_proj became a Other"):
        model(ids_of())


@torch.no_grad()
def test_a_hook_on_what_expands_latents_is_honoured(model):
    """The layer then runs the model's own attention, and `report` says so."""
    ids, seen = ids_of(), []
    attnplug.apply(model, "dense")
    wanted = new_tokens(model, ids)
    projection = find_attention_layers(model)[1].module.kv_b_proj
    handle = projection.register_forward_hook(lambda module, inputs, output: seen.append(output))
    assert torch.equal(new_tokens(model, ids), wanted)
    assert len(seen) == 6
    by = [call.decode for call in attnplug.report(model).last]
    assert by == ["dense", "sdpa (kv_b_proj has a forward hook)", "dense", "dense"]
    handle.remove()
    seen.clear()
    assert torch.equal(new_tokens(model, ids), wanted) and not seen


@torch.no_grad()
def test_offloaded_weights_are_left_to_the_model(model):
    ids = ids_of()
    wanted = model(ids).logits
    accelerate.cpu_offload(model, torch.device("cpu"))
    attnplug.apply(model, "dense")
    assert all("only while that runs" in x.reason for x in attnplug.report(model).layers)
    assert near(model(ids).logits, wanted)


def test_continuous_batching_is_refused(model):
    """transformers' own fails within: its pages are of keys and values."""
    attnplug.apply(model, "dense")
    with pytest.raises(attnplug.UnsupportedCallError, match="keeps latents"):
        model.init_continuous_batching()


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [("deepseek_v3", 4 * 64), ("deepseek_v32", 4 * (64 + 32)), ("glm4_moe_lite", 4 * 64)],
)
def test_a_config_of_latents_gives_their_bytes(tmp_path, kind, numbers):
    if kind not in KINDS:
        pytest.skip("this transformers has no such family")
    build(kind).config.save_pretrained(tmp_path)
    shape = plan.shape_of(str(tmp_path))
    assert (shape.layers, shape.cached(10)) == (0, 2 * 10 * numbers)
    assert shape.of_rank(3).cached(10) == shape.cached(10)
    with pytest.raises(ArgumentError, match=f"keeps latents: {2 * numbers} bytes a token"):
        plan_for(shape, plan.H200, read_options([1], 1, "gather"))


def test_a_config_of_picked_blocks_gives_their_bytes(tmp_path):
    if "minimax_m3_vl_text" not in KINDS:
        pytest.skip("this transformers has no such family")
    types = ["full_attention", "minimax_m3_sparse"] * 2
    build("minimax_m3_vl_text", layer_types=types).config.save_pretrained(tmp_path)
    shape = plan.shape_of(str(tmp_path))
    assert (shape.layers, shape.shared) == (4, 2 * 32)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [0, 20])
@torch.no_grad()
def test_on_a_gpu(hidden):
    """In float32: the tokens of transformers there, and its logits in chunks and steps."""
    model = MADE["deepseek_v3"]().cuda()
    ids, mask = (each.cuda() for each in padded(hidden))
    wanted = new_tokens(model, ids, attention_mask=mask, max_new_tokens=20)
    logits = model(ids[1:]).logits
    attnplug.apply(model, "dense")
    assert torch.equal(new_tokens(model, ids, attention_mask=mask, max_new_tokens=20), wanted)
    cache = attnplug.make_cache(model, 80)
    for begin, end in ((0, 27), (27, 50), (50, 51), (51, TOKENS)):
        found = model(ids[1:, begin:end], use_cache=True, **{CACHE: cache}).logits
        assert near(found, logits[:, begin:end], 1e-4)  # its products round otherwise
