"""Generators: the answer is in the text, as often as it should; the length is in range; seeds are
independent; scoring is strict."""

import re
from collections import Counter

import pytest

from attnplug.errors import ArgumentError
from attnplug.eval.needle import BOOK_PROMPT, prose
from attnplug.eval.prompts import DEPTHS, depth_of, fit
from attnplug.eval.tasks import TASKS, Sample, make_sample

NUMBERS = ["needle-noise", "needle-prose", "multi-key", "multi-value", "multi-query", "ten-needles"]
COUNT = dict(zip(NUMBERS, (1, 1, 1, 4, 4, 10), strict=True))


def words(sample: Sample) -> list[str]:
    """The listed or coded words between the instructions."""
    body = sample.text.split("\n", 4)[4].split("\nWhat are the")[0]
    return [word for word in body.split() if not re.fullmatch(r"\d+\.", word)]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("target", [1024, 2048, 5000])
def test_the_length_is_90_to_100_percent_of_the_target(tokenizer, task, target):
    if task == "common-words" and target == 1024:
        with pytest.raises(ArgumentError, match=r"common-words: needs at least 1[78]"):
            make_sample(tokenizer, task, target)
        return
    for trial in range(4):
        sample = make_sample(tokenizer, task, target, trial)
        assert 0.9 * target <= sample.ids.shape[1] <= target
        assert tokenizer.decode(sample.ids[0]) == sample.text


@pytest.mark.parametrize("task", NUMBERS)
def test_every_number_is_once_in_the_text_at_its_depth(tokenizer, task):
    for trial in range(6):
        sample = make_sample(tokenizer, task, 4096, trial)
        assert len(set(sample.answers)) == len(sample.answers) == COUNT[task]
        for answer, depth in zip(sample.answers, sample.depths, strict=True):
            assert re.fullmatch(r"\d{5}", answer)
            assert sample.text.count(answer) == 1
            place = sample.text.index(answer) / len(sample.text)
            assert place == pytest.approx(depth, abs=0.06)


def test_the_asked_key_of_multi_key_has_the_answer_and_three_others_do_not(tokenizer):
    sample = make_sample(tokenizer, "multi-key", 1024, 3)
    facts = dict(re.findall(r"magic number for (\w+) is (\d{5})\.", sample.text))
    asked = re.search(r"What is the special magic number for (\w+)", sample.text)
    assert asked is not None and len(facts) == 4
    assert sample.answers == (facts[asked[1]],)


def test_variables_form_one_chain_of_four_hops(tokenizer):
    sample = make_sample(tokenizer, "variable-tracking", 1024, 2)
    value = re.search(r"VAR (\w+) = (\d{5})\.", sample.text)
    hops = re.findall(r"VAR ([A-Z]{5}) = VAR ([A-Z]{5})\.", sample.text)
    assert value is not None and len(hops) == 4
    assert [value[1], *(new for new, _ in hops)] == list(sample.answers)
    assert [old for _, old in hops] == list(sample.answers[:-1])
    for name in sample.answers:  # where it is assigned
        assert len(re.findall(rf"VAR {name} =", sample.text)) == 1


def test_common_words_come_30_times_and_the_others_3_times(tokenizer):
    sample = make_sample(tokenizer, "common-words", 4096, 1)
    counts = Counter(words(sample))
    assert {counts.pop(answer) for answer in sample.answers} == {30}
    assert len(sample.answers) == 10 and set(counts.values()) == {3}


def test_frequent_words_lead_by_zetas_counts(tokenizer):
    sample = make_sample(tokenizer, "frequent-words", 4096, 1)
    listed = words(sample)
    counts = Counter(listed)
    ranked = counts.most_common(5)
    assert [word for word, _ in ranked[:4]] == ["...", *sample.answers]
    assert ranked[3][1] > ranked[4][1]
    for rank, (_, count) in enumerate(ranked, 1):  # 1 / (rank^2 zeta(2))
        assert count / len(listed) == pytest.approx(0.6079 / rank**2, abs=0.01)


@pytest.mark.parametrize("task", TASKS)
def test_trials_lengths_and_seeds_are_independent_and_repeatable(tokenizer, task):
    keys = [(2048, 0, 0), (2048, 1, 0), (2048, 0, 1), (2100, 0, 0), (2048, 10, 0)]
    samples = [make_sample(tokenizer, task, *key) for key in keys]
    assert len({sample.answers for sample in samples}) == len(keys)
    assert len({sample.prompt_hash for sample in samples}) == len(keys)
    again = make_sample(tokenizer, task, *keys[1])
    assert again.text == samples[1].text and again.answers == samples[1].answers


def test_no_permutation_repeats_across_trials(tokenizer):
    orders = []
    for trial in range(6):
        sample = make_sample(tokenizer, "common-words", 2048, trial)
        names = {word: i for i, word in enumerate(sample.answers)}
        orders.append(tuple(names[w] for w in words(sample) if w in names))
    assert len(set(orders)) == 6


def test_depths_are_spread_evenly_for_any_number_of_trials():
    assert sorted(depth_of(trial) for trial in range(10)) == sorted(DEPTHS)
    assert sorted(DEPTHS) == pytest.approx([0.05 + i / 10 for i in range(10)])
    for trials in (4, 6, 8):
        first = sorted(DEPTHS[:trials])
        gaps = [b - a for a, b in zip([0, *first], [*first, 1], strict=True)]
        assert max(gaps) < 0.4


@pytest.mark.parametrize(
    ("task", "reply", "score"),
    [
        ("multi-query", "{0}, {1}, {2} and {3}.", 1.0),
        ("multi-query", "{0}, {1}", 0.5),
        ("multi-query", "1{0} {1}0 {2}{3}", 0.0),
        ("multi-query", "", 0.0),
        ("variable-tracking", "{0}, {1}, {2}, {3}, {4}", 1.0),
        ("variable-tracking", "X{0} {1}Y", 0.0),
    ],
)
def test_scoring_is_strict(tokenizer, task, reply, score):
    sample = make_sample(tokenizer, task, 1024)
    assert sample.score(reply.format(*sample.answers)) == score


def test_a_thousands_separator_is_no_mistake_and_a_list_no_number(tokenizer):
    sample = make_sample(tokenizer, "needle-noise", 1024)
    number = sample.answers[0]
    assert sample.score(f"{int(number):,}.") == 1
    assert sample.score(f"{number[:2]}, {number[2:]}") == 0
    assert sample.score(str(int(number) + 1)) == 0


def test_without_a_chat_template_the_prompt_is_plain(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    sample = make_sample(tokenizer, "multi-key", 1024)
    assert "<|im_start|>" not in sample.text and sample.text.endswith("mentioned in the text is")


def test_a_prompt_beyond_the_book_s_reads_the_guides_too_and_repeats_nothing(tokenizer):
    for task in ("needle-prose", "multi-key"):
        book, longer = (make_sample(tokenizer, task, n, seed=1) for n in (BOOK_PROMPT, 40_000))
        read = [set(paragraphs) for paragraphs in (prose(), prose(long=True))]
        guides = read[1] - read[0]
        assert any(paragraph in longer.text for paragraph in guides)
        assert not any(paragraph in book.text for paragraph in guides)
        assert not [p for p in read[1] if len(p) > 100 and longer.text.count(p) > 1]


def test_fit_finds_the_units_and_refuses_the_impossible():
    for cost, frame in ((1, 0), (7, 100), (33, 250)):
        units = fit(lambda n, cost=cost, frame=frame: frame + cost * n, 1000)
        assert 900 <= frame + cost * units <= 1000
    with pytest.raises(ArgumentError, match="needs at least 1200 tokens"):
        fit(lambda n: 1200 + n, 1000)
    with pytest.raises(ArgumentError, match="no filler"):
        fit(lambda n: 800 + 500 * n, 1000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("niah", 1024), "task is 'niah'"),
        (("multi-key", 100), "target is 100"),
        (("multi-key", 500_000), "multi-key: needs .* sentences, the prose has"),
    ],
)
def test_what_cannot_be_built_is_refused(tokenizer, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        make_sample(tokenizer, *arguments)
