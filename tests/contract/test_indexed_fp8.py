"""`trained(index="fp8")`: index keys in eight bits. Oracle: transformers, whose caches are given
keys that were rounded to the same numbers."""

import pytest
import torch
import transformers.cache_utils as caches
from indexed_cases import models

import attnplug
from attnplug.errors import PolicyError
from attnplug.models.names import CACHE
from attnplug.policies import Trained
from attnplug.policies._indexed_layer import IndexedLayer
from attnplug.policies.trained import WIDE

MADE = models()
TOKENS = [name for name in MADE if name.startswith(("deepseek_v32", "glm_moe_dsa", "hy_v4"))]
OTHERS = [name for name in ("minimax_m3-0", "qwen4_exp-1", "glm5_next-0") if name in MADE]
TOLERANCE = 1e-5  # of the largest logit
FP8 = 'trained(index="fp8")'
pytestmark = pytest.mark.skipif(not TOKENS, reason="this transformers has no such family")


def rounded(keys: torch.Tensor) -> torch.Tensor:
    """`[B,S,D]` in the numbers that e4m3 has, each key's largest being its largest, 448."""
    factor = keys.abs().amax(-1, keepdim=True) / 448
    return ((keys / factor).to(torch.float8_e4m3fn).float() * factor).to(keys.dtype)


@pytest.fixture
def rounds(monkeypatch):
    """transformers' caches round index keys."""
    for kind in (caches.DynamicIndexedLayer, caches.StaticIndexedLayer):
        own = kind.update_indexer
        monkeypatch.setattr(
            kind, "update_indexer", lambda self, keys, own=own: own(self, rounded(keys))
        )
    return monkeypatch


def ids_of(rows: int = 1, tokens: int = 30) -> torch.Tensor:
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(2))


def of_tokens(model) -> list[int]:
    """The layers that keep index keys of tokens."""
    cache = attnplug.make_cache(model, 40)
    model(ids_of(), use_cache=True, **{CACHE: cache})
    return [i for i, layer in enumerate(cache.layers) if layer.index_scale is not None]


def turns(model, cache, rows: int = 2) -> torch.Tensor:
    """Logits of a padded prompt, of a chunk behind it, and of three steps."""
    ids, found = ids_of(rows, 40), []
    shown = torch.ones_like(ids)
    shown[0, :5] = 0
    for begin, end in ((0, 25), (25, 37), (37, 38), (38, 39), (39, 40)):
        options = {"attention_mask": shown[:, :end], "use_cache": True, CACHE: cache}
        found.append(model(ids[:, begin:end], **options).logits)
    return torch.cat(found, 1)[shown.bool()]


@pytest.mark.parametrize("name", TOKENS)
@torch.no_grad()
def test_it_picks_what_rounded_keys_score_highest(name, rounds):
    model = MADE[name]()
    wanted = turns(model, caches.DynamicCache(config=model.config))
    rounds.undo()
    exact = turns(model, caches.DynamicCache(config=model.config))
    assert not torch.allclose(exact, wanted, atol=1e-3)  # rounding shows
    attnplug.apply(model, FP8)
    assert of_tokens(model)
    found = turns(model, attnplug.make_cache(model, 48))
    assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_indexers_of_blocks_pools_and_compressed_keys_keep_theirs(name):
    model = MADE[name]()
    wanted = turns(model, caches.DynamicCache(config=model.config))
    attnplug.apply(model, FP8)
    found = turns(model, attnplug.make_cache(model, 48))
    assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@torch.no_grad()
def test_a_cache_has_half_of_the_bytes_and_is_edited_like_others():
    model = attnplug.apply(MADE["glm_moe_dsa"](), FP8)
    ids = ids_of(2, 24)
    wanted = model(ids, use_cache=True, **{CACHE: attnplug.make_cache(model, 40)}).logits[:, -4:]
    cache = attnplug.make_cache(model, 40)
    model(ids[:, :20], use_cache=True, **{CACHE: cache})
    for layer in cache.layers:
        if layer.indexer_keys is not None:
            assert layer.indexer_keys.dtype == torch.uint8
            assert layer.index_scale.shape == layer.indexer_keys.shape[:2]
    model(ids_of(2, 6), use_cache=True, **{CACHE: cache})
    cache.crop(-6)
    found = model(ids[:, 20:], use_cache=True, **{CACHE: cache}).logits
    assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()
    cache.crop(-4)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 1]))
    cache.reorder_cache(torch.tensor([1, 0]))
    other = attnplug.make_cache(model, 64)
    other.adopt(cache)
    found = model(ids[:, 20:], use_cache=True, **{CACHE: other}).logits
    assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@torch.no_grad()
def test_a_cache_of_the_other_kind_is_taken_over():
    """Its keys are rounded, or stay as rounded as they are."""
    model = MADE["glm_moe_dsa"]()
    filled = {}
    for policy in ("trained", FP8):
        with attnplug.applied(model, policy):
            filled[policy] = attnplug.make_cache(model, 40)
            model(ids_of(), use_cache=True, **{CACHE: filled[policy]})
    with attnplug.applied(model, FP8):
        eight = attnplug.make_cache(model, 48)
        eight.adopt(filled["trained"])
    with attnplug.applied(model, "trained"):
        wide = attnplug.make_cache(model, 48)
        wide.adopt(filled[FP8])
        assert model(ids_of(1, 1), use_cache=True, **{CACHE: wide}).logits.isfinite().all()
    layers = zip(*(c.layers for c in (filled["trained"], eight, filled[FP8], wide)), strict=True)
    compared = 0
    for of_model, to_eight, of_eight, to_model in layers:
        if of_model.indexer_keys is None:
            continue
        assert to_eight.in_fp8 and not to_model.in_fp8 and to_model.index_scale is None
        stored = to_eight.indexer_keys.view(torch.float8_e4m3fn).float()
        stored = (stored * to_eight.index_scale[..., None])[:, :30]
        assert torch.allclose(stored, rounded(of_model.indexer_keys[:, :30]), rtol=1e-6)
        stored = of_eight.indexer_keys.view(torch.float8_e4m3fn).float()
        stored = (stored * of_eight.index_scale[..., None])[:, :30]
        assert torch.equal(to_model.indexer_keys[:, :30], stored)
        compared += 1
    assert compared


@torch.no_grad()
def test_generate_and_masks_of_the_users_own():
    model = MADE["glm_moe_dsa"]()
    ids = ids_of(2)
    how = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    few = model.config.index_topk
    with attnplug.applied(model, FP8):
        tokens = model.generate(ids, **how)
        assert not attnplug.report(model).loop
        assert torch.equal(model.generate(ids, **how, num_beams=1), tokens)
        mask = torch.ones(1, 1, few, few).tril().bool()  # all are picked, whatever they score
        found = model(ids[:1, :few], attention_mask=mask, use_cache=True).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        cache = attnplug.make_cache(model, 40)
        compiled(ids, use_cache=True, **{CACHE: cache})
        step = compiled(tokens[:, 30:31], use_cache=True, **{CACHE: cache}).logits
        assert torch.equal(step[:, -1].argmax(-1), tokens[:, 31])
    wanted = model(ids[:1, :few], attention_mask=mask).logits
    assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()


def last_of(model) -> set[str]:
    return {text for each in attnplug.report(model).last for text in (each.prefill, each.decode)}


@pytest.mark.parametrize("name", [TOKENS[0]] + [n for n in MADE if n.startswith("deepseek_v4-0")])
@torch.no_grad()
def test_the_last_call_says_where_keys_were_not_rounded(name):
    """Over a cache of transformers' own, and without any; never where the cache is attnplug's, of a
    policy without the option, or of entries, which are not concerned."""
    model, ids = MADE[name](), ids_of()
    own = {"trained"} if name.startswith("deepseek_v4") else {f"trained ({WIDE})"}
    for policy, others in (("trained", {"trained"}), (FP8, own)):
        with attnplug.applied(model, policy):
            model(ids, use_cache=False)
            assert last_of(model) == {*others, ""}
            cache = caches.DynamicCache(config=model.config)
            model.generate(ids, max_new_tokens=3, **{CACHE: cache})
            assert last_of(model) == others
            model.generate(ids, max_new_tokens=3)
            assert last_of(model) == {"trained"}
            model(ids, use_cache=True, **{CACHE: attnplug.make_cache(model, 40)})
            assert last_of(model) == {"trained", ""}


def test_a_key_of_zeros_and_one_of_nan():
    layer = IndexedLayer(max_cache_len=8, in_fp8=True)
    keys = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(0)) * 1e4
    keys[0, 1], keys[0, 2, 3] = 0.0, torch.nan
    layer.update(torch.zeros(1, 1, 4, 32), torch.zeros(1, 1, 4, 8))
    stored = layer.update_indexer(keys).float() * layer.index_scale[..., None]
    assert (stored[0, 1] == 0).all() and stored[0, 2].isnan().any()
    largest = float(keys[0, 0].abs().max())
    assert torch.allclose(stored[0, 0], keys[0, 0], rtol=1 / 16, atol=largest / 1e5)


def test_an_option_that_is_none():
    with pytest.raises(PolicyError, match="trained: index='int8', needs model or fp8"):
        Trained(index="int8")
