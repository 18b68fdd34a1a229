"""`trained` on layers that read a window of tokens and compressed entries of all (DeepSeek-V4), at
lengths where windows have moved on and a query reads a part of its entries."""

import copy

import pytest
import torch
import torch._dynamo.testing
from every_family import KINDS
from indexed_cases import HEAVY, SLIDING, SPARSE4, V4, V4S, Largest, since, tiny_v4
from test_indexed import ids_of, new_tokens
from test_picked_blocks import CACHES, near, padded
from transformers import StaticCache

import attnplug
from attnplug.call import PickedEntries
from attnplug.models.names import CACHE
from attnplug.policies._entries_layer import EntriesLayer

pytestmark = since(V4 in KINDS, "5.20")

TOKENS = 90

PARTS = ((0, 1), (1, 6), (6, 47), (47, 85), (85, 86), (86, 87), (87, TOKENS))

# Layouts of one kind of layer repeat what the others do.
LAYOUTS = [pytest.param(i, marks=[pytest.mark.long] * (i in (1, 2))) for i in range(len(V4S))]


@pytest.fixture(params=LAYOUTS)
def model(request):
    return tiny_v4(**V4S[request.param])


@pytest.fixture
def mixed():
    """With a layer of each kind."""
    return tiny_v4()


def of_parts(model, ids, cache, mask=None) -> list[torch.Tensor]:
    found = []
    for begin, end in PARTS:
        given = None if mask is None else mask[:, :end]
        options = {"attention_mask": given, "use_cache": True, CACHE: cache}
        found.append(model(ids[:, begin:end], **options).logits)
    return found


@pytest.mark.parametrize("kind", [HEAVY, SPARSE4, "picks", "sinks"])
@torch.no_grad()
def test_a_query_reads_a_part_of_its_entries(mixed, kind):
    """Otherwise the other tests would show nothing."""
    ids = ids_of(1, TOKENS)
    wanted = mixed(ids).logits
    for layer in mixed.model.layers:
        module = layer.self_attn
        if kind == "sinks":
            module.sinks.zero_()
        elif kind == "picks" and module.layer_type == SPARSE4:
            module.compressor.indexer.index_topk = 22
        elif module.layer_type == kind:
            module.compressor.kv_norm.weight.data.neg_()
    assert not near(mixed(ids).logits[:, 40:], wanted[:, 40:], 1e-3)


def test_what_queries_read():
    """Entries, by picks or by count, and the tokens of a window that a mask shows."""
    picks = torch.tensor([[[1, -1], [0, 1]]], dtype=torch.int32)
    seen = torch.tensor([[2, 3]])
    found = PickedEntries(picks, seen, 4, 3, 4, 4 + 4, None)  # 4 entries, and all of 4 tokens
    assert found.most == 5
    assert found.listed(0, 2).tolist() == [[[1, -1, 6, 5, 4], [0, 1, 7, 6, 5]]]
    found = found._replace(length=2, size=4 + 9)  # the first tokens, with room before them
    assert found.listed(0, 2).tolist() == [[[1, -1, 11, -1, -1], [0, 1, 12, 11, -1]]]
    found = found._replace(picks=None, shown=torch.tensor([[False, True]]))
    assert found.most == 7
    assert found.listed(1, 2).tolist() == [[[0, 1, 2, -1, 12, -1, -1]]]


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", ["none", "ours", "dynamic"])
@torch.no_grad()
def test_prompts_and_steps(model, name, small, monkeypatch):
    """Whole, in chunks and token by token; small: in slabs of few queries."""
    ids = ids_of(2, TOKENS)
    wanted = model(ids).logits
    if small:
        monkeypatch.setattr("attnplug.policies.trained.LISTS", 7 * 8 * 2 * 30)
    attnplug.apply(model, "trained")
    assert {layer.prefill for layer in attnplug.report(model).layers} == {"trained"}
    cache = CACHES[name](model)
    if cache is None:
        assert near(model(ids, use_cache=False).logits, wanted)
        return
    for found, (begin, end) in zip(of_parts(model, ids, cache), PARTS, strict=True):
        assert near(found, wanted[:, begin:end]), (begin, end)


@pytest.mark.parametrize("name", ["ours", "dynamic"])
@torch.no_grad()
def test_padding_on_the_left_and_a_hole(model, name):
    """Windows hide what a mask hides, and entries are of all tokens. As in transformers, what
    padded queries give is a part of what later ones read."""
    ids, mask = ids_of(2, TOKENS), torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :20] = mask[1, 50:53] = 0
    whole = model(ids, attention_mask=mask).logits
    wanted = of_parts(model, ids, CACHES["dynamic"](model), mask)
    attnplug.apply(model, "trained")
    assert near(model(ids, attention_mask=mask, use_cache=False).logits, whole)
    for found, each in zip(of_parts(model, ids, CACHES[name](model), mask), wanted, strict=True):
        assert near(found, each)


@pytest.mark.parametrize("name", ["ours", "dynamic"])
@torch.no_grad()
def test_position_ids_that_do_not_count_slots(model, name):
    """They say how many entries several queries see; one query of a heavy layer sees all."""
    ids, places = ids_of(2, TOKENS), torch.arange(TOKENS).expand(2, -1).clone()
    places[0] = (places[0] - 30).clamp(min=0)
    places[1] += 11

    def logits(cache) -> torch.Tensor:
        found = []
        for begin, end in PARTS:
            options = {"position_ids": places[:, begin:end], "use_cache": True, CACHE: cache}
            found.append(model(ids[:, begin:end], **options).logits)
        return torch.cat(found, 1)

    wanted = logits(CACHES["dynamic"](model))
    attnplug.apply(model, "trained")
    assert near(logits(CACHES[name](model)), wanted)


@pytest.mark.parametrize("hidden", [0, 20, pytest.param(5, marks=pytest.mark.long)])
@torch.no_grad()
def test_generate(model, hidden):
    ids, mask = padded(hidden)
    told = {"attention_mask": mask, "return_dict_in_generate": True, "output_logits": True}
    wanted = new_tokens(model, ids, max_new_tokens=20, **told)
    chunks = new_tokens(model, ids, attention_mask=mask, prefill_chunk_size=23)
    attnplug.apply(model, "trained")
    found = new_tokens(model, ids, max_new_tokens=20, **told)
    assert torch.equal(found.sequences, wanted.sequences)
    assert near(torch.stack(found.logits), torch.stack(wanted.logits))
    assert {type(layer) for layer in found[CACHE].layers} == {EntriesLayer}
    assert torch.equal(
        new_tokens(model, ids, attention_mask=mask, max_new_tokens=20), wanted.sequences
    )
    assert not attnplug.report(model).loop  # attnplug's own has decoded
    assert torch.equal(new_tokens(model, ids, attention_mask=mask, prefill_chunk_size=23), chunks)
    assert {call.decode for call in attnplug.report(model).last} == {"trained"}


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"num_beams": 3},
        {"num_return_sequences": 2, "do_sample": True},
        {"cache_implementation": "dynamic"},
        {"max_new_tokens": 1},
        {"use_cache": False},
    ],
    ids=str,
)
@torch.no_grad()
def test_other_calls_of_generate(mixed, options):
    ids, mask = padded(7)
    torch.manual_seed(5)
    wanted = new_tokens(mixed, ids, attention_mask=mask, **options)
    attnplug.apply(mixed, "trained")
    torch.manual_seed(5)
    assert torch.equal(new_tokens(mixed, ids, attention_mask=mask, **options), wanted)


@torch.no_grad()
def test_a_static_cache_is_asked_for(mixed):
    """transformers has none for this family, and generate of a served model has."""
    ids = ids_of(2, 20)
    wanted = new_tokens(mixed, ids)
    attnplug.apply(mixed, "trained")
    assert torch.equal(new_tokens(mixed, ids, cache_implementation="static"), wanted)


@pytest.mark.parametrize("tokens", [1, 3, 17])
@torch.no_grad()
def test_short_prompts(model, tokens):
    """Of fewer tokens than an entry, or a window, has; later entries are of the prompt's tokens."""
    ids = ids_of(2, tokens)
    wanted = new_tokens(model, ids, max_new_tokens=20)
    attnplug.apply(model, "trained")
    assert torch.equal(new_tokens(model, ids, max_new_tokens=20), wanted)


@torch.no_grad()
def test_a_returned_cache_serves_the_next_turn(model):
    ids, told = ids_of(2, TOKENS), {"return_dict_in_generate": True}
    first = new_tokens(model, ids, **told)
    turn = torch.cat([first.sequences, ids_of(2, 70)], 1)
    wanted = new_tokens(model, turn, **{CACHE: first[CACHE]})
    attnplug.apply(model, "trained")
    ours = new_tokens(model, ids, **told)
    assert torch.equal(new_tokens(model, turn, **{CACHE: ours[CACHE]}), wanted)


@torch.no_grad()
def test_rows_of_a_cache_move_and_are_taken_over(model):
    ids = ids_of(3, TOKENS)
    wanted = model(ids).logits
    attnplug.apply(model, "trained")
    cache = attnplug.make_cache(model, 120)
    with pytest.raises(attnplug.UnsupportedCallError, match="more do not fit"):
        model(ids_of(3, 121), use_cache=True, **{CACHE: cache})
    model(ids[:2, :50], use_cache=True, **{CACHE: cache})
    with pytest.raises(attnplug.UnsupportedCallError, match="holds tokens of 2 rows and got 3"):
        model(ids[:, :5], use_cache=True, **{CACHE: cache})
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.reorder_cache(torch.tensor([1, 0]))
    other, kept = attnplug.make_cache(model, 100), copy.deepcopy(cache)
    other.adopt(cache)
    for each in (cache, kept, other):
        found = model(ids[:2, 50:], use_cache=True, **{CACHE: each}).logits
        assert near(found, wanted[:2, 50:])
    cache.reset()
    found = of_parts(model, ids, cache)
    assert near(torch.cat(found, 1), wanted)


@torch.no_grad()
def test_a_cache_is_not_cropped(mixed):
    """What a window has pushed out is gone; transformers' own cannot go back either."""
    ids = ids_of(1, TOKENS)
    attnplug.apply(mixed, "trained")
    cache = attnplug.make_cache(mixed, 120)
    wanted = mixed(ids).logits
    mixed(ids[:, :50], use_cache=True, **{CACHE: cache})
    with pytest.raises(attnplug.UnsupportedCallError, match="Keep a copy of the cache"):
        cache.crop(-1)
    cache.crop(0)
    assert near(mixed(ids[:, 50:], use_cache=True, **{CACHE: cache}).logits, wanted[:, 50:])
    with pytest.raises(ValueError, match="stateful"):
        new_tokens(mixed, ids, prompt_lookup_num_tokens=2)


@torch.no_grad()
def test_buffers_stay_where_they_are(model):
    attnplug.apply(model, "trained")
    cache, ids = attnplug.make_cache(model, 120), ids_of(2, TOKENS)
    model(ids[:, :50], use_cache=True, **{CACHE: cache})

    def places() -> list[int]:
        return [x.data_ptr() for layer in cache.layers for x in layer.tensors() if x.numel()]

    before = places()
    for t in range(50, 60):
        model(ids[:, t : t + 1], use_cache=True, **{CACHE: cache})
    assert places() == before


@torch.no_grad()
def test_a_step_writes_its_own_entry_alone(mixed):
    """The entry of its token's window, which is complete with the last one."""
    attnplug.apply(mixed, "trained")
    cache, ids = attnplug.make_cache(mixed, 120), ids_of(2, TOKENS)
    mixed(ids[:, :50], use_cache=True, **{CACHE: cache})
    for t in range(50, 60):
        layer = cache.layers[1]
        before = layer.keys[:, 0, :31].clone(), layer.index_entries.clone()
        mixed(ids[:, t : t + 1], use_cache=True, **{CACHE: cache})
        for held, then in zip((layer.keys[:, 0, :31], layer.index_entries), before, strict=True):
            written = (held != then).any(-1).any(0).nonzero().flatten()
            assert written.tolist() == [t // 4]


@pytest.mark.parametrize("name", ["none", "dynamic"])
@torch.no_grad()
def test_a_mask_of_the_users_own(model, name):
    """In a chunk, and of one query; the chunk after it is served again."""
    ids = ids_of(2, TOKENS)
    lowest = torch.finfo(torch.float32).min
    if name == "none":
        mask = torch.zeros(2, 1, TOKENS, TOKENS).masked_fill(
            ~torch.ones(90, 90).tril().bool(), lowest
        )
        mask[1, :, 60:, 50:55] = lowest
        wanted = model(ids, attention_mask=mask, use_cache=False).logits
        attnplug.apply(model, "trained")
        assert near(model(ids, attention_mask=mask, use_cache=False).logits, wanted)
        assert "mask of its own" in str(attnplug.report(model).last)
        return

    def logits(cache) -> torch.Tensor:
        options, held = {"use_cache": True, CACHE: cache}, model.config.sliding_window - 1
        model(ids[:, :50], **options)
        own = torch.zeros(2, 1, 30, held + 30)
        own[0, :, :, ::3] = lowest
        parts = [model(ids[:, 50:80], attention_mask=own, **options).logits]
        parts += [model(ids[:, 80:81], attention_mask=own[:, :, 5:6, : held + 1], **options).logits]
        parts += [model(ids[:, t : t + 1], **options).logits for t in range(81, 85)]
        return torch.cat(parts, 1)

    wanted = logits(CACHES[name](model))
    attnplug.apply(model, "trained")
    assert near(logits(CACHES[name](model)), wanted)


@torch.no_grad()
def test_a_mask_of_the_users_own_is_refused_with_attnplugs_cache(mixed):
    attnplug.apply(mixed, "trained")
    cache = attnplug.make_cache(mixed, 120)
    mask = torch.zeros(1, 1, 20, 20)
    with pytest.raises(attnplug.UnsupportedCallError, match="a mask of 4 dimensions"):
        mixed(ids_of(1, 20), attention_mask=mask, use_cache=True, **{CACHE: cache})


@torch.no_grad()
def test_packed_sequences(mixed):
    """By position ids that begin anew: windows end there, and entries do not, as there."""
    ids, places = ids_of(1, 60), torch.cat([torch.arange(25), torch.arange(35)])[None]
    wanted = mixed(ids, position_ids=places, use_cache=False).logits
    plain = mixed(ids, use_cache=False).logits
    attnplug.apply(mixed, "trained")
    found = mixed(ids, position_ids=places, use_cache=False).logits
    assert near(found, wanted) and not near(found, plain)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_compiled_steps(mixed, masked):
    """transformers compiles no step of this family."""
    ids, mask = ids_of(2, TOKENS), torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :5] = 0 if masked else 1
    wanted = mixed(ids, attention_mask=mask).logits
    attnplug.apply(mixed, "trained")
    cache = attnplug.make_cache(mixed, 120)
    mixed(ids[:, :80], attention_mask=mask[:, :80], use_cache=True, **{CACHE: cache})
    compiled = torch.compile(mixed, fullgraph=True, backend="aot_eager")
    whole = torch.nn.functional.pad(mask, (0, 30), value=1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in range(80, TOKENS):
            options = {"position_ids": torch.full((2, 1), t), "use_cache": True, CACHE: cache}
            if masked:
                options["attention_mask"] = whole
            found = compiled(ids[:, t : t + 1], **options).logits
            assert near(found, wanted[:, t : t + 1])


@torch.no_grad()
def test_no_tensor_of_queries_by_keys(monkeypatch):
    """transformers keeps a mask of 2,048 x 2,048, and scores of each head."""
    model = tiny_v4(hc_mult=2, index_n_heads=8)  # else streams and queries are larger
    ids = ids_of(1, 2048)
    with Largest() as stock:
        model.model(ids, use_cache=False)
    attnplug.apply(model, "trained")
    monkeypatch.setattr("attnplug.policies.trained.LISTS", 1 << 20)
    with Largest() as ours:
        model.model(ids, use_cache=False)
    assert stock.found >= 4 * 2 * 2048 * 2048
    assert ours.found < 2048 * 2048  # a byte for each


@torch.no_grad()
def test_autocast(mixed):
    """As near to float32 as transformers is, in the sum of rows."""
    ids = ids_of(4, 60)
    exact = mixed(ids).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = mixed(ids).logits
    attnplug.apply(mixed, "trained")
    cache = attnplug.make_cache(mixed, 70)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for options in ({"use_cache": False}, {"use_cache": True, CACHE: cache}):
            found = mixed(ids, **options).logits
            assert (found - exact).norm() < 2 * (stock - exact).norm()


@pytest.mark.parametrize("name", ["none", "ours", "dynamic"])
@torch.no_grad()
def test_bfloat16(mixed, name):
    ids = ids_of(4, TOKENS)
    exact = mixed(ids).logits
    mixed.to(torch.bfloat16)
    stock = mixed(ids).logits.float()
    attnplug.apply(mixed, "trained")
    cache = CACHES[name](mixed)
    if cache is None:
        found = mixed(ids, use_cache=False).logits
    else:
        found = torch.cat(of_parts(mixed, ids, cache), 1)
    assert (found.float() - exact).norm() < 2 * (stock - exact).norm()


@torch.no_grad()
def test_caches_of_others(mixed):
    """A cache of the policy's does not go on without it, nor a cache that keeps no entries."""
    ids = ids_of(1, 20)
    with attnplug.applied(mixed, "trained"):
        cache = attnplug.make_cache(mixed, 40)
        mixed(ids, **{CACHE: cache})
    with pytest.raises(attnplug.UnsupportedCallError, match="'trained', which is not applied"):
        mixed(ids[:, :1], **{CACHE: cache})
    windows = tiny_v4(layer_types=[SLIDING] * 4)
    wanted = new_tokens(windows, ids)
    static = StaticCache(windows.config, max_cache_len=40)
    attnplug.apply(windows, "trained")
    assert torch.equal(new_tokens(windows, ids), wanted)
    with pytest.raises(attnplug.UnsupportedCallError, match="keeps no entries"):
        windows(ids, **{CACHE: static})


@torch.no_grad()
def test_compiled_prompts_of_many_lengths_are_one_graph(mixed):
    attnplug.apply(mixed, "trained")
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(mixed, fullgraph=True, backend=counter)
    for tokens in (40, 45, 53, 61):
        compiled(ids_of(1, tokens), attention_mask=torch.ones(1, tokens), use_cache=False)
    assert counter.frame_count <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [0, 40])
@torch.no_grad()
def test_on_a_gpu(model, hidden):
    """In float32: the tokens of transformers there, and its logits in chunks and steps."""
    model = model.cuda()
    ids, mask = (each.cuda() for each in padded(hidden))
    wanted = new_tokens(model, ids, attention_mask=mask, max_new_tokens=20)
    logits = model(ids[1:]).logits
    attnplug.apply(model, "trained")
    assert torch.equal(new_tokens(model, ids, attention_mask=mask, max_new_tokens=20), wanted)
    found = of_parts(model, ids[1:], attnplug.make_cache(model, 120))
    assert near(torch.cat(found, 1), logits, 1e-4)  # its products round otherwise
