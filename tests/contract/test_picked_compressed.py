"""`trained` on layers whose model picks blocks of tokens by their compressed keys (Qwen4-Exp), at
lengths where a query reads a part of its blocks."""

import itertools

import pytest
import torch
import torch._dynamo.testing
from every_family import KINDS
from indexed_cases import POOLED, QWEN, Largest, drawn, since, tiny_qwen
from test_indexed import ids_of, new_tokens
from test_picked_blocks import CACHES, near, padded
from transformers import StaticCache

import attnplug
from attnplug.call import PickedCompressed
from attnplug.models.indexed import why_not_indexed
from attnplug.models.layers import find_attention_layers
from attnplug.models.names import CACHE
from attnplug.plan import _kept_otherwise
from attnplug.policies._indexed_layer import IndexedLayer

pytestmark = since(QWEN in KINDS, "5.24")
TOKENS = 90  # 22 blocks of 4, of which a query reads 2
PARTS = ((0, 47), (47, 85), (85, 86), (86, 87), (87, TOKENS))


@pytest.fixture
def model():
    """Without linear attention, whose state cannot be cropped."""
    return tiny_qwen(layer_types=[POOLED] * 2, num_hidden_layers=2)


def mask_with_a_hole() -> torch.Tensor:
    """Of two rows: padding at the left of one, and hidden tokens within the other."""
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :7] = mask[1, 20:23] = 0
    return mask


@torch.no_grad()
def test_a_query_reads_a_part_of_its_blocks(model):
    """Otherwise the other tests would show nothing."""
    ids = ids_of(1, TOKENS)
    wanted = model(ids).logits
    for layer in model.model.layers:
        layer.self_attn.indexer.token_budget, layer.self_attn.indexer.block_topk = 88, 22
    assert not near(model(ids).logits[:, 40:], wanted[:, 40:])


def test_tokens_of_picks():
    """Blocks in any order, the tokens behind the last complete block, through slots."""
    blocks = torch.tensor([[[2, 0], [1, -1], [-1, -1]]], dtype=torch.int32)
    seen = torch.tensor([[11, 6, 3]])
    found = PickedCompressed(blocks, seen, None, 3, 8)
    wanted = [[6, 7, 8, 0, 1, 2, 9, 10], [3, 4, 5, *[-1] * 5], [-1] * 8]
    assert found.tokens(0, 3).tolist() == [wanted]
    moved = PickedCompressed(blocks, seen, torch.arange(5, 25, dtype=torch.int32)[None], 3, 9)
    wanted = [[x if x < 0 else x + 5 for x in (*row, -1)] for row in wanted[1:]]
    assert moved.tokens(1, 3).tolist() == [wanted]
    one = PickedCompressed(blocks, seen, None, 1, 2)
    assert one.tokens(0, 1).tolist() == [[[2, 0]]]


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", CACHES)
@torch.no_grad()
def test_prompts_and_steps(model, name, small, monkeypatch):
    """Whole, in chunks and token by token; small: in slabs of few queries."""
    ids = ids_of(2, TOKENS)
    wanted = model(ids).logits
    if small:
        monkeypatch.setattr("attnplug.policies.trained.SLAB", 11)
    attnplug.apply(model, "trained")
    cache = CACHES[name](model)
    if cache is None:
        assert near(model(ids, use_cache=False).logits, wanted)
        return
    for begin, end in PARTS:
        found = model(ids[:, begin:end], use_cache=True, **{CACHE: cache}).logits
        assert near(found, wanted[:, begin:end]), (begin, end)


@pytest.mark.parametrize("name", ["ours", "dynamic", "static"])
@torch.no_grad()
def test_padding_on_the_left_and_a_hole(model, name):
    """Blocks are of the tokens that a row's mask shows. Whole, in chunks and in steps."""
    ids, mask = ids_of(2, TOKENS), mask_with_a_hole()
    wanted = model(ids, attention_mask=mask).logits
    attnplug.apply(model, "trained")
    cache, real = CACHES[name](model), mask.bool()
    assert near(model(ids, attention_mask=mask, use_cache=False).logits[real], wanted[real])
    for begin, end in PARTS:
        options = {"attention_mask": mask[:, :end], "use_cache": True, CACHE: cache}
        found, here = model(ids[:, begin:end], **options).logits, real[:, begin:end]
        assert near(found[here], wanted[:, begin:end][here]), (begin, end)


@pytest.mark.parametrize("first, second", list(itertools.permutations(["none", "left", "hole"], 2)))
@torch.no_grad()
def test_another_mask_of_what_is_cached(model, first, second):
    """It moves the blocks, whose compressed keys are made anew: as with transformers' cache."""
    ids, masks = ids_of(2, TOKENS), {"none": None}
    masks["left"], masks["hole"] = torch.ones_like(ids), torch.ones_like(ids)
    masks["left"][0, :6], masks["hole"][1, 30:35] = 0, 0

    def logits(cache) -> torch.Tensor:
        found = []
        for begin, end in ((0, 60), (60, 61), (61, 62), (62, 66)):
            mask = masks[first if end in (60, 62) else second]
            mask = None if mask is None else mask[:, :end]
            found.append(
                model(
                    ids[:, begin:end], attention_mask=mask, use_cache=True, **{CACHE: cache}
                ).logits[:, -4:]
            )
        return torch.cat(found, 1)

    wanted = logits(CACHES["dynamic"](model))
    attnplug.apply(model, "trained")
    assert near(logits(CACHES["ours"](model)), wanted)


@torch.no_grad()
def test_compressed_keys_are_made_as_they_complete(model):
    """A step writes the block that its token completes, or none, and no other."""
    attnplug.apply(model, "trained")
    cache, ids = attnplug.make_cache(model, 120), ids_of(2, TOKENS)
    model(ids[:, :50], use_cache=True, **{CACHE: cache})
    options = {"use_cache": True, CACHE: cache}
    for t in range(50, 60):
        pooled = cache.layers[0].pooled.fill_(torch.nan)  # of the first layer: NaNs go further
        model(ids[:, t : t + 1], attention_mask=torch.ones(2, t + 1), **options)
        made = ~pooled.isnan().any(-1)
        assert made.nonzero()[:, 1].tolist() == ([t // 4] * 2 if t % 4 == 3 else [])


@pytest.mark.parametrize("hidden", [5, 16, 40])
@torch.no_grad()
def test_left_padding(hidden):
    model = tiny_qwen()
    ids, mask = padded(hidden)
    options = {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
    wanted = new_tokens(model, ids, **options)
    chunks = new_tokens(model, ids, attention_mask=mask, prefill_chunk_size=23)
    attnplug.apply(model, "trained")
    found = new_tokens(model, ids, **options)
    assert torch.equal(found.sequences, wanted.sequences)
    assert near(torch.stack(found.logits), torch.stack(wanted.logits))
    assert torch.equal(new_tokens(model, ids, attention_mask=mask, prefill_chunk_size=23), chunks)
    assert {call.decode for call in attnplug.report(model).last} == {"trained"}


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


@torch.no_grad()
def test_a_returned_cache_serves_the_next_turn_and_is_cropped(model):
    ids, told = ids_of(2, TOKENS), {"return_dict_in_generate": True}
    first = new_tokens(model, ids, **told)
    turn = torch.cat([first.sequences, ids_of(2, 70)], 1)
    wanted, logits = new_tokens(model, turn, **{CACHE: first[CACHE]}), model(turn).logits
    attnplug.apply(model, "trained")
    ours = new_tokens(model, ids, **told)
    assert torch.equal(new_tokens(model, turn, **{CACHE: ours[CACHE]}), wanted)
    cache = attnplug.make_cache(model, 200)
    model(turn[:, :150], use_cache=True, **{CACHE: cache})
    for cut in (-3, -66):  # within a block, and at its end
        cache.crop(cut)
        model(ids[:, :-cut], use_cache=True, **{CACHE: cache})  # others in their place
        cache.crop(cut)
    cache.crop(-1)
    found = model(turn[:, 80:], use_cache=True, **{CACHE: cache}).logits
    assert near(found, logits[:, 80:])


@torch.no_grad()
def test_a_cache_that_is_reset_takes_another_batch(model):
    ids = ids_of(3, TOKENS)
    wanted = model(ids).logits
    attnplug.apply(model, "trained")
    cache = attnplug.make_cache(model, 120)
    model(ids[:2].flip(1), use_cache=True, **{CACHE: cache})
    with pytest.raises(attnplug.UnsupportedCallError, match="holds tokens of 2 rows and got 3"):
        model(ids[:, :5], use_cache=True, **{CACHE: cache})
    cache.reset()
    for begin, end in PARTS:
        found = model(ids[:, begin:end], use_cache=True, **{CACHE: cache}).logits
        assert near(found, wanted[:, begin:end])


@pytest.mark.parametrize("name", ["none", "ours", "dynamic"])
@pytest.mark.parametrize("additive", [False, True])
@torch.no_grad()
def test_a_mask_of_the_users_own(model, name, additive):
    """In a chunk; the chunk after it is served again."""
    ids = ids_of(2, TOKENS)
    mask = torch.ones(2, 1, TOKENS, TOKENS).tril().bool()
    mask[..., 60:, :12] = False
    made = torch.where(mask, 0.0, torch.finfo(torch.float32).min) if additive else mask
    if name == "none":
        wanted = model(ids, attention_mask=made, use_cache=False).logits
        attnplug.apply(model, "trained")
        found = model(ids, attention_mask=made, use_cache=False).logits
        assert near(found, wanted)
        assert "mask of its own" in str(attnplug.report(model).last)
        return

    def logits(cache) -> torch.Tensor:
        options, width = {"use_cache": True, CACHE: cache}, 120 if name == "ours" else 80
        model(ids[:, :50], **options)
        own = torch.nn.functional.pad(made[..., 50:80, :80], (0, width - 80), value=hidden)
        parts = [model(ids[:, 50:80], attention_mask=own, **options).logits]
        parts += [model(ids[:, t : t + 1], **options).logits for t in range(80, 85)]
        return torch.cat(parts, 1)

    hidden = torch.finfo(torch.float32).min if additive else False
    stock = CACHES["static" if name == "ours" else name](model)
    wanted = logits(stock)
    attnplug.apply(model, "trained")
    assert near(logits(CACHES[name](model)), wanted)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_compiled_steps(model, masked):
    ids, mask = ids_of(2, TOKENS), torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :5] = 0 if masked else 1
    wanted = model(ids, attention_mask=mask).logits
    attnplug.apply(model, "trained")
    cache = attnplug.make_cache(model, 120)
    model(ids[:, :80], attention_mask=mask[:, :80], use_cache=True, **{CACHE: cache})
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    whole = torch.nn.functional.pad(mask, (0, 30), value=1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in range(80, TOKENS):
            options = {"position_ids": torch.full((2, 1), t), "use_cache": True, CACHE: cache}
            if masked:
                options["attention_mask"] = whole
            found = compiled(ids[:, t : t + 1], **options).logits
            assert near(found, wanted[:, t : t + 1])


@torch.no_grad()
def test_no_tensor_of_queries_by_keys(model, monkeypatch):
    ids = ids_of(1, 4096)
    attnplug.apply(model, "trained")
    monkeypatch.setattr("attnplug.policies.trained.LISTS", 1 << 20)
    with Largest() as ours:
        model.model(ids, use_cache=False)
    assert ours.found < 4096 * 4096  # a byte for each


def test_what_is_left_to_the_model():
    def why(**options) -> str:
        built = tiny_qwen(**options)
        reasons = {why_not_indexed(x.module) for x in find_attention_layers(built)}
        attnplug.apply(built, "trained")
        assert {layer.prefill for layer in attnplug.report(built).layers} == {"sdpa (dense)"}
        return reasons.pop()

    assert "picks 5000 blocks, more than 4096" in why(indexer_budget=20000)
    assert "head dimension 40 is not a multiple of 16" in why(indexer_head_dim=40)
    moving = dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
    assert "depends on the longest position" in why(rope_parameters=moving)


@torch.no_grad()
def test_a_cache_does_not_go_on_without_the_policy(model):
    ids = ids_of(1, 20)
    with attnplug.applied(model, "trained"):
        cache = attnplug.make_cache(model, 40)
        model(ids, **{CACHE: cache})
    with pytest.raises(attnplug.UnsupportedCallError, match="'trained', which is not applied"):
        model(ids[:, :1], **{CACHE: cache})


def test_what_its_cache_keeps_is_in_the_bill(model):
    kept, beside = _kept_otherwise(model, model.config.layer_types)
    attnplug.apply(model, "trained")
    cache = attnplug.make_cache(model, 64)
    with torch.no_grad():
        model(ids_of(1, 20), **{CACHE: cache})
    layers = [layer for layer in cache.layers if isinstance(layer, IndexedLayer)]
    side = [x for layer in layers for x in (layer.indexer_keys, layer.turns, layer.pooled)]
    assert kept == len(layers) > 0
    assert beside * 64 == sum(x.numel() for x in side)


def test_continuous_batching_is_refused(model):
    attnplug.apply(model, "trained")
    with pytest.raises(attnplug.UnsupportedCallError, match="keeps compressed keys"):
        model.init_continuous_batching()


@torch.no_grad()
def test_compiled_prompts_of_many_lengths_are_one_graph(model):
    attnplug.apply(model, "trained")
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for tokens in (40, 45, 53, 61):
        compiled(ids_of(1, tokens), use_cache=True)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("part", ["indexer", "k_layernorm", "attention", "rotary"])
def test_code_that_is_not_known_is_left_to_the_model(model, part, monkeypatch):
    module = model.model.layers[1].self_attn
    known = {"indexer": module.indexer, "k_layernorm": module.indexer.k_layernorm}
    if part == "rotary":
        code = "transformers.models.qwen4_exp.modeling_qwen4_exp.apply_rotary_pos_emb"
        monkeypatch.setattr(code, lambda q, k=None, cos=None, sin=None, unsqueeze_dim=1: q)
    else:
        target = known.get(part, module)

        class Other(type(target)):
            def forward(self, *args, **kwargs):
                return super().forward(*args, **kwargs)

        target.__class__ = Other
    assert "in a way that attnplug does not know" in why_not_indexed(module)
    attnplug.apply(model, "trained")
    assert {layer.prefill for layer in attnplug.report(model).layers} == {"sdpa (dense)"}


@torch.no_grad()
def test_the_model_with_images():
    """Qwen4-Exp as its checkpoint names it, asked for text: position ids have three parts."""
    from transformers import Qwen4ExpConfig, Qwen4ExpForConditionalGeneration

    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 16,
    }
    config = Qwen4ExpConfig(text_config=tiny_qwen().config.to_dict(), vision_config=vision)
    model = drawn(Qwen4ExpForConditionalGeneration, config)
    ids, mask = padded(5)
    wanted = new_tokens(model, ids, attention_mask=mask)
    attnplug.apply(model, "trained")
    assert {layer.decode for layer in attnplug.report(model).layers} == {"trained"}
    assert torch.equal(new_tokens(model, ids, attention_mask=mask), wanted)


@torch.no_grad()
def test_a_cache_without_rotary_embeddings_is_not_taken_over(model):
    ids = ids_of(1, 20)
    static = StaticCache(model.config, max_cache_len=40)
    model(ids, use_cache=True, **{CACHE: static})
    attnplug.apply(model, "trained")
    layer = attnplug.make_cache(model, 40).layers[0]
    with pytest.raises(attnplug.UnsupportedCallError, match="lacks the rotary embedding"):
        layer.adopt(static.layers[0])


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [0, 40])
@torch.no_grad()
def test_on_a_gpu(hidden):
    """In float32: the tokens of transformers there, and its logits in chunks and steps."""
    model = tiny_qwen(layer_types=[POOLED] * 4).cuda()
    ids, mask = (each.cuda() for each in padded(hidden))
    wanted = new_tokens(model, ids, attention_mask=mask, max_new_tokens=20)
    logits = model(ids[1:]).logits
    attnplug.apply(model, "trained")
    assert torch.equal(new_tokens(model, ids, attention_mask=mask, max_new_tokens=20), wanted)
    cache = attnplug.make_cache(model, 120)
    for begin, end in PARTS:
        found = model(ids[1:, begin:end], use_cache=True, **{CACHE: cache}).logits
        assert near(found, logits[:, begin:end], 1e-4)  # its products round otherwise
