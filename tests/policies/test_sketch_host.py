"""sketch with keys and values in host memory: what a cache on the GPU gives, with codes and little
else there."""

import dataclasses

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sketch_layer_cases import SIZE, prefill, tokens
from sketch_layer_cases import SKETCH as GPU
from step_cases import DIM, HEADS, KV_HEADS

import attnplug
from attnplug import Dense, HostMemoryError, PolicyError, Sketch, telemetry
from attnplug.models import host_memory
from attnplug.policies import AttentionCall, LayerShape, certificates, refit
from attnplug.policies._sketch_layer import HostSketchLayer, SketchLayer
from attnplug.testing import tiny_model

HOST = dataclasses.replace(GPU, kv="host")


def pair(new: torch.Tensor, mask: torch.Tensor | None = None) -> list[SketchLayer]:
    """Layers on the GPU and in host memory that have seen the same prefill."""
    both = [policy.cache_layer(SIZE) for policy in (GPU, HOST)]
    for layer in both:
        prefill(layer, new, mask)
    return both


def attend(layer: SketchLayer, q: torch.Tensor, mask=None, **options) -> torch.Tensor:
    keys, values = layer._buffers()
    lengths = layer.cumulative_length.reshape(1)
    call = AttentionCall(
        q, keys, values, DIM**-0.5, lengths=lengths, key_mask=mask, state=layer, **options
    )
    return GPU.attend(call)


def same(both: list[SketchLayer], seed: int, mask=None, **options) -> None:
    """One step's output, and the bins that it leaves, which hang on the picks."""
    near, far = both
    device, batch = near.keys.device, len(near.keys)
    q = tokens(seed, 1, batch)[2].to(device)
    wanted, found = (attend(layer, q, mask, **options) for layer in both)
    if device.type == "cpu":
        assert torch.equal(found, wanted)
    else:
        assert (found - wanted).abs().max() < 1e-5
    assert torch.equal(near.hint, far.hint)
    assert all(map(torch.equal, near.codes, far.codes))
    if near.fitted_at > 1:  # one token has no directions
        assert all(map(torch.equal, near.basis, far.basis))


def append(both: list[SketchLayer], seed: int, deferred: bool = True) -> None:
    new = tokens(seed, 1, len(both[0].keys), both[0].keys.device.type)[:, :, :KV_HEADS]
    for layer in both:
        layer.defer_next = deferred
        layer.update(new[0], new[1])
        assert (layer.pending is not None) == deferred


@pytest.mark.parametrize("deferred", [False, True])
def test_steps_are_those_of_a_cache_on_the_gpu(deferred, device):
    """To the bit on a CPU, over the ends of blocks, with a basis made anew on the way."""
    both = pair(tokens(0, 1010, 2, device))
    sinks = torch.randn(HEADS, generator=torch.Generator().manual_seed(1)).to(device)
    for seed in range(140):
        append(both, seed, deferred)
        if seed == 60:
            for layer in both:
                layer.due = 0
        same(both, seed, softcap=5.0 * (seed % 2), sinks=sinks)
    near, far = both
    assert near.fitted_at == far.fitted_at == 1071 - deferred
    assert torch.equal(near.keys, far.keys) and torch.equal(near.values, far.values)
    assert torch.equal(near.recent, far.recent)
    assert torch.equal(near.cumulative_length, far.cumulative_length)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 640, 641, 768, 1499])
def test_any_length(length, device):
    both = pair(tokens(length, length, device=device))
    same(both, 1)
    append(both, 2)
    same(both, 3)


def test_padding_and_holes(device):
    mask = torch.arange(SIZE, device=device) >= torch.tensor([[0], [137], [880]], device=device)
    mask[0, 100] = mask[1, 300:900] = False
    new = tokens(0, 900, 3, device)
    new[:2, 0, :, 100] = torch.nan  # hidden
    both = pair(new, mask)
    for seed in range(12):
        append(both, seed)
        same(both, seed, mask)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("token", [5, 577, 1399])
def test_a_bad_key_surfaces_wherever_it_is(bad, token, device):
    new = tokens(0, 1400, device=device)
    new[0, 0, 1, token] = bad
    near, far = pair(new)
    q = tokens(1, 1, device=device)[2]
    found = attend(far, q)
    assert torch.equal(found.isnan(), attend(near, q).isnan())
    assert found[:, 2:].isnan().any(-1).all() and found[:, :2].isfinite().all()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(2, 300)),
        st.tuples(st.just("step"), st.integers(1, 60)),
        st.tuples(st.just("crop"), st.integers(0, 400)),
        st.tuples(st.just("reorder"), st.integers(0, 8)),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
        st.tuples(st.just("select"), st.integers(0, 3)),
        st.tuples(st.just("reset"), st.just(0)),
        st.tuples(st.just("another"), st.just(0)),
    ),
    min_size=3,
    max_size=8,
)


@settings(max_examples=5)
@given(actions=ACTIONS, padded=st.booleans())
@example(actions=[("crop", 400), ("append", 290), ("step", 140), ("crop", 130)], padded=False)
@example(actions=[("step", 140), ("crop", 100), ("step", 100), ("reorder", 4)], padded=True)
def test_the_fixed_part_follows_whatever_happens_to_the_cache(actions, padded):
    """Nothing that a step reads on the GPU may be older than what the host has."""
    pads = torch.tensor([0, 75]) if padded else torch.tensor([0, 0])

    def mask():
        return torch.arange(SIZE) >= pads[:, None] if padded else None

    both, seed = pair(tokens(0, 700, 2), mask()), 1
    for action, number in actions:
        length, seed = int(both[0].cumulative_length), seed + 200
        if action == "append" and length + number <= SIZE:
            for layer in both:
                prefill(layer, tokens(seed, number, len(pads)), mask())
        elif action == "step" and length + number <= SIZE:
            for at in range(number):
                append(both, seed + at, bool(seed + at & 6))
                same(both, seed, mask())
        elif action == "crop":
            for layer in both:
                layer.crop(-min(number, length - 80))
        elif action == "reorder":
            order = torch.tensor([number * (row + 1) // 3 % len(pads) for row in range(len(pads))])
            pads = pads[order]
            for layer in both:
                layer.reorder_cache(order)
        elif action == "repeat" and len(pads) < 5:
            pads = pads.repeat_interleave(number)
            for layer in both:
                layer.batch_repeat_interleave(number)
        elif action == "select":
            chosen = torch.arange(len(pads))[: number + 1].flip(0)
            pads = pads[chosen]
            for layer in both:
                layer.batch_select_indices(chosen)
        elif action == "reset":
            for layer in both:
                layer.reset()
                prefill(layer, tokens(seed, 800, len(pads)), mask())
        elif action == "another":  # layers that are given the tokens, as generate's cache is
            fresh = [policy.cache_layer(SIZE) for policy in (GPU, HOST)]
            for old, new in zip(both, fresh, strict=True):
                new.adopt(old)
            both = fresh
        same(both, seed, mask())


def test_beams_are_reordered_in_place(device):
    """A CUDA graph goes on reading the old addresses."""
    _, layer = pair(tokens(0, 1300, 3, device))
    attend(layer, tokens(1, 1, 3, device)[2])
    buffers = [layer.keys, layer.values, *layer.fixed, *layer.codes]
    addresses, want = [x.data_ptr() for x in buffers], [x[[2, 0, 0]] for x in buffers]
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    now = [layer.keys, layer.values, *layer.fixed, *layer.codes]
    assert addresses == [x.data_ptr() for x in now]
    assert all(map(torch.equal, want, now))


def test_the_fixed_part_is_read_from_the_host_only_where_it_must():
    """A step that finds it as it left it reads no other token of it there."""
    _, layer = pair(tokens(0, 1010))
    append([layer], 1)
    q = tokens(2, 1)[2]
    attend(layer, q)
    assert layer.fixed.held[0].tolist() == [[0, 4]] * KV_HEADS
    layer.keys[:, :, :128], layer.keys[:, :, 512:1000] = torch.nan, torch.nan
    append([layer], 3)
    assert attend(layer, q).isfinite().all()
    layer.update(*tokens(4, 1)[:2, :, :KV_HEADS])  # not by the op
    assert attend(layer, q).isnan().all()


def test_a_small_cache_is_on_the_gpu():
    """Dense reads it whole."""
    layer = dataclasses.replace(HOST, min_tokens=SIZE + 1).cache_layer(SIZE)
    prefill(layer, tokens(0, 900))
    assert not layer.on_host and layer.fixed is None and layer.codes is None
    q = tokens(1, 1)[2]
    keys, values = layer._buffers()
    lengths = layer.cumulative_length.reshape(1)
    call = AttentionCall(q, keys, values, DIM**-0.5, lengths=lengths, state=layer)
    assert torch.equal(HOST.attend(call), Dense().attend(call))


def test_no_host_memory_is_an_error_that_says_what_to_do(monkeypatch):
    layer = HOST.cache_layer(1 << 20)
    monkeypatch.setattr(host_memory, "_available", lambda: 3 << 28)
    monkeypatch.setattr(host_memory.torch.cuda, "device", lambda device: monkeypatch.context())
    with pytest.raises(HostMemoryError, match=r"1\.00 GiB of host memory.*: kv='gpu'"):
        layer._host([(1, 8, 1 << 20, 32)] * 2, torch.bfloat16, torch.device("cuda"))


@torch.no_grad()
@pytest.mark.parametrize("prefill", ["", "momo(gamma=8, block=16, top_k=2, exact_k=1)+"])
def test_generate_gives_the_tokens_of_a_cache_on_the_gpu(prefill, device, monkeypatch):
    """Whole and chunked prefill, beams, prompt lookup, whose several queries are dense over a cache
    in host memory, and a second turn."""
    monkeypatch.setattr(attnplug.Sketch, "serves_few", Dense.serves_few)
    model = tiny_model(device=device)
    ids = torch.randint(2, 90, (2, 700), generator=torch.Generator().manual_seed(0)).to(device)
    found = []
    for where in ("", ", kv='host'"):
        with attnplug.applied(model, f"{prefill}sketch(k=4, tail='drop', min_tokens=0{where})"):
            cache = attnplug.make_cache(model, 760)
            host = isinstance(cache.layers[0], HostSketchLayer)
            assert host == bool(where)
            for rows, options in (
                (ids, {}),
                (ids, {"prefill_chunk_size": 300}),
                (ids, {"num_beams": 3}),
                (ids[:1], {"prompt_lookup_num_tokens": 3}),
                (ids[:, :690], {"past_key_values": cache, "max_new_tokens": 6}),
                (ids, {"past_key_values": cache}),
            ):
                found.append(
                    model.generate(
                        rows,
                        attention_mask=torch.ones_like(rows),
                        do_sample=False,
                        **{"max_new_tokens": 16} | options,
                    )
                )
    for near, far in zip(found[:6], found[6:], strict=True):
        assert torch.equal(near, far)


@torch.no_grad()
def test_compiled_steps_are_those_of_a_cache_on_the_gpu():
    """One graph for all steps, over the end of a block and a basis that is made between them."""
    torch._dynamo.reset()
    model = tiny_model()
    ids = torch.randint(2, 90, (1, 780), generator=torch.Generator().manual_seed(1))
    logits = []
    for where in ("gpu", "host"):
        with attnplug.applied(model, f"sketch(k=8, min_tokens=0, kv='{where}')"):
            cache = attnplug.make_cache(model, 800)
            model(ids[:, :750], past_key_values=cache)
            compiled = torch.compile(
                lambda token, cache: model(token, past_key_values=cache).logits,
                fullgraph=True,
                backend="aot_eager",
            )
            compiled(ids[:, 750:751], cache)
            with torch._dynamo.config.patch(error_on_recompile=True):
                for at in range(751, 780):
                    if at == 760:
                        refit(cache)
                    logits.append(compiled(ids[:, at : at + 1], cache))
        torch._dynamo.reset()
    for near, far in zip(logits[:29], logits[29:], strict=True):
        assert (near - far).abs().max() < 1e-5


@torch.no_grad()
def test_it_is_audited_and_reported(byte_tokenizer):
    """What `attnplug report MODEL --policy "sketch(kv='host')" --steps 8` prints."""
    policies = [dataclasses.replace(x, k=16, audit=4) for x in (GPU, HOST)]
    shown = []
    for policy in policies:
        with attnplug.applied(tiny_model(), policy) as model:
            [table] = telemetry.run(model, byte_tokenizer, 1000, 8).tables()
            shown.append([list(column.cells) for column in table.columns])
    assert shown[0] == shown[1] and shown[0][0] == ["0", "1"]
    with attnplug.applied(tiny_model(), policies[1]) as model:
        assert "tokens from host memory" in str(attnplug.report(model))
        assert certificates(attnplug.make_cache(model, 200)) == []


def test_note_and_names():
    shape = LayerShape(4, 2, 64, 0.0, False, torch.device("cuda"))
    assert "reads 2,688 tokens from host memory, and 24 bytes" in Sketch(kv="host").note(shape)
    assert str(Sketch(kv="host")) == "sketch(kv='host')"
    assert attnplug.policies.parse("momo+sketch(kv='host')").decode == Sketch(kv="host")
    with pytest.raises(PolicyError, match="sketch: kv='disk', needs 'gpu' or 'host'"):
        Sketch(kv="disk")


@pytest.mark.gpu
@torch.no_grad()
def test_a_prefill_in_chunks_reads_back_and_the_cache_is_not_on_the_gpu():
    model = tiny_model(device="cuda", max_position_embeddings=1 << 17)
    ids = torch.randint(2, 90, (1, 3000), generator=torch.Generator().manual_seed(0)).cuda()
    with attnplug.applied(model, GPU):
        wanted = model(ids, past_key_values=attnplug.make_cache(model, 1 << 16)).logits[:, -1]
    before = torch.cuda.memory_allocated()  # with cuBLAS's own
    with attnplug.applied(model, HOST):
        cache = attnplug.make_cache(model, 1 << 16)
        for chunk in ids.split(1024, 1):
            logits = model(chunk, past_key_values=cache).logits[:, -1]
        layer = cache.layers[0]
        assert isinstance(layer, HostSketchLayer) and layer.exposes_buffers and layer.is_fitted
        used = torch.cuda.memory_allocated() - before
    assert (logits - wanted).abs().max() < 1e-2 * wanted.abs().max()
    assert used < layer.keys.nbytes
