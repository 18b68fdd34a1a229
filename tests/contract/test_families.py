"""Every model family against the policies: dense serves each exactly, every other method with a
budget that covers the prompt as well, and layers that a policy must not serve stay dense and are
named."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from contract_cases import FAMILY
from families import FAMILIES, VOCABULARY, Family
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import CacheLayerMixin

import attnplug
from attnplug.call import AttentionCall
from attnplug.models import bands, hf

TOKENS = 37
# Families whose served layers tell a policy what Llama's do but for these fields; a test below
# holds that they do. gpt-oss has phi3's strides of q as well.
AS_LLAMA: dict[str, set[str]] = {
    "qwen2": set(),
    "qwen3": set(),
    "mistral": set(),
    "olmo2": set(),
    "mistral-sliding": set(),  # no layer is served
    "granite": {"scale"},
    "gemma3": {"scale"},
    "phi3": {"q"},
}


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request) -> Family:
    return request.param


@pytest.fixture(params=FAMILY.values(), ids=FAMILY)
def policy(request) -> str:
    return request.param


@cache
def stock_model(family: Family, device: str) -> PreTrainedModel:
    return family.build(device)


Family.__hash__ = lambda self: hash(self.name)  # pyright: ignore[reportAttributeAccessIssue]


def prompt(device: str, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of ids, the first left-padded, and their attention mask."""
    ids = torch.randint(3, VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return ids.to(device), mask.to(device)


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    out = model(ids, attention_mask=mask, position_ids=positions).logits
    return out[mask.bool()].double()


@torch.no_grad()
def generate(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, **options: Any):
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=6,
        do_sample=False,
        disable_compile=True,
        **options,
    )


@cache
def stock_logits(family: Family, device: str) -> list[torch.Tensor]:
    """With padding and without."""
    ids, mask = prompt(device)
    model = stock_model(family, device)
    return [logits(model, ids, each) for each in (mask, torch.ones_like(mask))]


def test_logits_equal_the_stock_models(family, policy, device):
    model = stock_model(family, device)
    ids, mask = prompt(device)
    both = zip((mask, torch.ones_like(mask)), stock_logits(family, device), strict=True)
    for each, wanted in both:
        with attnplug.applied(model, policy):
            found = logits(model, ids, each)
        assert (found - wanted).abs().max() < 3e-5 * wanted.abs().max().clamp(min=1)


@pytest.mark.parametrize("name", ["gemma3"])
def test_long_sliding_prefills_run_in_bands(name, device, monkeypatch):
    """The same logits, padding included, from keys that no band's query would see left out."""
    model = stock_model(next(f for f in FAMILIES if f.name == name), device)
    seen = []
    attend = bands.sdpa_attention_forward
    monkeypatch.setattr(bands, "BAND", 4)
    monkeypatch.setattr(
        bands,
        "sdpa_attention_forward",
        lambda *a, **k: seen.append(a[2].shape[2]) or attend(*a, **k),
    )
    ids, mask = prompt(device, 200)
    for each in (mask, torch.ones_like(mask)):
        wanted = logits(model, ids, each)
        with attnplug.applied(model, "dense"):
            found = logits(model, ids, each)
        assert (found - wanted).abs().max() < 3e-5 * wanted.abs().max().clamp(min=1)
    assert seen and max(seen) < ids.shape[1]


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "chunked": {"prefill_chunk_size": 16},
}


@cache
def stock_tokens(family: Family, way: str, device: str) -> torch.Tensor:
    return generate(stock_model(family, device), *prompt(device), **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_generate_gives_the_stock_tokens(family, policy, way, device):
    model = stock_model(family, device)
    ids, mask = prompt(device)
    wanted = stock_tokens(family, way, device)
    with attnplug.applied(model, policy):
        assert torch.equal(generate(model, ids, mask, **WAYS[way]), wanted)


def look_up(model: PreTrainedModel) -> torch.Tensor:
    ids = prompt("cpu")[0][1:, :12].repeat(1, 3)
    return generate(model, ids, torch.ones_like(ids), prompt_lookup_num_tokens=3)


@cache
def stock_look_up(family: Family) -> torch.Tensor:
    return look_up(stock_model(family, "cpu"))


def test_prompt_lookup_gives_the_stock_tokens(family, policy):
    model = stock_model(family, "cpu")
    wanted = stock_look_up(family)
    with attnplug.applied(model, policy):
        assert torch.equal(look_up(model), wanted)


def test_caches_that_the_user_passes(family, policy, device):
    model = stock_model(family, device)
    ids, mask = prompt(device)
    wanted = stock_tokens(family, "greedy", device)
    with attnplug.applied(model, policy):
        static = StaticCache(model.config, max_cache_len=TOKENS + 20)
        assert torch.equal(generate(model, ids, mask, past_key_values=static), wanted)
        dynamic = DynamicCache(config=model.config)
        assert torch.equal(generate(model, ids, mask, past_key_values=dynamic), wanted)


def test_report_names_what_stays_dense(family, policy):
    model = stock_model(family, "cpu")
    with attnplug.applied(model, policy):
        report = attnplug.report(model)
    for layer in report.layers:
        if layer.index in family.served:
            name = policy.partition("(")[0]
            chosen = f"{name}: " in layer.reason  # auto names what it takes in its place
            assert chosen or layer.prefill.startswith(name) or layer.decode.startswith(name)
        else:
            assert layer.kind == "sliding"
            assert layer.prefill.endswith("(dense)")
            assert "sliding" in layer.reason and "sliding" in str(report)


def test_remove_restores_bit_for_bit(family, policy):
    model = stock_model(family, "cpu")
    ids, mask = prompt("cpu")
    before, implementation = logits(model, ids, mask), model.config._attn_implementation
    with attnplug.applied(model, policy):
        logits(model, ids, mask)
    assert torch.equal(logits(model, ids, mask), before)
    assert model.config._attn_implementation == implementation


def traced() -> Iterator[Any]:
    """Families with the policies that are compiled with them. A policy knows of a family what its
    attention call says: where that is Llama's, or differs in a number, one policy is enough to
    trace the rest of the model. test_policies.py compiles Llama with all. Of the two other families
    each has every second policy; a release compiles the rest."""
    others = [family.name for family in FAMILIES if family.name not in AS_LLAMA | {"llama": 0}]
    for family in FAMILIES:
        for turn, (name, policy) in enumerate(FAMILY.items()):
            if name != "dense" and family.name in AS_LLAMA:
                continue
            known = family.name not in others or (turn + others.index(family.name)) % 2
            marks = pytest.mark.long if known and name != "dense" else ()
            yield pytest.param(family, policy, id=f"{family.name}-{name}", marks=marks)


@torch.no_grad()
@pytest.mark.parametrize(("family", "policy"), list(traced()))
def test_compiles_whole_and_does_not_recompile(family, policy):
    """Dynamo alone: one graph a phase, none more as the sequence grows. Inductor and CUDA graphs
    are test_policies.py's."""
    model = stock_model(family, "cpu")
    ids, mask = prompt("cpu")
    torch._dynamo.reset()
    with attnplug.applied(model, policy):
        wanted = logits(model, ids, mask)
        forward = torch.compile(model, backend="eager", fullgraph=True)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        found = forward(ids, attention_mask=mask, position_ids=positions).logits
        assert (found[mask.bool()] - wanted).abs().max() < 1e-4
        eager, compiled = (_decode(model, step, ids) for step in (model, forward))
    torch._dynamo.reset()
    for a, b in zip(eager, compiled, strict=True):
        assert (a - b).abs().max() < 1e-4


@torch.no_grad()
def attention_calls(family: Family, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a policy is told by the layers that it serves, in a padded pass without a cache, and in
    a prefill and a step with."""
    model, calls = stock_model(family, "cpu"), []
    ids, mask = prompt("cpu")

    def told(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.shape, value.stride(), value.dtype
        return type(value) if isinstance(value, CacheLayerMixin) else value

    class Told(AttentionCall):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            calls.append(self)

    monkeypatch.setattr(hf, "AttentionCall", Told)
    with attnplug.applied(model, "dense"):
        cache = attnplug.make_cache(model, TOKENS + 8)
        logits(model, ids, mask)
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
    layers = model.config.num_hidden_layers
    served = [call for at, call in enumerate(calls) if at % layers in family.served]
    assert len(served) == 3 * len(family.served) and bool(calls) == bool(served)
    return [{name: told(value) for name, value in vars(call).items()} for call in served]


@pytest.mark.parametrize("name", AS_LLAMA)
def test_a_family_calls_attention_as_llama_does(name, monkeypatch):
    llama, family = (next(f for f in FAMILIES if f.name == each) for each in ("llama", name))
    wanted = attention_calls(llama, monkeypatch)[:: len(llama.served) // max(1, len(family.served))]
    found = attention_calls(family, monkeypatch)
    differ = set()
    for call, of_llama in zip(found, wanted[: len(found)], strict=True):
        differ |= {field for field in call | of_llama if call.get(field) != of_llama.get(field)}
    assert differ == AS_LLAMA[name]


def _decode(model: PreTrainedModel, step: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """The logits of eight decode steps over a static cache; the last six must not recompile."""
    cache = attnplug.make_cache(model, TOKENS + 8)
    model(ids, past_key_values=cache)
    outputs = [step(ids[:, :1], past_key_values=cache).logits for _ in range(2)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        outputs += [step(ids[:, :1], past_key_values=cache).logits for _ in range(6)]
    return outputs
