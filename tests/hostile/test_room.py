"""A cache lives as long as the conversation: the assistant's over its rounds, a call's in the next
turn, and where a length is fixed a step past the end says so before anything is written."""

import copy
import gc
import weakref

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.generation.configuration_utils import CompileConfig

import attnplug
from attnplug.models.names import CACHE
from attnplug.policies import certificates
from attnplug.testing.policy import tiny_model

OPTIONS = dict(do_sample=False, return_dict_in_generate=True)


def ids(tokens: int = 40, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 90, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def turns(model: torch.nn.Module, rows: int, device: str) -> list[list[list[int]]]:
    """Three turns of a padded conversation on the cache of the first call."""
    prompt, cache, found = ids(rows=rows).to(device), None, []
    mask = torch.ones_like(prompt)
    mask[-1, : 5 * (rows - 1)] = 0
    for turn in range(3):
        out = model.generate(
            prompt, attention_mask=mask, past_key_values=cache, max_new_tokens=9, **OPTIONS
        )
        more = ids(30 * (turn + 1), rows, seed=turn).to(device)
        prompt, cache = torch.cat([out.sequences, more], 1), out.past_key_values
        mask = torch.cat([mask, mask.new_ones(rows, prompt.shape[1] - mask.shape[1])], 1)
        found.append(out.sequences.tolist())
    return found


@pytest.mark.parametrize("rows", [1, 2])
def test_the_cache_of_one_call_serves_the_next_turns(exact, rows, device):
    model = tiny_model(device=device)
    wanted = turns(model, rows, device)
    attnplug.apply(model, exact)
    assert turns(model, rows, device) == wanted


def gemma(device: str, window: int) -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=window, pad_token_id=0,
        layer_types=["sliding_attention", "full_attention"] * 2, initializer_range=0.3,
        eos_token_id=None,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval().to(device)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("window", [20, 90])  # full from the start; cut to a short cache at first
def test_a_sliding_window_goes_on_in_the_next_turns(window, device):
    model = gemma(device, window)
    wanted = turns(model, 2, device)
    attnplug.apply(model, "gather(k=16, block=16, local=2, min_tokens=0)")
    assert turns(model, 2, device) == wanted


def test_forward_passes_go_on_with_the_cache_of_generate(exact, device):
    model, more = tiny_model(device=device), ids(25, seed=5).to(device)
    prompt = ids().to(device)
    logits = []
    for policy in (None, exact):
        if policy is not None:
            attnplug.apply(model, policy)
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, **OPTIONS
        )
        with torch.no_grad():
            steps = [
                model(more[:, i : i + 1], past_key_values=out.past_key_values).logits
                for i in range(25)
            ]
            steps.append(model(more, past_key_values=out.past_key_values).logits)
        logits.append(torch.cat(steps, 1))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)


def test_the_assistants_cache_serves_all_rounds(exact, device):
    main, helper = tiny_model(device=device), tiny_model(seed=3, device=device)
    prompt = ids().to(device)
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False)
    wanted = main.generate(prompt, **options)
    attnplug.apply(helper, exact)
    assert torch.equal(main.generate(prompt, assistant_model=helper, **options), wanted)
    attnplug.apply(main, exact)
    assert torch.equal(main.generate(prompt, assistant_model=helper, **options), wanted)


def test_the_cache_of_prompt_lookup_serves_the_next_turn(exact, device):
    """A verification leaves a cache that was cropped. transformers itself feeds the whole prompt
    again where the second turn speculates."""
    model, found = tiny_model(device=device), []
    prompt = ids(8).repeat(1, 5).to(device)
    for policy in (None, exact):
        if policy is not None:
            attnplug.apply(model, policy)
        mask = torch.ones_like(prompt)
        out = model.generate(
            prompt, attention_mask=mask, max_new_tokens=20, prompt_lookup_num_tokens=5, **OPTIONS
        )
        tokens = torch.cat([out.sequences, ids(30, seed=1).to(device)], 1)
        mask, cache = torch.ones_like(tokens), out.past_key_values
        options = dict(attention_mask=mask, past_key_values=cache, max_new_tokens=20, **OPTIONS)
        found.append(model.generate(tokens, **options).sequences.tolist())
    assert found[0] == found[1]


def test_a_layer_that_grew_keeps_nothing_of_the_old_one(exact):
    """Old buffers are freed, though a layer remembers what its last update has returned."""
    model = attnplug.apply(tiny_model(), exact)
    out = model.generate(ids(), attention_mask=torch.ones_like(ids()), max_new_tokens=9, **OPTIONS)
    cache = out.past_key_values
    old = [weakref.ref(layer) for layer in cache.layers]
    storages = [weakref.ref(layer.keys.untyped_storage()) for layer in cache.layers]
    cache.reserve(400)
    gc.collect()
    assert [ref() for ref in (*old, *storages)] == [None] * (2 * len(cache.layers))


def test_a_cache_that_grew_can_be_copied_and_saved(tmp_path):
    model = attnplug.apply(tiny_model(), "gather(k=8, block=16, local=2, min_tokens=0)")
    out = model.generate(ids(), attention_mask=torch.ones_like(ids()), max_new_tokens=9, **OPTIONS)
    out.past_key_values.reserve(400)
    torch.save(out.past_key_values, tmp_path / "cache.pt")
    read = torch.load(tmp_path / "cache.pt", weights_only=False)
    more = torch.cat([out.sequences, ids(20, seed=4)], 1)
    options = dict(attention_mask=torch.ones_like(more), max_new_tokens=5, **OPTIONS)
    wanted = model.generate(more, **options).sequences
    for cache in (copy.deepcopy(read), read, out.past_key_values):
        assert torch.equal(model.generate(more, past_key_values=cache, **options).sequences, wanted)


def test_the_cache_goes_on_under_autocast(device):
    """Growing keeps the precision of the tokens that are there."""
    model = attnplug.apply(tiny_model(device=device), "dense")
    prompt = ids().to(device)
    mask = torch.ones_like(prompt)
    out = model.generate(prompt, attention_mask=mask, max_new_tokens=9, **OPTIONS)
    cache = out.past_key_values
    before = cache.layers[0].keys[:, :, :40].clone()
    with torch.autocast(device, torch.bfloat16):
        cache.reserve(400)
    assert torch.equal(cache.layers[0].keys[:, :, :40], before)


def test_generate_refuses_a_fixed_cache_that_it_may_fill(exact):
    model = attnplug.apply(tiny_model(), exact)
    cache = attnplug.make_cache(model, 45)
    options = dict(attention_mask=torch.ones_like(ids()), past_key_values=cache, **OPTIONS)
    with pytest.raises(attnplug.UnsupportedCallError, match=r"come to 49 tokens.*at most 45"):
        model.generate(ids(), max_new_tokens=10, **options)
    assert cache.room == 45 and int(cache.layers[0].cumulative_length) == 0
    out = model.generate(ids(), max_new_tokens=6, **options)  # the last token is never written
    assert out.sequences.shape[1] == 46


@torch.no_grad()
def test_a_compiled_step_does_not_grow_a_cache(exact):
    model = attnplug.apply(tiny_model(), exact)
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = attnplug.make_cache(model, 43)
    model(ids(), past_key_values=cache)
    buffers = [layer.keys.data_ptr() for layer in cache.layers]
    for _ in range(3):
        step(ids(1), past_key_values=cache)
    assert cache.room == 43 and [layer.keys.data_ptr() for layer in cache.layers] == buffers
    assert all(layer.uncounted for layer in cache.layers)
    with pytest.raises(attnplug.UnsupportedCallError, match="holds 43 of at most 43"):
        model(ids(1), past_key_values=cache)


@torch.no_grad()
def test_steps_that_a_graph_replays_are_not_forgotten(device):
    """On a GPU the host counts, and asks the device where a count may be too low."""
    if device != "cuda":
        pytest.skip("a CPU's length is read each time")
    model = attnplug.apply(tiny_model(device=device), "gather(k=8, block=16, min_tokens=0)")
    cache, token = attnplug.make_cache(model, 64), ids(1).to(device)
    model(ids().to(device), past_key_values=cache)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            model(token, past_key_values=cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        model(token, past_key_values=cache)
    for _ in range(22):
        graph.replay()
    assert int(cache.layers[0].cumulative_length) == 64
    with pytest.raises(attnplug.UnsupportedCallError, match="holds 64 of at most 64"):
        model(token, past_key_values=cache)


@torch.no_grad()
def test_a_sliding_window_is_not_rolled_by_a_step_that_does_not_fit(device):
    model = attnplug.apply(gemma(device, window=20), "dense")
    cache = attnplug.make_cache(model, 41)
    prompt = ids().to(device)
    model(prompt, past_key_values=cache)
    model(prompt[:, :1], past_key_values=cache)
    windows = [layer.keys.clone() for layer in cache.layers]
    with pytest.raises(attnplug.UnsupportedCallError, match="holds 41 of at most 41"):
        model(prompt[:, :1], past_key_values=cache)
    for layer, before in zip(cache.layers, windows, strict=True):
        assert torch.equal(layer.keys, before)


def test_certificates_outlive_a_growth():
    model = attnplug.apply(tiny_model(), "certified(block=16, min_tokens=0)")
    mask = torch.ones_like(ids())
    out = model.generate(ids(), attention_mask=mask, max_new_tokens=9, **OPTIONS)
    before = [layer.head_steps for layer in certificates(out.past_key_values)]
    out.past_key_values.reserve(400)
    assert [layer.head_steps for layer in certificates(out.past_key_values)] == before
    assert all(count == 8 * 4 for count in before)


def test_growth_is_by_a_quarter_at_least():
    model = attnplug.apply(tiny_model(), "dense")
    mask = torch.ones_like(ids(400))
    out = model.generate(ids(400), attention_mask=mask, max_new_tokens=2, **OPTIONS)
    cache = out.past_key_values
    had = cache.room
    cache.reserve(had + 1)
    assert cache.room == had + had // 4
    cache.reserve(had)
    assert cache.room == had + had // 4


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 3])
def test_past_the_end_of_a_fixed_cache_raises_and_writes_nothing(exact, tokens, device):
    model = attnplug.apply(tiny_model(device=device), exact)
    cache = attnplug.make_cache(model, 41)
    prompt = ids().to(device)
    model(prompt, past_key_values=cache)
    model(prompt[:, :1], past_key_values=cache)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    with pytest.raises(attnplug.UnsupportedCallError, match="holds 41 of at most 41"):
        model(prompt[:, :tokens], past_key_values=cache)
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
        assert int(layer.cumulative_length) == 41


@torch.no_grad()
def test_a_length_that_someone_set_on_the_device_is_believed(device):
    model = attnplug.apply(tiny_model(device=device), "dense")
    cache = attnplug.make_cache(model, 41)
    prompt = ids().to(device)
    model(prompt, past_key_values=cache)
    for layer in cache.layers:
        layer.cumulative_length.fill_(10)
    for _ in range(31):
        model(prompt[:, :1], past_key_values=cache)
    with pytest.raises(attnplug.UnsupportedCallError, match="holds 41 of at most 41"):
        model(prompt[:, :1], past_key_values=cache)


def test_many_short_rows_after_a_long_prompt_take_no_more_memory():
    """transformers would make all their caches as long as the longest before; attnplug does so
    where that is a little longer, which spares a capture."""
    model = attnplug.apply(tiny_model(), "dense")

    def held(rows: int, tokens: int) -> int:
        out = model.generate(ids(tokens, rows), max_new_tokens=4, **OPTIONS)
        return out.past_key_values.layers[0].keys[:, 0, :, 0].numel()

    long = held(1, 300)
    assert held(1, 100) == long
    assert held(1, 20) == 23  # nobody writes the last token
    assert held(8, 20) < long
    assert held(2, 400) >= 2 * 400
    attnplug.remove(model)
    assert not [name for name in vars(model) if "cache" in name]


def test_room_that_one_long_call_took_is_given_back():
    """And calls of the same lengths find caches of the same lengths, in whichever order."""
    model = attnplug.apply(tiny_model(), "dense")

    def room(tokens: int, steps: int) -> int:
        ends = list(range(97))  # the first token ends the call
        out = model.generate(ids(tokens), max_new_tokens=steps, eos_token_id=ends, **OPTIONS)
        return out.past_key_values.room

    calls = [(30, 4), (30, 900), (60, 4), (30, 4), (30, 900), (60, 4), (30, 4)]
    assert [room(*call) for call in calls] == [33, 929, 63, 63, 929, 63, 63]


def test_short_and_long_calls_in_turn_compile_once_each():
    """A window that is cut to a short cache has another shape than one of its whole size."""
    torch._dynamo.reset()
    config = CompileConfig(mode=None, backend="eager", fullgraph=True)
    config._compile_all_devices = True
    model = attnplug.apply(gemma("cpu", window=90), "dense")
    for number, steps in enumerate((5, 100, 5, 100, 4)):
        prompt = ids(24)
        mask = torch.ones_like(prompt)
        with torch._dynamo.config.patch(error_on_recompile=number > 1):
            model.generate(prompt, attention_mask=mask, max_new_tokens=steps, compile_config=config)
        assert attnplug.report(model).loop == ""


@pytest.mark.parametrize("new", [10**7, 10**12])
def test_no_limit_is_no_room(new, device):
    """Whoever asks for a million tokens means that the model ends: stock's cache grows with it."""
    model = tiny_model(device=device, max_position_embeddings=40)
    ids = torch.randint(3, 97, (2, 30), generator=torch.Generator().manual_seed(1)).to(device)
    ends = dict(eos_token_id=list(range(3, 40)), do_sample=False, max_new_tokens=new)
    wanted = model.generate(ids, **ends)
    attnplug.apply(model, "dense")
    out = model.generate(ids, return_dict_in_generate=True, **ends)
    assert torch.equal(out.sequences, wanted)
    assert out[CACHE].room <= 70 and "room for 70 first" in attnplug.report(model).loop


def test_a_prompt_that_is_longer_than_the_model_reads_is_no_call_without_limit(device):
    model = tiny_model(device=device, max_position_embeddings=40)
    ids = torch.randint(3, 97, (1, 150), generator=torch.Generator().manual_seed(1)).to(device)
    wanted = model.generate(ids, max_new_tokens=10, do_sample=False)
    attnplug.apply(model, "dense")
    assert torch.equal(model.generate(ids, max_new_tokens=10, do_sample=False), wanted)
    assert attnplug.report(model).loop == ""


@pytest.mark.parametrize("options", [{}, dict(num_beams=2), dict(do_sample=True)], ids=str)
def test_a_call_without_a_limit_goes_on_beyond_what_the_model_reads(options, device):
    model = tiny_model(device=device, max_position_embeddings=40)
    ids = torch.randint(3, 97, (2, 30), generator=torch.Generator().manual_seed(1)).to(device)

    def tokens(**more):
        torch.manual_seed(2)
        fields = dict(do_sample=False, max_new_tokens=90) | options
        return model.generate(ids, **(fields | more))

    wanted = tokens(disable_compile=True)
    attnplug.apply(model, "gather(k=16, block=16, sink=1, local=2, min_tokens=0)")
    assert torch.equal(tokens(), wanted)
