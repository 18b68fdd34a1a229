"""What is counted of an engine's rows, and how it is said."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.policies.crossover import RowCrossover
from attnplug.serve.paged.rows import Row
from attnplug.serve.paged.tally import PromptRows, StepRows, in_words

LENGTHS = st.lists(st.integers(0, 60), max_size=6)
RULES = st.tuples(st.integers(0, 40), st.integers(0, 60)).map(
    lambda found: RowCrossover(found[0], sum(found))
)


@given(lengths=LENGTHS, rule=RULES)
def test_the_host_counts_the_rows_that_the_device_chooses(lengths, rule):
    assert rule.count(lengths) == int(rule.far(torch.tensor(lengths, dtype=torch.int64)).sum())


@given(batches=st.lists(LENGTHS, max_size=4), rule=RULES)
def test_steps_are_those_of_all_batches(batches, rule):
    steps, far, near = StepRows(), 0, [0]
    for keys in batches:
        steps.note(keys, rule)
        real = torch.tensor([count for count in keys if count > 1], dtype=torch.int64)
        chosen = rule.far(real)
        far += int(chosen.sum())
        near += real[~chosen].tolist()
    rows = sum(count > 1 for keys in batches for count in keys)
    assert (steps.rows, steps.far, steps.nearest) == (rows, far, max(near))
    steps.reset()
    assert steps == StepRows()


def test_without_a_rule_no_row_is_far():
    steps = StepRows()
    steps.note([0, 1, 30, 7], None)
    assert (steps.rows, steps.far, steps.nearest) == (2, 0, 30)


def test_prompts_are_counted_by_who_serves_them():
    prompts = PromptRows()
    prompts.note_dense([])
    prompts.note_sparse()
    prompts.note_dense(Row(0, 0, *sizes) for sizes in ((5, 5), (2, 90), (7, 8)))
    assert (prompts.rows, prompts.sparse, prompts.queries, prompts.keys) == (4, 1, 7, 90)
    prompts.reset()
    assert prompts == PromptRows()


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (("momo", 0, 0, "rows", "short"), ""),
        (("momo", 2, 2, "rows", "short"), "momo"),
        (("momo", 0, 2, "rows", "short"), "dense (short)"),
        (("", 0, 2, "rows", ""), "dense"),
        (("momo", 1200, 2300, "rows", "x"), "momo (1,200 of 2,300 rows, else dense: x)"),
    ],
)
def test_words(told, words):
    assert in_words(*told) == words
