"""`trained` on layers that read windows and compressed entries (DeepSeek-V4), besides what they
compute: other policies, copies and hooks, and what is left to the model."""

import copy
import io

import accelerate
import pytest
import torch
import torch._dynamo.testing
from every_family import KINDS
from indexed_cases import V4, since, tiny_v4
from test_indexed import ids_of, new_tokens
from test_picked_blocks import near

import attnplug
from attnplug.models import picked_entries
from attnplug.models.indexed import why_not_indexed
from attnplug.models.layers import find_attention_layers
from attnplug.models.names import CACHE
from attnplug.plan import _kept_otherwise

pytestmark = since(V4 in KINDS, "5.20")
TOKENS = 90


@pytest.fixture
def mixed():
    """With a layer of each kind."""
    return tiny_v4()


@pytest.mark.parametrize("policy", ["auto", "momo+gather+trained", "trained+stream"])
@torch.no_grad()
def test_other_policies_leave_these_layers_to_trained(mixed, policy):
    ids = ids_of(1, TOKENS)
    wanted = mixed(ids).logits
    with attnplug.applied(mixed, policy):
        assert {layer.decode for layer in attnplug.report(mixed).layers} == {"trained"}
        assert near(mixed(ids).logits, wanted)


@pytest.mark.parametrize("policy", ["momo", {"0": "trained"}])
@torch.no_grad()
def test_without_trained_the_model_is_left_alone(mixed, policy):
    ids = ids_of(1, TOKENS)
    wanted = mixed(ids).logits
    with attnplug.applied(mixed, policy):
        assert {layer.prefill for layer in attnplug.report(mixed).layers} == {"eager (dense)"}
        assert torch.equal(mixed(ids).logits, wanted)
        with pytest.raises(attnplug.UnsupportedModelError, match="on a static cache"):
            attnplug.make_cache(mixed, 20)


@torch.no_grad()
def test_remove_puts_everything_back(mixed):
    ids = ids_of(1, TOKENS)
    wanted = mixed(ids).logits
    before = {id(module): {*vars(module)} for module in mixed.modules()}
    attnplug.remove(attnplug.apply(mixed, "trained"))
    assert {id(module): {*vars(module)} for module in mixed.modules()} == before
    assert torch.equal(mixed(ids).logits, wanted)


@torch.no_grad()
def test_a_copy_and_a_saved_model_keep_the_policy(mixed):
    ids = ids_of(1, TOKENS)
    attnplug.apply(mixed, "trained")
    wanted = mixed(ids).logits
    assert torch.equal(copy.deepcopy(mixed)(ids).logits, wanted)
    file = io.BytesIO()
    torch.save(mixed, file)
    file.seek(0)
    picked_entries.MADE.clear()  # as in another process
    assert torch.equal(torch.load(file, weights_only=False)(ids).logits, wanted)


@pytest.mark.parametrize("offloads", [False, True])
@torch.no_grad()
def test_accelerates_hooks(mixed, offloads):
    """As a device map puts them in front of each module; with offloads, weights come and go."""
    ids = ids_of(2, 40)
    wanted = new_tokens(mixed, ids)
    if offloads:
        accelerate.cpu_offload(mixed, "cpu")
    else:
        accelerate.hooks.attach_execution_device_hook(mixed, "cpu")
    parts = [m for m in mixed.modules() if hasattr(m, "_hf_hook")]
    before = [(m.forward, m._old_forward) for m in parts]
    assert any(type(m).__name__ == "DeepseekV4Indexer" for m in parts)
    attnplug.apply(mixed, "trained")
    assert torch.equal(new_tokens(mixed, ids), wanted)
    assert {call.decode for call in attnplug.report(mixed).last} == {"trained"}
    attnplug.remove(mixed)
    assert [(m.forward, m._old_forward) for m in parts] == before
    assert torch.equal(new_tokens(mixed, ids), wanted)


def test_what_is_left_to_the_model():
    def why(**options) -> str:
        built = tiny_v4(**options)
        reasons = {why_not_indexed(x.module) for x in find_attention_layers(built)}
        attnplug.apply(built, "trained")
        assert {layer.prefill for layer in attnplug.report(built).layers} == {"eager (dense)"}
        return str(reasons)

    assert "picks 5000 entries, more than 4096" in why(index_topk=5000)
    assert "head dimension 40 is not a multiple of 16" in why(index_head_dim=40)
    assert "keys of 640 channels are wider" in why(head_dim=640)
    moving = dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
    assert "depends on the longest position" in why(rope_parameters=moving)


@pytest.mark.parametrize("part", ["attention", "heavy", "sparse", "indexer", "scorer", "rotary"])
def test_code_that_is_not_known_is_left_to_the_model(mixed, part, monkeypatch):
    sparse, heavy = (mixed.model.layers[index].self_attn for index in (1, 2))
    known = {"attention": sparse, "heavy": heavy.compressor, "sparse": sparse.compressor}
    known |= {"indexer": sparse.compressor.indexer, "scorer": sparse.compressor.indexer.scorer}
    assert not why_not_indexed(sparse) and not why_not_indexed(heavy)
    if part == "rotary":
        code = "transformers.models.deepseek_v4.modeling_deepseek_v4.apply_rotary_pos_emb"
        monkeypatch.setattr(code, lambda x, cos, sin, unsqueeze_dim=1: x)
    else:
        target = known[part]

        class Other(type(target)):
            __module__ = type(target).__module__

            def forward(self, *args, **kwargs):
                return super().forward(*args, **kwargs)

        target.__class__ = Other
    module = heavy if part == "heavy" else sparse
    assert "in a way that attnplug does not know" in why_not_indexed(module)
    attnplug.apply(mixed, "trained")
    assert {layer.prefill for layer in attnplug.report(mixed).layers} == {"eager (dense)"}


def test_what_its_cache_keeps_is_in_the_bill(mixed):
    kept, beside = _kept_otherwise(mixed, mixed.config.layer_types)
    assert kept == 0
    assert beside == 2 * (64 + 32) // 4 + 64 // 8
    attnplug.apply(mixed, "trained")
    cache = attnplug.make_cache(mixed, 64)
    with torch.no_grad():
        mixed(ids_of(1, 20), **{CACHE: cache})
    side = [x for layer in cache.layers for x in (layer.keys[:, :, :-17], layer.index_entries)]
    side = [x[..., :16, :] for x in side if x is not None]  # one more is complete for nobody
    assert beside * 64 == sum(x.numel() for x in side)


@torch.no_grad()
def test_a_forward_that_somebody_replaced_is_left_alone(mixed):
    ids = ids_of(1, 20)
    compressor = mixed.model.layers[2].self_attn.compressor
    own = compressor.forward
    compressor.forward = lambda *args: own(*args)
    wanted = mixed(ids).logits
    attnplug.apply(mixed, "trained")
    reasons = {layer.reason for layer in attnplug.report(mixed).layers}
    assert any("somebody has replaced the forward" in reason for reason in reasons)
    assert torch.equal(mixed(ids).logits, wanted)


def test_continuous_batching_is_refused(mixed):
    attnplug.apply(mixed, "trained")
    with pytest.raises(attnplug.UnsupportedCallError, match="keeps windows and entries"):
        mixed.init_continuous_batching()


@torch.inference_mode()
def test_inference_mode_is_left_between_turns(mixed):
    ids = ids_of(1, TOKENS)
    wanted = mixed(ids).logits
    attnplug.apply(mixed, "trained")
    cache = attnplug.make_cache(mixed, 120)
    mixed(ids[:, :50], use_cache=True, **{CACHE: cache})
    with torch.inference_mode(False), torch.no_grad():
        found = mixed(ids.clone()[:, 50:80], use_cache=True, **{CACHE: cache}).logits
    assert near(found, wanted[:, 50:80])
    found = mixed(ids[:, 80:], use_cache=True, **{CACHE: cache}).logits
    assert near(found, wanted[:, 80:])
