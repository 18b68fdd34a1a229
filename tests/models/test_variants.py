"""Small models in other forms: they compute what they say."""

import pytest
import torch
from real_models import real_folder, real_model
from transformers import AutoConfig, AutoModelForCausalLM

import attnplug
from attnplug import plan
from attnplug.errors import WeightsUnavailableError
from attnplug.models.layers import positions
from attnplug.models.pretrained import load, text_config

PROSE = "The longest river of Europe is the Volga. It rises north of Moscow. "


def test_heads_of_128_give_what_heads_of_64_give():
    plain, tokenizer = real_model("smollm2-135m")
    wide, _ = real_model("smollm2-135m@d128")
    assert wide.config.head_dim == 2 * plain.config.head_dim == 128
    ids = tokenizer(PROSE * 12, return_tensors="pt").input_ids
    with torch.inference_mode():
        torch.testing.assert_close(wide(ids).logits, plain(ids).logits, atol=2e-3, rtol=0)
        options = dict(max_new_tokens=8, do_sample=False)
        assert torch.equal(wide.generate(ids, **options), plain.generate(ids, **options))
    report = attnplug.report(attnplug.apply(wide, "gather(min_tokens=0)"))
    assert {layer.decode for layer in report.layers} == {"gather(min_tokens=0)"}
    assert plan.shape_of("smollm2-135m@d128").head_dim == 128


@pytest.mark.parametrize(("name", "factor"), [("gemma3-270m@64k", 2), ("gemma3-270m@128k", 4)])
def test_a_stretched_gemma_turns_its_global_layers_more_slowly(name, factor):
    """By the tables that its rope has, a model without weights: those of windows are as they
    were."""
    folder = real_folder("gemma3-270m")
    plain, longer = AutoConfig.from_pretrained(folder), text_config(name)
    assert positions(longer) == factor * positions(plain) == factor * 32768
    for each in (plain, longer):  # the tables need no more of it
        each.num_hidden_layers, each.vocab_size, each.pad_token_id = 6, 8, 0
        each.layer_types = each.layer_types[:6]
    plain, longer = (AutoModelForCausalLM.from_config(each).model for each in (plain, longer))
    x, places = torch.zeros(1, 1, 8), torch.tensor([[4 * factor]])
    for kind, place in (("full_attention", 4), ("sliding_attention", 4 * factor)):
        turned = longer.rotary_emb(x, places, kind)
        expected = plain.rotary_emb(x, torch.tensor([[place]]), kind)
        torch.testing.assert_close(turned, expected)


def test_a_variant_that_is_not_known_is_asked_about():
    with pytest.raises(WeightsUnavailableError, match="Did you mean gemma3-270m@64k"):
        load("gemma3-270m@64")
