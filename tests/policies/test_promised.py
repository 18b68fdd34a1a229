"""A third party's method that breaks what attnplug relies on is told so in a sentence: when it is
registered or applied if its class shows it, else in the call; and the model is right again behind
it."""

import dataclasses

import pytest
import torch
from transformers import GenerationConfig

import attnplug
from attnplug import Policy, PolicyError
from attnplug.call import PagedCall
from attnplug.ops import dense_decode
from attnplug.policies import DraftingPhase, PagedPhase, Phase, TracingPhase, methods, register
from attnplug.testing import tiny_model

DECODE, PREFILL, TRACE = frozenset({"decode"}), frozenset({"prefill"}), frozenset({"trace"})


def good(self, call):
    return dense_decode(call.q, call.k, call.v, sinks=call.sinks, **call.options)[0]


def prompt(self, call):
    return torch.nn.functional.scaled_dot_product_attention(
        call.q, call.k, call.v, is_causal=True, enable_gqa=True
    )


def method_of(base=Phase, phases=DECODE, name="third_partys", **members):
    members = {"attend": prompt if phases == PREFILL else good} | members
    facts = {"name": name, "phases": phases, "__module__": __name__}
    own = facts | {key: x for key, x in members.items() if x is not None}
    return dataclasses.dataclass(frozen=True)(type("Mine", (base,), own))


def not_a_method(self):
    return 4


WRONG_CLASSES = {
    "phases, a list": (dict(phases=["decode"]), "its phases are"),
    "phases, a string": (dict(phases="decode"), "its phases are"),
    "phases, none": (dict(phases=frozenset()), "its phases are"),
    "a keyword for a name": (dict(name="class"), "its name is 'class'"),
    "on_request, a list": (dict(on_request=["decode"]), "its on_request is"),
    "head_dims, a number": (dict(head_dims=64), "its head_dims are"),
    "no attend": (dict(attend=None), "has no attend"),
    "attend, a number": (dict(attend=3), "its attend is no method"),
    "attend, a property": (dict(attend=property(not_a_method)), "its attend is no method"),
    "drafts without rounds": (dict(base=DraftingPhase), "has no rounds"),
    "rounds of a plain method": (dict(rounds=not_a_method), "subclass .*DraftingPhase"),
    "varies_rounds, a method": (
        dict(base=DraftingPhase, rounds=not_a_method, varies_rounds=not_a_method),
        "its varies_rounds is a method, needs @property",
    ),
    "traces without observe": (dict(base=TracingPhase, phases=TRACE), "has no observe"),
    "traces as a plain method": (dict(phases=TRACE), "lacks observe.*TracingPhase"),
    "observe of a plain method": (dict(observe=not_a_method), "subclass .*TracingPhase"),
    "pages without attend_pages": (dict(base=PagedPhase), "has no attend_pages"),
    "attend_pages of a plain method": (dict(attend_pages=not_a_method), "subclass .*PagedPhase"),
}


@pytest.mark.parametrize(("members", "said"), WRONG_CLASSES.values(), ids=WRONG_CLASSES)
def test_a_class_is_refused_registered_or_not(members, said):
    cls = method_of(**members)
    with pytest.raises(PolicyError, match=said):
        register(cls)
    assert cls.name not in methods()
    with pytest.raises(PolicyError, match=said):
        attnplug.apply(tiny_model(), cls())


def test_what_is_right_is_taken():
    """An option may have the name of a method of another kind, a method may say that it has no
    pages, and all of attnplug's own are right."""
    rounds = dataclasses.make_dataclass(
        "Mine", [("rounds", int, 4)], bases=(method_of(),), frozen=True
    )
    Policy(decode=rounds())
    Policy(decode=method_of(PagedPhase, pages_refusal=lambda self: "has none")())
    Policy(decode=method_of(DraftingPhase, rounds=lambda self: 0)())
    for cls in list(methods().values()):
        register(cls)


def turned(attend):
    return lambda self, call: attend(self, call).transpose(1, 2)


WRONG_RESULTS = {
    "attend, none": dict(attend=lambda self, call: None),
    "attend, a pair": dict(attend=lambda self, call: (good(self, call), None)),
    "attend, [B,T,Hq,D]": dict(attend=turned(good)),
    "attend, [B,Hq,D]": dict(attend=lambda self, call: good(self, call)[:, :, 0]),
    "attend, float64": dict(attend=lambda self, call: good(self, call).double()),
    "attend of a prompt, [B,T,Hq,D]": dict(phases=PREFILL, attend=turned(prompt)),
    "rounds, a text": dict(base=DraftingPhase, rounds=lambda self: "4"),
    "rounds, negative": dict(base=DraftingPhase, rounds=lambda self: -1),
    "cache_layer, a number": dict(cache_layer=lambda self, room: room),
    "refusal, a bool": dict(refusal=lambda self, shape: True),
    "resolve, no pair": dict(resolve=lambda self, *_: self),
    "on_this_machine, none": dict(on_this_machine=lambda self, shape: None),
}


@pytest.mark.parametrize("members", WRONG_RESULTS.values(), ids=WRONG_RESULTS)
def test_a_result_is_refused_and_the_next_call_is_right(members):
    model, ids = tiny_model(), torch.arange(2, 42)[None]
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False)
    with (
        pytest.raises(PolicyError, match=r"third_partys: its \w+ (returned|is) .*needs"),
        attnplug.applied(model, method_of(**members)()),
    ):
        model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), wanted)


def test_what_is_observed_is_edges(tmp_path):
    tracing = method_of(TracingPhase, TRACE, observe=lambda self, call, served: call.q)()
    model = tiny_model()
    with (
        pytest.raises(PolicyError, match="its observe returned a Tensor, needs Edges or None"),
        attnplug.applied(model, Policy(trace=tracing)),
        attnplug.trace.record(model, tmp_path / "t.parquet"),
    ):
        model.generate(torch.arange(2, 42)[None], max_new_tokens=2, do_sample=False)


def test_the_output_over_pages_has_a_shape():
    def over_pages(self, call: PagedCall):
        return call.q.transpose(1, 2)

    model = tiny_model()
    with attnplug.applied(model, method_of(PagedPhase, attend_pages=over_pages)()):
        found = model.generate_batch(
            [list(range(2, 12))],
            generation_config=GenerationConfig(max_new_tokens=3, do_sample=False),
        )
    assert not found or all("needs [B,Hq,T,D]" in str(x.error) for x in found.values())
