"""What happens to a model's config while it has a policy: changes outlive `remove`, copies do not
carry attnplug's name."""

import copy
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import attnplug
from attnplug.testing.policy import tiny_model

IDS = torch.randint(2, 90, (1, 20), generator=torch.Generator().manual_seed(0))
OPTIONS = dict(attention_mask=torch.ones_like(IDS), max_new_tokens=4, do_sample=False)


def test_a_checkpoint_of_a_resized_vocabulary_loads_after_remove(tmp_path):
    model = attnplug.apply(tiny_model(), "dense")
    model.resize_token_embeddings(120)
    attnplug.remove(model)
    assert model.config.vocab_size == 120
    model.save_pretrained(tmp_path)
    twin = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert twin.get_input_embeddings().weight.shape[0] == 120
    assert torch.equal(twin.generate(IDS, **OPTIONS), model.generate(IDS, **OPTIONS))


def test_remove_keeps_the_config_object_and_what_others_changed_on_it():
    model = tiny_model()
    config, rope = model.config, model.config.rope_parameters
    before = config.to_dict()
    attnplug.apply(model, "dense")
    model.config.temperature_note = "mine"
    model.config.rope_parameters["factor"] = 2.0
    del model.config.pad_token_id
    attnplug.remove(model)
    assert model.config is config and model.model.config is config
    assert config.temperature_note == "mine" and config.rope_parameters["factor"] == 2.0
    assert "pad_token_id" not in vars(config)
    assert config._attn_implementation == "sdpa"
    assert rope == before["rope_parameters"]


def test_remove_of_an_untouched_model_leaves_every_attribute_the_same_object():
    model = tiny_model()
    before = dict(vars(model.config))
    with attnplug.applied(model, "gather(min_tokens=0)"):
        model.generate(IDS, **OPTIONS)
    assert all(vars(model.config)[name] is value for name, value in before.items())


def test_a_config_that_someone_put_there_since_stays():
    model = attnplug.apply(tiny_model(), "dense")
    mine = copy.deepcopy(model.config)
    model.config = mine
    attnplug.remove(model)
    assert model.config is mine


@pytest.mark.parametrize("build", [LlamaForCausalLM, AutoModelForCausalLM.from_config])
def test_a_copied_config_makes_a_model_with_its_own_attention(build):
    model = attnplug.apply(tiny_model(), "dense")
    config = copy.deepcopy(model.config)
    assert config._attn_implementation == "sdpa"
    other = build(config).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.generate(IDS, **OPTIONS), model.generate(IDS, **OPTIONS))
    assert "attnplug" not in other.config._attn_implementation


def test_a_module_given_the_config_while_it_was_applied_gets_the_models_own():
    model = tiny_model()
    config = model.config
    attnplug.apply(model, "dense")
    model.model.layers.append(type(model.model.layers[0])(model.config, 2))
    model.config.num_hidden_layers = 3
    attnplug.remove(model)
    assert model.model.layers[2].self_attn.config is config
    assert model.generate(IDS, **OPTIONS).shape[1] == 24


def test_a_model_built_on_the_very_object_says_what_to_do_and_works_after_remove():
    model = attnplug.apply(tiny_model(), "dense")
    other = LlamaForCausalLM(model.config).eval()
    with pytest.raises(attnplug.UnsupportedCallError, match=r"copy\.deepcopy\(model\.config\)"):
        other.generate(IDS, **OPTIONS)
    attnplug.remove(model)
    assert other.generate(IDS, **OPTIONS).shape[1] == 24


def test_copies_and_pickles_of_the_model_keep_the_policy_and_its_way_back():
    model = attnplug.apply(tiny_model(), "dense")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert attnplug.report(twin).policy == "dense"
        assert "attnplug" in twin.config._attn_implementation
        again = copy.deepcopy(twin)
        assert "attnplug" in again.config._attn_implementation
        attnplug.remove(again)
        assert again.config._attn_implementation == "sdpa"
        assert copy.deepcopy(twin.config)._attn_implementation == "sdpa"


@torch.no_grad()
def test_a_shallow_copy_is_one_of_the_config_alone():
    model = attnplug.apply(tiny_model(), "dense")
    assert copy.copy(model.config)._attn_implementation == "sdpa"
    assert "attnplug" in model.config._attn_implementation


@torch.no_grad()
def test_the_name_is_a_plain_string_that_every_torch_traces():
    model = attnplug.apply(tiny_model(), "dense")
    assert type(model.config._attn_implementation) is str
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    mask = torch.ones_like(IDS)
    found = compiled(IDS, attention_mask=mask, use_cache=False).logits
    wanted = model(IDS, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found, wanted)
