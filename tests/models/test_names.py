"""transformers 5.24 has renamed what a model calls its cache: attnplug says what the installed
version says, and users may say either name where that version takes both."""

import ast
import inspect
import warnings
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import attnplug
from attnplug.models.names import CACHE
from attnplug.testing import tiny_model

ROOT = Path(__file__).parent.parent.parent
OLD, NEW = "past_key_values", "cache"
NAMES = inspect.signature(LlamaForCausalLM.forward).parameters.keys() & {OLD, NEW}
IDS = torch.arange(2, 42)[None]
POLICY = "momo(min_tokens=0)+gather(min_tokens=0)"


def code_of(path: Path) -> set[str]:
    """Every name of a keyword argument or an attribute, and every string but docstrings."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.keyword(arg=str(name)) | ast.Attribute(attr=name):
                found.add(name)
            case ast.Constant(value=str(text)):
                found.add(text)
    return found


def test_the_name_is_that_of_the_installed_version():
    assert {CACHE} == NAMES


def test_nothing_but_the_table_of_names_says_the_old_one():
    files = [*ROOT.glob("attnplug/**/*.py"), *ROOT.glob("bench/**/*.py")]
    assert len(files) > 100
    assert [f.name for f in files if OLD in code_of(f)] == ["names.py"]


@torch.no_grad()
def test_a_call_by_the_installed_versions_name_does_not_warn():
    """`generate` in both loops, a second turn, and steps of one's own."""
    options = dict(max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    with warnings.catch_warnings(), attnplug.applied(tiny_model(), POLICY) as model:
        warnings.simplefilter("error", FutureWarning)
        first = model.generate(IDS, **options)
        other = model.generate(IDS, output_logits=True, **options)
        assert torch.equal(first.sequences, other.sequences)
        longer = torch.cat([first.sequences, IDS[:, :3]], 1)
        again = model.generate(longer, **{CACHE: first[CACHE]}, **options)
        cache = attnplug.make_cache(model, 64)
        model(longer[:, :-1], **{CACHE: cache})
        step = model(longer[:, -1:], **{CACHE: cache}).logits
        assert step[0, -1].argmax() == again.sequences[0, longer.shape[1]]


@pytest.mark.skipif(CACHE != NEW, reason="this version of transformers takes one name")
@torch.no_grad()
def test_the_old_name_serves_the_policy_too():
    with attnplug.applied(tiny_model(), POLICY) as model:
        caches = [attnplug.make_cache(model, 64) for _ in range(2)]
        new = model(IDS, cache=caches[0]), model(IDS[:, :1], cache=caches[0])
        with pytest.warns(FutureWarning, match="Use `cache` instead"):
            old = [model(x, past_key_values=caches[1]) for x in (IDS, IDS[:, :1])]
        for a, b in zip(old, new, strict=True):
            assert torch.equal(a.logits, b.logits)
        assert caches[1].get_seq_length() == IDS.shape[1] + 1


@pytest.mark.skipif(CACHE == NEW, reason="this version of transformers takes `cache`")
@torch.no_grad()
def test_the_new_name_is_refused_where_transformers_would_drop_it():
    with attnplug.applied(tiny_model(), POLICY) as model:
        cache = attnplug.make_cache(model, 64)
        with pytest.raises(attnplug.UnsupportedCallError, match="takes a cache as past_key_values"):
            model(IDS, cache=cache)
