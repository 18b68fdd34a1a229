"""Methods that somebody else has put on a model, before `apply` or since: they run as they would
without a policy, and are there when it is gone."""

import copy
import pickle

import pytest
import torch
from batching_cases import llama

import attnplug
from attnplug.errors import UnsupportedCallError
from attnplug.models import layer_kernels
from attnplug.models.generate import LOOP as OF_LOOP
from attnplug.models.generate import METHODS
from attnplug.models.instance_method import PUT
from attnplug.models.names import CACHE
from attnplug.testing.policy import tiny_model

STEP = "prepare_inputs_for_generation"
IDS = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[1, :6] = 0
RUN = sorted({*METHODS} - {"set_attn_implementation", "init_continuous_batching"})
LOOP = f"{STEP} was replaced on this model"


def tokens_of(model, **options):
    fields = dict(attention_mask=MASK, max_new_tokens=8, do_sample=False)
    return model.generate(input_ids=IDS, **(fields | options))[:, IDS.shape[1] :].tolist()


class Wide:
    """A user's method, which calls the one that it wraps, and has a pass's tokens lie twice as far
    apart."""

    def __init__(self, stock):
        self.stock = stock

    def __call__(self, *args, **kwargs):
        made = self.stock(*args, **kwargs)
        if made.get("position_ids") is not None:
            made["position_ids"] = made["position_ids"] * 2
        return made


class Counting:
    """A user's method that counts its calls, and calls the method that it wraps."""

    def __init__(self, stock):
        self.stock, self.calls = stock, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.stock(*args, **kwargs)


def wrapped(model, name, kind):
    """The method `name` of a model, after a user has put one in its place."""
    mine = kind(getattr(model, name))
    setattr(model, name, mine)
    return mine


@pytest.fixture(scope="module")
def wide_tokens():
    model = tiny_model()
    plain = tokens_of(model)
    wrapped(model, STEP, Wide)
    wide = tokens_of(model)
    assert wide != plain
    return wide


@pytest.mark.parametrize("policy", ["dense", "gather(min_tokens=0)"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_inputs_of_a_pass_are_the_users(when, policy, wide_tokens):
    model = tiny_model()
    if when == "before":
        mine = wrapped(model, STEP, Wide)
        attnplug.apply(model, policy)
    else:
        attnplug.apply(model, policy)
        mine = wrapped(model, STEP, Wide)
    assert tokens_of(model) == wide_tokens
    assert LOOP in attnplug.report(model).loop
    attnplug.remove(model)
    assert vars(model)[STEP] is mine and PUT not in vars(model)
    assert tokens_of(model) == wide_tokens


def test_a_cache_that_the_user_passes_is_used_and_prepared(wide_tokens):
    model = tiny_model()
    wrapped(model, STEP, Wide)
    with attnplug.applied(model, "sketch(min_tokens=0)"):
        cache = attnplug.make_cache(model, 64)
        assert tokens_of(model, **{CACHE: cache}) == wide_tokens
        assert int(cache.get_seq_length()) == IDS.shape[1] + 7


@pytest.mark.parametrize("name", RUN)
def test_a_method_of_before_runs_and_is_there_again(name):
    model = tiny_model()
    wanted = tokens_of(model)
    mine = wrapped(model, name, Counting)
    before = dict(vars(model))
    with attnplug.applied(model, "dense"):
        assert tokens_of(model) == wanted
    assert mine.calls
    assert vars(model)[name] is mine and set(vars(model)) == set(before)
    assert tokens_of(model) == wanted


@pytest.mark.parametrize("name", RUN)
def test_a_method_of_since_runs_stays_and_goes_on(name):
    model = tiny_model()
    wanted = tokens_of(model)
    before = {*vars(model)}
    with attnplug.applied(model, "dense"):
        mine = wrapped(model, name, Counting)
        assert tokens_of(model) == wanted
        calls = mine.calls
    assert calls and vars(model)[name] is mine and {*vars(model)} == before | {name}
    assert tokens_of(model) == wanted
    with attnplug.applied(model, "dense"):
        assert tokens_of(model) == wanted
    assert vars(model)[name] is mine


def test_a_prefill_of_the_users_keeps_transformers_loop():
    model = attnplug.apply(tiny_model(), "dense")
    mine = wrapped(model, "_prefill", Counting)
    tokens_of(model)
    assert mine.calls == 1
    assert "_prefill was replaced on this model" in attnplug.report(model).loop


def test_a_generate_that_calls_attnplugs_keeps_its_loop():
    model = attnplug.apply(tiny_model(), "dense")
    mine = wrapped(model, "generate", Counting)
    tokens_of(model)
    assert mine.calls == 1 and vars(model)[OF_LOOP].why_not == ""


def test_masks_of_the_users_keep_transformers_loop():
    model = attnplug.apply(tiny_model(), "dense")
    model.create_masks_for_generate = lambda **kwargs: kwargs["attention_mask"]
    tokens_of(model)
    assert "makes its own masks" in attnplug.report(model).loop


def test_a_switch_of_the_users_is_refused_and_there_again():
    model = tiny_model()
    mine = wrapped(model, "set_attn_implementation", Counting)
    with attnplug.applied(model, "dense"):
        with pytest.raises(UnsupportedCallError, match="would drop the policy"):
            model.set_attn_implementation("eager")
        assert not mine.calls
    model.set_attn_implementation("eager")
    assert mine.calls == 1 and model.config._attn_implementation == "eager"


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_copy_has_the_users_method(when, twin_of, wide_tokens):
    model = tiny_model()
    if when == "before":
        wrapped(model, STEP, Wide)
    attnplug.apply(model, "dense")
    if when == "after":
        wrapped(model, STEP, Wide)
    twin = twin_of(model)
    assert tokens_of(twin) == wide_tokens
    attnplug.remove(twin)
    assert type(vars(twin)[STEP]) is Wide and vars(twin)[STEP] is not vars(model)[STEP]
    assert tokens_of(twin) == wide_tokens and PUT not in vars(twin)
    assert tokens_of(model) == wide_tokens
    attnplug.remove(model)
    assert PUT not in vars(model)


def test_the_class_method_as_an_attribute_comes_back():
    """As PEFT leaves it behind: the class's own method as an attribute of the model."""
    model = tiny_model()
    wanted = tokens_of(model)
    model.prepare_inputs_for_generation = own = model.prepare_inputs_for_generation
    with attnplug.applied(model, "dense"):
        assert tokens_of(model) == wanted
    assert vars(model)[STEP] is own


class Prompted(torch.nn.Module):
    """Learned tokens in front of a prompt, as PEFT puts them there: while generate runs, its own
    method is on the model, and it counts on a cache that is empty before the first pass."""

    def __init__(self, model):
        super().__init__()
        self.base_model, self.stock = model, getattr(model, STEP)
        generator = torch.Generator().manual_seed(4)
        self.learned = torch.randn(1, 5, model.config.hidden_size, generator=generator)

    def get_base_model(self):
        return self.base_model

    def generate(self, **options):
        setattr(self.base_model, STEP, self.prepare)
        try:
            return self.base_model.generate(**options)
        finally:
            setattr(self.base_model, STEP, self.stock)

    def prepare(self, *args, **kwargs):
        made = self.stock(*args, **kwargs)
        ids, mask = made["input_ids"], made["attention_mask"]
        assert mask.dim() == 2
        made["attention_mask"] = torch.cat((mask.new_ones(len(mask), 5), mask), 1)
        made.pop("position_ids", None)
        if not made[CACHE].get_seq_length():
            embedded = self.base_model.get_input_embeddings()(ids)
            learned = self.learned.expand(len(ids), -1, -1)
            made |= dict(input_ids=None, inputs_embeds=torch.cat((learned, embedded), 1))
        return made


@pytest.mark.parametrize("first", ["policy", "wrapper"])
def test_learned_prompts_give_stocks_tokens(first):
    wanted = tokens_of(Prompted(tiny_model()))
    assert wanted != tokens_of(tiny_model())
    model = tiny_model()
    if first == "policy":
        attnplug.apply(model, "dense")
    prompted = Prompted(model)
    if first == "wrapper":
        attnplug.apply(prompted, "dense")
    for _ in range(2):
        assert tokens_of(prompted) == wanted
        assert LOOP in attnplug.report(prompted).loop
    attnplug.remove(prompted)
    assert tokens_of(prompted) == wanted
    with attnplug.applied(prompted, "dense"):
        assert tokens_of(prompted) == wanted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_peft_learns_prompts(kind):
    peft = pytest.importorskip("peft")

    def made():
        config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=5)
        model = peft.get_peft_model(tiny_model(), config).eval()
        torch.manual_seed(4)
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data.normal_(0, 0.5)
        return model

    wanted = tokens_of(made())
    model = attnplug.apply(made(), "dense")
    assert tokens_of(model) == wanted and LOOP in attnplug.report(model).loop
    attnplug.remove(model)
    assert tokens_of(model) == wanted


def test_batching_calls_the_users_method_and_leaves_it():
    model = llama()
    mine = wrapped(model, "init_continuous_batching", Counting)
    with attnplug.applied(model, "dense"):
        manager = model.init_continuous_batching()
        with pytest.raises(UnsupportedCallError, match="continuous batching runs"):
            tokens_of(model)
        other = wrapped(model, "generate", Counting)
        manager.stop(block=True)
        tokens_of(model)
        assert mine.calls == 1 and vars(model)["generate"] is other
    assert vars(model)["init_continuous_batching"] is mine
    tokens_of(model)
    assert other.calls == 2 and vars(model)["generate"] is other


def test_a_forward_that_comes_while_kernels_stand_in_stays(monkeypatch):
    monkeypatch.setattr(layer_kernels, "DEVICES", {"cpu"})
    model = tiny_model()
    norm = model.model.norm
    mine = norm.forward
    with torch.no_grad(), layer_kernels.LayerKernels().on(model):
        assert "forward" in vars(norm)
        norm.forward = mine
    assert vars(norm)["forward"] is mine
