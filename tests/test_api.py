"""apply, remove, applied, report: mappings, refusals with their messages, two models at once."""

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import (
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    pipeline,
)
from transformers import T5ForConditionalGeneration as T5

import attnplug
from attnplug.testing.policy import tiny_model


@pytest.fixture
def model():
    return tiny_model(num_hidden_layers=4)


def ids(rows: int = 1, tokens: int = 12) -> torch.Tensor:
    return torch.randint(2, 90, (rows, tokens), generator=torch.Generator().manual_seed(0))


def prefills(model) -> list[str]:
    return [layer.prefill for layer in attnplug.report(model).layers]


def test_one_policy_serves_every_layer(model):
    attnplug.apply(model, "momo(gamma=32)")
    assert prefills(model) == ["momo(gamma=32)"] * 4
    assert attnplug.report(model).policy == "momo(gamma=32)"


def test_apply_takes_methods_and_policies(model):
    with attnplug.applied(model, attnplug.Momo(gamma=32)):
        assert prefills(model) == ["momo(gamma=32)"] * 4
    with attnplug.applied(model, attnplug.Policy(prefill=attnplug.Momo())):
        assert attnplug.report(model).policy == "momo"


@pytest.mark.parametrize(
    "mapping",
    [
        {0: "momo", 1: "momo", range(2, 4): "dense"},
        {"0": "momo", 1: "momo", "2-3": "dense"},
        {"0-1": "momo", "*": "dense"},
        {"*layers.[01].*": "momo", "*layers.[23].*": "dense"},
    ],
    ids=["index and range", "texts", "span and rest", "glob"],
)
def test_a_mapping_gives_layers_their_own_policy(model, mapping):
    attnplug.apply(model, mapping)
    assert prefills(model) == ["momo", "momo", "dense", "dense"]


def test_layers_without_a_match_stay_dense_and_say_so(model):
    attnplug.apply(model, {1: "momo"})
    report = attnplug.report(model)
    assert prefills(model) == ["sdpa (dense)", "momo", "sdpa (dense)", "sdpa (dense)"]
    assert "the policy mapping names no policy for it" in report.layers[0].reason
    assert "layers 2-3 (full): prefill sdpa (dense)" in str(report)


def test_the_first_match_wins(model):
    attnplug.apply(model, {0: "dense", "*": "momo"})
    assert prefills(model) == ["dense", "momo", "momo", "momo"]


def test_report_says_where_momo_runs_dense(model):
    attnplug.apply(model, "momo(min_tokens=4096)")
    assert "dense in prefills below 4,096 tokens" in str(attnplug.report(model))


REFUSALS = {
    "unknown method": (
        "mojo",
        attnplug.PolicyError,
        "no method 'mojo'; there are auto,",
    ),
    "unknown option": ("momo(gama=2)", attnplug.PolicyError, "no option 'gama'; it has gamma,"),
    "bad value": ("momo(gamma=0)", attnplug.PolicyError, "gamma=0, needs None or"),
    "bad multiple": ("momo(gamma=24)", attnplug.PolicyError, "query_block=128, needs a multiple"),
    "bool": ("momo(gamma=True)", attnplug.PolicyError, "gamma=True, needs None or an integer"),
    "tokens": ("momo(min_tokens='4')", attnplug.PolicyError, "min_tokens='4', needs None or"),
    "slots": (
        "momo(selection='estimated', exact_k=65)",
        attnplug.PolicyError,
        "exact_k=65, needs 0 to 64 here",
    ),
    "entries": (
        "momo(selection='exact', gamma=1, query_block=256)",
        attnplug.PolicyError,
        "top_k = 32768 to be at most 16384",
    ),
    "not a literal": ("momo(gamma=x)", attnplug.PolicyError, "gamma=x is not a literal"),
    "positional": ("momo(16)", attnplug.PolicyError, "options need their names"),
    "syntax": ("momo(", attnplug.PolicyError, "cannot be read"),
    "twice": ("momo+momo(gamma=8)", attnplug.PolicyError, "both want to be the prefill method"),
    "not a name": ("momo.x", attnplug.PolicyError, "is not a method's name"),
    "wrong type": (3, attnplug.PolicyError, "not int"),
    "empty mapping": ({}, attnplug.PolicyError, "mapping is empty"),
    "no such layer": (
        {9: "momo"},
        attnplug.PolicyError,
        "matches .* 9; this model's layers are 0 to ",
    ),
    "no layer before": ({-1: "momo"}, attnplug.PolicyError, "no attention layer matches .* -1"),
    "empty range": ({range(0, 0): "momo"}, attnplug.PolicyError, r"matches .* range\(0, 0\)"),
    "no such text": ({"9": "momo"}, attnplug.PolicyError, "no attention layer matches .* 9"),
    "bad key": ({1.5: "momo"}, attnplug.PolicyError, "the key 1.5 is a float"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_bad_policy_is_refused_and_changes_nothing(model, name):
    policy, error, message = REFUSALS[name]
    with pytest.raises(error, match=message):
        attnplug.apply(model, policy)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(attnplug.NotAppliedError):
        attnplug.report(model)


def test_apply_twice_is_refused(model):
    attnplug.apply(model, "dense")
    with pytest.raises(attnplug.AlreadyAppliedError, match="already has the policy 'dense'"):
        attnplug.apply(model, "momo")
    attnplug.remove(model)
    attnplug.apply(model, "momo")


def test_remove_and_report_need_a_policy(model):
    for verb in (attnplug.remove, attnplug.report):
        with pytest.raises(attnplug.NotAppliedError, match=r"call attnplug\.apply"):
            verb(model)


def test_applied_removes_after_an_error(model):
    with pytest.raises(RuntimeError, match="mine"), attnplug.applied(model, "dense"):
        raise RuntimeError("mine")
    assert model.config._attn_implementation == "sdpa"


TINY = dict(vocab_size=50, hidden_size=64, num_attention_heads=1, num_hidden_layers=1)
UNSUPPORTED = {
    "no interface": (
        lambda: BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=64, n_head=1, n_layer=1)),
        "BloomForCausalLM: no attention layer goes through transformers' attention interface",
    ),
    "encoder-decoder": (
        lambda: T5(T5Config(vocab_size=50, d_model=64, d_kv=64, num_layers=1, num_heads=1)),
        "is an encoder-decoder",
    ),
    "not a transformers model": (lambda: torch.nn.Linear(2, 2), "a Linear is not a transformers"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_models_are_refused(name):
    build, message = UNSUPPORTED[name]
    with pytest.raises(attnplug.UnsupportedModelError, match=message):
        attnplug.apply(build(), "dense")


def test_a_pipeline_is_refused_by_the_name_of_its_model():
    bytes_ = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"a": 0}, [])))
    pipe = pipeline("text-generation", model=tiny_model(), tokenizer=bytes_)
    said = r"a TextGenerationPipeline is not a model: use pipe\.model"
    with pytest.raises(attnplug.UnsupportedModelError, match=said):
        attnplug.apply(pipe, "dense")
    attnplug.remove(attnplug.apply(pipe.model, "dense"))


def test_a_tokenizer_is_refused_and_not_taken_for_a_pipeline():
    bytes_ = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"a": 0}, [])))
    assert hasattr(bytes_, "model")
    with pytest.raises(attnplug.UnsupportedModelError, match="load one, as with AutoModel"):
        attnplug.apply(bytes_, "dense")


def test_encoder_layers_stay_dense_and_say_so():
    model = BertModel(BertConfig(**TINY, intermediate_size=64)).eval()
    with torch.no_grad():
        before = model(ids() % 50).last_hidden_state
        with attnplug.applied(model, "momo"):
            assert {layer.prefill for layer in attnplug.report(model).layers} == {"sdpa (dense)"}
            assert torch.allclose(model(ids() % 50).last_hidden_state, before)


def test_odd_head_dimensions_stay_dense_and_say_so():
    model = tiny_model(head_dim=40)
    with torch.no_grad():
        before = model(ids()).logits
        with attnplug.applied(model, "dense"):
            assert "head dimension 40 is neither a multiple of 16" in str(attnplug.report(model))
            assert torch.allclose(model(ids()).logits, before)


def test_a_forward_that_records_gradients_is_refused(model):
    attnplug.apply(model, "dense")
    with pytest.raises(attnplug.GradientError, match=r"torch\.no_grad"):
        model(ids())


@torch.no_grad()
def test_dropout_is_refused():
    model = tiny_model(attention_dropout=0.5)
    attnplug.apply(model, "dense")
    with pytest.raises(attnplug.UnsupportedCallError, match=r"model\.eval"):
        model.train()(ids())


@torch.no_grad()
def test_attention_weights_are_refused(model):
    attnplug.apply(model, "dense")
    with pytest.raises(attnplug.UnsupportedCallError, match="never builds the attention matrix"):
        model(ids(), output_attentions=True)


@torch.no_grad()
def test_two_models_of_one_config_do_not_touch_each_other(model):
    twin = type(model)(model.config).eval()
    before = twin(ids()).logits
    with attnplug.applied(model, "dense"):
        assert torch.equal(twin(ids()).logits, before)


@torch.no_grad()
def test_hooks_of_accelerate_stay(model):
    class Count(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Count.calls += 1
            return args, kwargs

    attention = model.model.layers[0].self_attn
    add_hook_to_module(attention, Count())
    hook = attention._hf_hook
    with attnplug.applied(model, "dense"):
        model(ids())
        assert Count.calls == 1 and attention._hf_hook is hook
    model(ids())
    assert Count.calls == 2 and attention._hf_hook is hook


@torch.no_grad()
def test_a_compiled_model_takes_a_policy(model):
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    wanted = compiled(ids()).logits
    attnplug.apply(compiled, "dense")
    assert attnplug.report(compiled).policy == "dense"
    assert (compiled(ids()).logits - wanted).abs().max() < 1e-4
    attnplug.remove(compiled)
    assert torch.equal(compiled(ids()).logits, wanted)


@torch.no_grad()
def test_a_mask_of_the_users_own_runs_the_models_attention(model):
    """A 4-dimensional mask has no compact form: the layers fall back to sdpa, exactly."""
    tokens = 12
    full = torch.ones(tokens, tokens).tril().bool()
    full[6:, 2:4] = False
    mask = full[None, None]
    wanted = model(ids(), attention_mask=mask).logits
    with attnplug.applied(model, "momo(min_tokens=0)"):
        assert torch.equal(model(ids(), attention_mask=mask).logits, wanted)


def test_a_compiled_decode_step_stays_with_its_policy(model):
    """generate keeps the step it compiles on the model."""
    stock = model.get_compiled_call(None)
    attnplug.apply(model, "momo")
    assert model.get_compiled_call(None) is not stock
    attnplug.remove(model)
    assert model.get_compiled_call(None) is stock
    with attnplug.applied(tiny := tiny_model(), "dense"):
        tiny.get_compiled_call(None)
    assert not {"_compiled_call", "_last_compile_config"} & vars(tiny).keys()


def test_switching_the_attention_is_refused_or_reported(model):
    attnplug.apply(model, "momo")
    with pytest.raises(attnplug.UnsupportedCallError, match=r"attnplug\.remove"):
        model.set_attn_implementation("eager")
    attnplug.report(model)
    model.config._attn_implementation = "eager"  # what nobody can refuse
    with pytest.raises(attnplug.UnsupportedModelError, match="switched to attention 'eager'"):
        attnplug.report(model)
    attnplug.remove(model)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
