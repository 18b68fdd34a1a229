"""Needle prompts: their length, where the needle is, and that everything follows from the seed."""

import pytest
import torch
from real_models import real_model

from attnplug.eval import needle_prompt
from attnplug.eval.needle import prose


@pytest.fixture(scope="module")
def tokenizer():
    return real_model("smollm2-135m")[1]


@pytest.fixture
def plain(tokenizer):
    """A tokenizer without a chat template."""
    template, tokenizer.chat_template = tokenizer.chat_template, None
    yield tokenizer
    tokenizer.chat_template = template


@pytest.mark.parametrize("haystack", ["noise", "prose"])
@pytest.mark.parametrize("tokens", [512, 1000, 4096, 8192])
def test_the_length_is_90_to_100_percent_of_the_target(tokenizer, haystack, tokens):
    for seed in range(3):
        needle = needle_prompt(tokenizer, tokens, 0.5, seed, haystack)
        assert needle.ids.dtype == torch.int64 and needle.ids.shape[0] == 1
        assert 0.9 * tokens <= needle.ids.shape[1] <= tokens
        assert tokenizer.decode(needle.ids[0]) == needle.text


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_needle_is_once_in_the_text_at_its_depth(tokenizer, depth):
    needle = needle_prompt(tokenizer, 4096, depth, seed=1)
    assert needle.text.count(needle.answer) == 1
    assert needle.text.index(needle.answer) / len(needle.text) == pytest.approx(depth, abs=0.06)


def test_a_chat_template_is_used_where_there_is_one(tokenizer):
    needle = needle_prompt(tokenizer, 512)
    assert needle.text.startswith("<|im_start|>system\n")
    assert "<|im_end|>\n<|im_start|>assistant\nThe special magic number for" in needle.text


def test_without_a_template_the_prompt_is_plain(plain):
    needle = needle_prompt(plain, 512)
    assert "<|im_start|>" not in needle.text
    assert needle.text.endswith("mentioned in the text is")


def test_the_seed_decides_everything(tokenizer):
    for haystack in ("noise", "prose"):
        one = needle_prompt(tokenizer, 600, 0.5, 3, haystack)
        assert one.text == needle_prompt(tokenizer, 600, 0.5, 3, haystack).text
        assert one.text != needle_prompt(tokenizer, 600, 0.5, 4, haystack).text


def test_found_in_reads_separators_and_rejects_other_numbers(tokenizer):
    needle = needle_prompt(tokenizer, 512)
    number = int(needle.answer)
    assert needle.found_in(f" {number}.") and needle.found_in(f"it is {number:,}")
    assert not needle.found_in(f"{number + 1}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(target_tokens=100), "target_tokens is 100, needs at least 160"),
        (dict(target_tokens=10**6, haystack="prose"), "more than the prose text has"),
        (dict(target_tokens=512, depth=1.5), "depth is 1.5, needs 0 to 1"),
        (dict(target_tokens=512, haystack="essays"), "haystack is 'essays'"),
    ],
)
def test_what_cannot_be_built_is_refused(tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        needle_prompt(tokenizer, **options)


def test_the_prose_is_plain_ascii_with_its_notice():
    text = prose()
    assert len(text) > 900 and all(paragraph.isascii() for paragraph in text)
    assert 200_000 < sum(map(len, text)) < 400_000
    longer = prose(long=True)
    assert longer[: len(text)] == text and len(set(longer)) == len(longer)
    assert sum(map(len, longer)) > 1_400_000 and all(p.isascii() for p in longer)
