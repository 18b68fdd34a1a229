"""`trained` on layers whose model picks blocks of keys for each KV head (MiniMax-M3), at lengths
where a query reads a part of its blocks."""

import pytest
import torch
from every_family import KINDS
from indexed_cases import M3, SPARSE, Largest, drawn, since, tiny_minimax
from test_indexed import TOLERANCE, ids_of, new_tokens
from transformers import DynamicCache, StaticCache

import attnplug
from attnplug.call import AttentionCall, PickedBlocks
from attnplug.models.indexed import why_not_indexed
from attnplug.models.layers import find_attention_layers
from attnplug.models.names import CACHE
from attnplug.models.picked_blocks import pick_blocks
from attnplug.policies import Trained

pytestmark = since(M3 in KINDS, "5.20")
TOKENS = 90  # 6 blocks of 16, of which a query reads 2
CACHES = {
    "none": lambda model: None,
    "ours": lambda model: attnplug.make_cache(model, 120),
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(model.config, max_cache_len=120),
}


@pytest.fixture
def model():
    return tiny_minimax()


def near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    return bool((found - wanted).abs().max() < tolerance * wanted.abs().max())


def padded(hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows, of which the first begins with so many tokens of padding, and their mask."""
    ids = ids_of(2, TOKENS)
    mask = torch.ones_like(ids)
    ids[0, :hidden] = mask[0, :hidden] = 0
    return ids, mask


@torch.no_grad()
def test_a_query_reads_a_part_of_its_blocks(model):
    """Otherwise the other tests would show nothing."""
    ids = ids_of(1, TOKENS)
    wanted = model(ids).logits
    for layer in model.model.layers:
        layer.self_attn.indexer.topk_blocks = 6
    assert not near(model(ids).logits[:, 40:], wanted[:, 40:])


@pytest.mark.parametrize("local", [0, 1, 2])
@pytest.mark.parametrize("small", [False, True])
@torch.no_grad()
def test_picks_are_the_models_own(small, local, monkeypatch):
    """Also by position ids that lag behind the slots, as those of padded rows do."""
    if small:
        monkeypatch.setattr("attnplug.models.picked_blocks.WORKSPACE", 4 * 2 * 2 * 6 * 7)
    model = tiny_minimax(index_local_blocks=local, index_topk_blocks=3)
    indexer = model.model.layers[1].self_attn.indexer
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, TOKENS, 128, generator=generator)
    places = torch.arange(TOKENS).expand(2, -1).clone()
    places[1] = (places[1] - 40).clamp(min=0)
    turns = model.model.rotary_emb(hidden, position_ids=places)
    wanted = indexer(hidden, turns, None, places)
    found = pick_blocks(indexer, hidden, turns, None, places)
    assert (wanted == -1).any() and (wanted >= 0).any()
    assert torch.equal(found.sort(-1).values, wanted.sort(-1).values)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", CACHES)
@torch.no_grad()
def test_prompts_and_steps(model, name, small, monkeypatch):
    """Whole, in chunks and token by token; small: in slabs of few queries."""
    ids = ids_of(2, TOKENS)
    wanted = model(ids).logits
    if small:
        monkeypatch.setattr("attnplug.models.picked_blocks.WORKSPACE", 4 * 2 * 2 * 8 * 7)
        monkeypatch.setattr("attnplug.policies.trained.SLAB", 11)
    attnplug.apply(model, "trained")
    cache = CACHES[name](model)
    if cache is None:
        assert near(model(ids, use_cache=False).logits, wanted)
        return
    for begin, end in ((0, 47), (47, 85), (85, 86), (86, 87), (87, TOKENS)):
        found = model(ids[:, begin:end], use_cache=True, **{CACHE: cache}).logits
        assert near(found, wanted[:, begin:end]), (begin, end)


@pytest.mark.parametrize("hidden", [5, 16, 40])
@torch.no_grad()
def test_left_padding(model, hidden):
    """Also where all that a query picks is padding."""
    ids, mask = padded(hidden)
    options = {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
    wanted = new_tokens(model, ids, **options)
    alone = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    chunks = new_tokens(model, ids, attention_mask=mask, prefill_chunk_size=23)
    attnplug.apply(model, "trained")
    found = new_tokens(model, ids, **options)
    assert torch.equal(found.sequences, wanted.sequences)
    assert near(torch.stack(found.logits), torch.stack(wanted.logits))
    assert near(model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()], alone)
    assert torch.equal(new_tokens(model, ids, attention_mask=mask, prefill_chunk_size=23), chunks)
    assert {call.decode for call in attnplug.report(model).last} == {"trained"}


@torch.no_grad()
def test_left_padding_in_a_static_cache_of_transformers(model):
    """A query whose picks are padding then takes the mean of all slots, empty ones too."""
    ids, mask = padded(40)

    def logits() -> torch.Tensor:
        cache = StaticCache(model.config, max_cache_len=120)
        options = {"use_cache": True, CACHE: cache}
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        first = model(
            ids[:, :80], attention_mask=mask[:, :80], position_ids=places[:, :80], **options
        )
        more = {"attention_mask": mask, "position_ids": places[:, 80:]}
        return torch.cat([first.logits[:, 40:], model(ids[:, 80:], **more, **options).logits], 1)

    wanted = logits()
    attnplug.apply(model, "trained")
    assert near(logits(), wanted)


def test_the_mean_is_of_the_tokens_in_the_cache():
    q, (k, v) = torch.randn(1, 4, 1, 32), torch.randn(2, 1, 2, 64, 32)
    v[:, :, 20:] = torch.nan
    mask = torch.zeros(1, 64, dtype=torch.bool)
    picked = PickedBlocks(torch.full((1, 2, 1, 2), -1, dtype=torch.int32), 16)
    lengths = torch.tensor([20])
    state = Trained().cache_layer(64)
    call = AttentionCall(q, k, v, 0.1, lengths=lengths, key_mask=mask, state=state, picked=picked)
    mean = v[:, :, :20].mean(2, keepdim=True).repeat_interleave(2, 1)
    torch.testing.assert_close(Trained().attend(call), mean)


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
    attnplug.apply(model, "trained")
    assert torch.equal(new_tokens(model, ids, **options), wanted)


@torch.no_grad()
def test_a_returned_cache_serves_the_next_turn_and_is_cropped(model):
    ids = ids_of(2, TOKENS)
    told = {"return_dict_in_generate": True}
    first = new_tokens(model, ids, **told)
    turn = torch.cat([first.sequences, ids_of(2, 70)], 1)
    wanted, logits = new_tokens(model, turn, **{CACHE: first[CACHE]}), model(turn).logits
    attnplug.apply(model, "trained")
    ours = new_tokens(model, ids, **told)
    assert torch.equal(new_tokens(model, turn, **{CACHE: ours[CACHE]}), wanted)
    cache = attnplug.make_cache(model, 200)
    model(turn[:, :150], use_cache=True, **{CACHE: cache})
    cache.crop(-70)
    found = model(turn[:, 80:], use_cache=True, **{CACHE: cache}).logits
    assert near(found, logits[:, 80:])


@torch.no_grad()
def test_a_mask_of_the_users_own(model):
    ids = ids_of(1, TOKENS)
    mask = torch.ones(1, 1, TOKENS, TOKENS).tril().bool()
    mask[..., 50:, :12] = False
    wanted = model(ids, attention_mask=mask).logits
    attnplug.apply(model, "trained")
    assert near(model(ids, attention_mask=mask).logits, wanted)
    assert "mask of its own" in str(attnplug.report(model).last)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@torch.no_grad()
def test_compiled_steps(model):
    ids = ids_of(1, TOKENS)
    wanted = model(ids).logits
    attnplug.apply(model, "trained")
    cache = attnplug.make_cache(model, 120)
    model(ids[:, :80], use_cache=True, **{CACHE: cache})
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in range(80, TOKENS):
            places = torch.tensor([[t]])
            found = compiled(
                ids[:, t : t + 1], position_ids=places, use_cache=True, **{CACHE: cache}
            ).logits
            assert near(found, wanted[:, t : t + 1])


@torch.no_grad()
def test_no_tensor_of_queries_by_keys(model, monkeypatch):
    ids = ids_of(1, 2048)
    with Largest() as stock:
        wanted = model.model(ids, use_cache=False).last_hidden_state
    attnplug.apply(model, "trained")
    workspace = 1 << 21
    monkeypatch.setattr("attnplug.models.picked_blocks.WORKSPACE", workspace)
    with Largest() as ours:
        found = model.model(ids, use_cache=False).last_hidden_state
    assert stock.found >= 4 * 4 * 2048 * 2048
    assert ours.found <= workspace
    assert near(found, wanted)


def test_what_is_left_to_the_model():
    def why(**options) -> str:
        built = tiny_minimax(**options)
        reasons = {why_not_indexed(x.module) for x in find_attention_layers(built)}
        attnplug.apply(built, "trained")
        assert {layer.prefill for layer in attnplug.report(built).layers} == {"sdpa (dense)"}
        return reasons.pop()

    assert "picks for 4 heads, not for each of 2" in why(index_n_heads=4)
    assert "picks blocks of 4 keys, not of 16" in why(index_block_size=4)


def test_an_indexer_that_picks_otherwise_is_left_to_the_model(model):
    module = model.model.layers[1].self_attn

    class Other(type(module.indexer)):
        def build_block_mask(self, *args):
            return super().build_block_mask(*args) * 2

    module.indexer.__class__ = Other
    assert "does not know" in why_not_indexed(module)
    attnplug.apply(model, "trained")
    assert {layer.prefill for layer in attnplug.report(model).layers} == {"sdpa (dense)"}


def test_attention_that_keeps_its_picks_is_left_to_the_model(model):
    module = model.model.layers[1].self_attn

    class Other(type(module)):
        def forward(self, hidden_states, position_embeddings, attention_mask, cache=None, **kwargs):
            return super().forward(
                hidden_states, position_embeddings, attention_mask, cache=cache, **kwargs
            )

    module.__class__ = Other
    assert "does not hand its picks" in why_not_indexed(module)


@torch.no_grad()
def test_picks_that_do_not_arrive_are_refused(model):
    attnplug.apply(model, "trained")
    module = model.model.layers[1].self_attn
    known = module.indexer.forward
    module.indexer.forward = lambda *args: known(*args) and None
    with pytest.raises((attnplug.UnsupportedCallError, RuntimeError)):
        model(ids_of(1, TOKENS))
    module.indexer.forward = lambda *args: None
    with pytest.raises(attnplug.UnsupportedCallError, match="without block_indices"):
        model(ids_of(1, TOKENS))


@torch.no_grad()
def test_full_layers_of_the_model_take_what_the_policy_says_besides():
    model = tiny_minimax(layer_types=["full_attention", SPARSE] * 2)
    ids = ids_of(1, TOKENS)
    wanted = new_tokens(model, ids)
    attnplug.apply(model, "momo+gather(min_tokens=0, k=16)+trained")
    layers = attnplug.report(model).layers
    assert [layer.prefill for layer in layers] == ["momo", "trained"] * 2
    assert torch.equal(new_tokens(model, ids), wanted)


@torch.no_grad()
def test_the_model_with_images():
    """MiniMax-M3 as its checkpoint names it, asked for text."""
    from transformers import MiniMaxM3SparseForConditionalGeneration, MiniMaxM3VLConfig

    vision = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 56,
    }
    text = tiny_minimax().config.to_dict()
    config = MiniMaxM3VLConfig(text_config=text, vision_config=vision, projector_hidden_size=128)
    model = drawn(MiniMaxM3SparseForConditionalGeneration, config)
    ids = ids_of(2, TOKENS)
    wanted = new_tokens(model, ids)
    attnplug.apply(model, "trained")
    assert {layer.decode for layer in attnplug.report(model).layers} == {"trained"}
    assert torch.equal(new_tokens(model, ids), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [0, 40])
@torch.no_grad()
def test_on_a_gpu(hidden):
    """In float32: the tokens of transformers there, and its logits in chunks and steps. Its eager
    attention, as a query of a padded row may see no key, for which its sdpa gives another output on
    a GPU than on a CPU."""
    model = tiny_minimax().cuda()
    ids, mask = (each.cuda() for each in padded(hidden))
    model.set_attn_implementation("eager")
    wanted = new_tokens(model, ids, attention_mask=mask, max_new_tokens=20)
    logits = model(ids[1:]).logits
    model.set_attn_implementation("sdpa")
    attnplug.apply(model, "trained")
    assert torch.equal(new_tokens(model, ids, attention_mask=mask, max_new_tokens=20), wanted)
    cache = attnplug.make_cache(model, 120)
    for begin, end in ((0, 47), (47, 85), (85, 86), (86, TOKENS)):
        found = model(ids[1:, begin:end], use_cache=True, **{CACHE: cache}).logits
        assert near(found, logits[:, begin:end], 1e-4)  # its products round otherwise
