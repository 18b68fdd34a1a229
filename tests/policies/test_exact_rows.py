"""exact over rows of a batch, which go at their own pace, and over windows."""

import pytest
import torch
from exact_cases import (
    FAR,
    GVR,
    NEW,
    ROWS,
    SAMPLED,
    SHORT,
    SKETCH,
    as_over_heavy_caches,
    call,
    exact,
    ids_of,
    padding_model,
    rows_of,
    tally,
    windowed,
)

import attnplug
from attnplug.models import noise, rounds


@pytest.fixture
def model(device):
    return padding_model(device)


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_row_ends_inside_a_round(model, options):
    with attnplug.applied(model, "dense"):
        free, _ = call(model, **options)
    for end in (2, 3, 4, 9):
        stops = dict(eos_token_id=free[0][end], pad_token_id=0)
        with attnplug.applied(model, "dense"):
            wanted, _ = call(model, **stops, **options)
            after = torch.rand(2, device=model.device)
        with attnplug.applied(model, exact("gather", 5)):
            assert call(model, **stops, **options)[0] == wanted
            assert torch.equal(torch.rand(2, device=model.device), after)


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("draft", "m"), [(SHORT, 4), (GVR, 4), (SHORT, "auto")])
@pytest.mark.parametrize("what", ROWS)
def test_rows_get_denses_tokens_each_at_its_own_pace(model, what, draft, m, options, monkeypatch):
    as_over_heavy_caches(monkeypatch)
    ids, more = rows_of(what, model)
    with attnplug.applied(model, "dense"):
        wanted, _ = call(model, ids, **more, **options)
        after = torch.rand(3, device=model.device)
    with attnplug.applied(model, exact(draft, m)):
        for _ in range(2):
            assert call(model, ids, **more, **options)[0] == wanted
            assert torch.equal(torch.rand(3, device=model.device), after)
        found = tally(model)
        assert 0 < found.accepted < found.drafted
        assert {each.decode for each in attnplug.report(model).last} == {"exact"}


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("what", ["one row", "padded rows"])
def test_sketch_drafts_over_a_text_that_it_does_not_read_whole(model, what, options):
    """Its basis is made between rounds, of accepted tokens, and its ring outlasts eight drafts."""
    ids, more = (ids_of(900), {}) if what == "one row" else rows_of(what, model, 900)
    with attnplug.applied(model, "dense"):
        wanted, _ = call(model, ids, **more, **options)
        after = torch.rand(3, device=model.device)
    with attnplug.applied(model, exact(SKETCH, 8)):
        assert call(model, ids, **more, **options)[0] == wanted
        assert torch.equal(torch.rand(3, device=model.device), after)
        assert 0 < tally(model).accepted < tally(model).drafted


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_rows_end_one_after_another(model, options):
    ids, more = rows_of("padded rows", model)
    with attnplug.applied(model, "dense"):
        free, _ = call(model, ids, **more, **options)
    ends = [free[0][2], free[1][9], free[2][15]]
    stops = dict(eos_token_id=ends, pad_token_id=0) | more | options
    with attnplug.applied(model, "dense"):
        wanted, _ = call(model, ids, **stops)
        after = torch.rand(2, device=model.device)
    assert len({row.index(0) if 0 in row else len(row) for row in wanted}) > 1
    with attnplug.applied(model, exact(SHORT, 5)):
        assert call(model, ids, **stops)[0] == wanted
        assert torch.equal(torch.rand(2, device=model.device), after)


@pytest.mark.parametrize(("draft", "m"), [(FAR, 5), (GVR, 5), (FAR, "auto")])
def test_holes_are_closed_where_the_cache_has_no_more_slots(model, draft, m, monkeypatch):
    """Each round takes six slots, or fewer, of a cache that has room for the tokens and a round."""
    closed, close = [], rounds.close_holes
    note = lambda *a: closed.append(a[2:]) or close(*a)  # noqa: E731
    monkeypatch.setattr(rounds, "close_holes", note)
    ids, more = rows_of("padded rows", model)
    with attnplug.applied(model, "dense"):
        wanted, _ = call(model, ids, new=60, **more)
    with attnplug.applied(model, exact(draft, m)):
        assert call(model, ids, new=60, **more)[0] == wanted
    assert len(closed) > 1
    for begin, end, keep in closed:
        assert begin == 150 and 0 < keep < 60 and end > begin + keep


def test_many_draws_back_a_row_still_has_its_own(model, monkeypatch):
    """A row that falls behind the others draws again what they had."""
    monkeypatch.setattr(noise, "KEPT", 1)
    test_rows_get_denses_tokens_each_at_its_own_pace(model, "rows", SHORT, 4, SAMPLED, monkeypatch)


@pytest.mark.parametrize("what", ROWS)
def test_a_cache_of_rows_that_is_seen_again_has_no_holes(model, what):
    ids, options = rows_of(what, model)
    options["return_dict_in_generate"] = True
    with attnplug.applied(model, "dense"):
        wanted, stock = call(model, ids, **options)
    with attnplug.applied(model, exact(FAR, 5)):
        found, out = call(model, ids, **options)
        assert found == wanted and tally(model).rounds == 0
        last = attnplug.report(model).last
    assert all("rounds leave holes in it" in each.decode for each in last)
    for a, b in zip(out.past_key_values.layers, stock.past_key_values.layers, strict=True):
        tokens = ids.shape[1] + NEW - 1
        assert torch.allclose(a.keys[:, :, :tokens], b.keys[:, :, :tokens], atol=1e-4)


@pytest.fixture
def hybrid(device):
    return windowed(device)


@pytest.mark.parametrize(
    ("what", "m", "options"),
    [*((what, 5, {}) for what in ("one row", *ROWS)), (ROWS[0], 5, SAMPLED), (ROWS[1], "auto", {})],
    ids=str,
)
def test_windows_take_in_what_is_accepted(hybrid, what, m, options):
    ids, more = (ids_of(), {}) if what == "one row" else rows_of(what, hybrid)
    with attnplug.applied(hybrid, "dense"):
        wanted, _ = call(hybrid, ids, new=45, **more, **options)
        after = torch.rand(3, device=hybrid.device)
    with attnplug.applied(hybrid, exact(SHORT, m)):
        for _ in range(2):
            assert call(hybrid, ids, new=45, **more, **options)[0] == wanted
            assert torch.equal(torch.rand(3, device=hybrid.device), after)
        assert 0 < tally(hybrid).accepted < tally(hybrid).drafted
        last = attnplug.report(hybrid).last
        assert {each.decode for each in last[1::2]} == {"exact"}
        assert all("sliding" in each.prefill for each in last[::2])


def test_windows_that_are_kept_or_not_full_have_no_rounds(hybrid):
    for why, ids, options in (
        ("a sliding window takes no token back", ids_of(), dict(return_dict_in_generate=True)),
        ("the prompt does not fill a sliding window", ids_of(20), {}),
    ):
        with attnplug.applied(hybrid, "dense"):
            wanted, _ = call(hybrid, ids, **options)
        with attnplug.applied(hybrid, exact(FAR, 5)):
            assert call(hybrid, ids, **options)[0] == wanted and tally(hybrid).rounds == 0
            assert all(why in each.decode for each in attnplug.report(hybrid).last[1::2])


@pytest.mark.parametrize("what", ["model", "hybrid"])
@pytest.mark.parametrize("compile_mode", [None, "default"])
def test_compiled_steps_draft_too(model, hybrid, what, compile_mode):
    from transformers import CompileConfig

    model, options = hybrid if what == "hybrid" else model, {}
    if compile_mode:
        options["compile_config"] = CompileConfig(mode=compile_mode)
        options["compile_config"]._compile_all_devices = True
    with attnplug.applied(model, "dense"):
        wanted, _ = call(model)
    with attnplug.applied(model, exact(SHORT, 3)):
        assert call(model, **options)[0] == wanted
        assert call(model, **options)[0] == wanted
        assert tally(model).rounds > 0
