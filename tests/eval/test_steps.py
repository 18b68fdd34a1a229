"""Steps of an evaluation give what the model's own generate and forward passes give."""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.masking_utils import sliding_window_causal_mask_function

import attnplug
from attnplug.eval import generate
from attnplug.eval.measure import Reading, compare_logits
from attnplug.eval.own_attention import own_attention
from attnplug.eval.steps import own_steps
from attnplug.models import bands, hf
from attnplug.policies import parse
from attnplug.testing.policy import tiny_model

SKETCH = "sketch(min_tokens=0)"  # wants the host before its first step


def gemma(window: int, device: str = "cpu"):
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, pad_token_id=0,
        eos_token_id=None, sliding_window=window,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Gemma3ForCausalLM(config).eval().to(device)
    model.generation_config.eos_token_id = None
    return model


def prompts(device: str, lengths=(40, 31, 9)) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(4)
    return [torch.randint(41, 97, (1, n), generator=draw).to(device) for n in lengths]


MODELS = {"llama": lambda device: tiny_model(device=device)} | {
    f"gemma-{window}": lambda device, window=window: gemma(window, device)
    for window in (8, 35, 100)  # each row is longer; some are; none fills it
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_rows_read_alone_go_on_together_as_alone(make, device):
    model = make(device)
    rows = prompts(device)
    logits, steps = own_steps(model, rows, 60)
    tokens = [logits.argmax(-1, keepdim=True)]
    for _ in range(11):
        tokens.append(steps.logits(tokens[-1]).argmax(-1, keepdim=True))
    found = torch.cat(tokens, 1)
    for row, ids in enumerate(rows):
        options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        wanted = model.generate(ids, disable_compile=True, **options)[0, ids.shape[1] :]
        assert torch.equal(found[row], wanted)


@pytest.mark.parametrize("policy", [None, "dense", SKETCH], ids=["stock", "dense", "sketch"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_steps_are_what_a_whole_pass_gives(make, policy, device):
    model = make(device)
    ids = torch.cat(prompts(device, (50, 50)))
    with torch.no_grad():
        whole = model(ids).logits[:, -20:].float()
    reading = Reading(model, ids, policy and parse(policy), 20)
    found = torch.cat([reading.logits(0, 3), reading.logits(3, 20)], 1)
    for row in (0, 1):
        assert compare_logits(whole[row].cpu(), found[row].cpu())["kl"] < 1e-5


@pytest.mark.parametrize("window", [8, 35])
def test_a_models_own_windows_are_read_in_bands(window, device, monkeypatch):
    """As from the whole mask, where the prompt is long; the model is as before afterwards."""
    model, ids = gemma(window, device), prompts(device, (90,))[0]
    with torch.no_grad():
        wanted = model(ids).logits
    calls, keep = [], bands.sdpa_attention_forward
    monkeypatch.setattr(bands, "BAND", 16)

    def noted(module, q, k, *rest, **more):
        calls.append(q.shape[2])
        return keep(module, q, k, *rest, **more)

    monkeypatch.setattr(bands, "sdpa_attention_forward", noted)
    with torch.no_grad(), own_attention(model):
        found = model(ids).logits
    band = max(16, window)
    widths = [band] * (90 // band) + [90 % band]
    assert calls == [*widths, 90]  # the second layer has no window
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    calls.clear()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, wanted)
    assert not calls


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("offset", [0, 7])
def test_a_long_window_s_mask_is_made_of_few_queries_at_a_time(padded, offset, device, monkeypatch):
    """The same mask, one for all rows where none is padded."""
    real = torch.ones(2, 97, dtype=torch.bool, device=device)
    real[1, :30] = False
    options = dict(
        batch_size=2, q_length=90, kv_length=97, q_offset=offset, local_size=8, device=device,
        mask_function=sliding_window_causal_mask_function(8),
        attention_mask=real if padded else None,
    )  # fmt: skip
    wanted = hf.sdpa_mask(**options)
    made, keep = [], hf.sdpa_mask
    monkeypatch.setattr(hf, "MASK_ROWS", 16)
    monkeypatch.setattr(hf, "sdpa_mask", lambda **o: made.append(o["q_length"]) or keep(**o))
    found = hf.rowwise_mask(**options)
    assert torch.equal(found, wanted) and found.shape == (2, 1, 90, 97)
    assert max(made) == 16 and (found.stride(0) == 0) != padded


@pytest.mark.parametrize("own", ["eager", "attnplug"])
def test_another_attention_than_sdpa_stays(own):
    model = gemma(8)
    model.config._attn_implementation = own
    with own_attention(model):
        assert model.config._attn_implementation == own


def test_a_model_that_no_static_cache_serves_answers_by_generate(monkeypatch):
    model = tiny_model()
    batch = generate._batch(model, _Padding, prompts("cpu"), 6)
    wanted = generate._alone(model, batch, None)
    monkeypatch.setattr(generate, "own_cache", lambda _: "it makes a cache of its own")
    monkeypatch.setattr(generate, "own_steps", None)
    assert torch.equal(generate._alone(model, batch, None), wanted)


class _Padding:
    pad_token_id = 0


@pytest.mark.gpu
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("policy", ["dense", "gather(k=8, block=16, min_tokens=0)", SKETCH])
def test_captured_replies_are_those_of_steps_that_are_not(make, policy, monkeypatch):
    model = make("cuda")
    batch = generate._batch(model, _Padding, prompts("cuda"), 24)
    found = generate._alone(model, batch, parse(policy))
    monkeypatch.setattr(generate, "uncompiled", lambda _: {"disable_compile": True})
    assert torch.equal(found, generate._alone(model, batch, parse(policy)))
    attnplug.apply(model, policy)
    assert attnplug.report(model).loop == ""
