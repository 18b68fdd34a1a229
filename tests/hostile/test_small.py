"""Small things that a user may do, and what is said or done about them."""

import pytest
import torch
from transformers import DynamicCache

import attnplug
from attnplug.models.names import CACHE
from attnplug.testing.policy import tiny_model

IDS = torch.randint(2, 90, (3, 20), generator=torch.Generator().manual_seed(0))
OPTIONS = dict(attention_mask=torch.ones_like(IDS), max_new_tokens=4, do_sample=False)


def test_data_parallel_is_told_where_a_policy_goes():
    wrapped = torch.nn.DataParallel(tiny_model())
    with pytest.raises(attnplug.UnsupportedModelError, match=r"before DataParallel.*its \.module"):
        attnplug.apply(wrapped, "dense")
    attnplug.apply(wrapped.module, "dense")


@torch.no_grad()
def test_a_cache_that_was_reset_takes_another_batch_size(exact):
    model = attnplug.apply(tiny_model(), exact)
    cache = attnplug.make_cache(model, 41)
    for rows in (1, 3, 2):
        found = model(IDS[:rows], past_key_values=cache).logits
        found = torch.cat([found, model(IDS[:rows, :1], past_key_values=cache).logits], 1)
        fresh = attnplug.make_cache(model, 41)
        wanted = model(IDS[:rows], past_key_values=fresh).logits
        wanted = torch.cat([wanted, model(IDS[:rows, :1], past_key_values=fresh).logits], 1)
        assert torch.equal(found, wanted)
        with pytest.raises(attnplug.UnsupportedCallError, match=rf"tokens of {rows} rows and got"):
            model(IDS[: rows + 1 if rows < 3 else 1, :1], past_key_values=cache)
        cache.reset()


def test_a_long_policy_is_not_echoed_whole():
    for policy in ("momo" + "(" * 5000, "x" * 5000, "momo(gamma=" + "1+" * 2500 + "1)"):
        with pytest.raises(attnplug.PolicyError, match="characters") as caught:
            attnplug.apply(tiny_model(), policy)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("key", [True, False])
def test_a_truth_value_is_no_layer(key):
    model = tiny_model()
    with pytest.raises(attnplug.PolicyError, match=rf"the key {key} is a bool; use a layer index"):
        attnplug.apply(model, {key: "dense"})
    assert model.config._attn_implementation == "sdpa"


REFUSED = {
    "gradients": (attnplug.GradientError, torch.enable_grad, {}),
    "dropout": (attnplug.UnsupportedCallError, torch.no_grad, {}),
    "weights": (attnplug.UnsupportedCallError, torch.no_grad, dict(output_attentions=True)),
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("kind", ["make_cache", "dynamic"])
def test_a_refused_call_leaves_no_token_in_the_cache(why, kind):
    """The user does what the error says, and goes on with the same cache."""
    error, mode, options = REFUSED[why]
    model = attnplug.apply(tiny_model(attention_dropout=0.5), "dense")
    cache = attnplug.make_cache(model, 40) if kind == "make_cache" else DynamicCache()
    with torch.no_grad():
        wanted = model(IDS).logits
        first = model(IDS[:, :8], **{CACHE: cache}).logits
    model.train(why == "dropout")
    with mode(), pytest.raises(error):
        model(IDS[:, 8:], **{CACHE: cache}, **options)
    with torch.no_grad():
        found = torch.cat([first, model.eval()(IDS[:, 8:], **{CACHE: cache}).logits], 1)
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


class Wrapper(torch.nn.Module):
    """What PEFT's model looks like from here."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.base_model = model

    def get_base_model(self) -> torch.nn.Module:
        return self.base_model


def test_a_wrapped_model_is_unwrapped():
    model = tiny_model()
    wrapped = Wrapper(model)
    assert attnplug.apply(wrapped, "dense") is wrapped
    assert attnplug.report(wrapped) == attnplug.report(model)
    attnplug.remove(wrapped)
    compiled = torch.compile(Wrapper(model), backend="eager")
    attnplug.remove(attnplug.apply(compiled, "dense"))


@pytest.mark.filterwarnings("ignore")
def test_a_peft_model_gives_its_own_tokens(exact):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(init_lora_weights=False)).eval()
    wanted = model.generate(input_ids=IDS, **OPTIONS)
    attnplug.apply(model, exact)
    assert torch.equal(model.generate(input_ids=IDS, **OPTIONS), wanted)
    attnplug.remove(model)
    assert torch.equal(model.generate(input_ids=IDS, **OPTIONS), wanted)
