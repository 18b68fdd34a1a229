"""bench/report.py: JSON rows to pages and plots."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from attnplug.cli.options import read_length
from attnplug.policies import methods, parse

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("report")
    for name in (
        "report",
        "stale",
        "_plots",
        "_calls",
        "_choice",
        "_served",
        "_tables",
        "_story_plots",
        "_frontier_plot",
        "_results",
    ):
        sys.modules.pop(name, None)


def timing(n, p50=10.0, **changes):
    row = dict(
        op="dense_decode", case="op", n=n, batch=1, heads_q=28, heads_kv=4, head_dim=128,
        dtype="bfloat16", options="", p20_us=0.9 * p50, p50_us=p50, p80_us=1.2 * p50, peer="cudnn",
        peer_p50_us=15.0, ratio=15.0 / p50, bytes=1, flops=1, ceiling_fraction=0.8134, gpu="H200",
        torch="2.11", triton="3.6", commit="abc", date="2026-01-02",
    )  # fmt: skip
    return row | changes


QUALITY = dict(
    task="needle", model="smollm2", n=4096, trials=20, dense=0.95, policy="momo(gamma=16)",
    value=0.9, low=0.7, high=0.98,
)  # fmt: skip


@pytest.fixture
def tree(tmp_path):
    """A project: results of two runs, a README and a page with markers."""
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)

    def write(name, rows):
        benches = [{"name": "test", "extra_info": row, "stats": {}} for row in rows]
        (results / name).write_text(json.dumps({"benchmarks": [*benches, {"extra_info": {}}]}))

    write("a.json", [timing(8192, 99.0), timing(131072, 12.0), timing(8192, 20.0, batch=8)])
    write("b.json", [timing(8192, 7.5, date="2026-01-03", commit="def")])
    momo = dict(op="momo", peer=None, peer_p50_us=None, ratio=None, options="k=8, gamma=16")
    write("c.json", [timing(1 << 20, 4e6, **momo)])
    (results / "quality.json").write_text(json.dumps({"rows": [QUALITY]}))
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        "Before.\n<!-- results op=dense_decode heads=28/4 batch=1 -->\n"
        "old\n<!-- /results -->\nAfter.\n"
    )
    (tmp_path / "docs" / "momo.md").write_text("<!-- results task=* -->\n<!-- /results -->\n")
    return tmp_path


def run(report, tree, *more):
    where = ["--root", str(tree), "--results", str(tree / "bench" / "results")]
    return report.main([*where, *more])


def test_the_results_page_holds_every_row_once(report, tree):
    assert run(report, tree) == 0
    page = (tree / "docs" / "reference" / "results.md").read_text()
    line = "| 8K | **2.00x** | 7.5 us (6.75 to 9) | cuDNN SDPA | 15 us | 1 | 81% | [1](#runs) |"
    assert f"\n{line}\n" in page
    assert "\nSetting: 28/4 heads, D 128, bfloat16, H200.\n" in page  # and not one by one
    assert "| 8K | 0.75x | 20 us (18 to 24) | cuDNN SDPA | 15 us | 8 | 81% | [2](#runs) |" in page
    assert "99" not in page  # the older answer to the same question
    assert "\nSetting: k=8, gamma=16, batch 1, 28/4 heads, D 128, bfloat16, H200.\n" in page
    assert "| 1M | 4 s (3.6 to 4.8) | 81% | [2](#runs) |" in page
    assert "| 1 | H200 | 2.11 | 3.6 | def | 2026-01-03 |" in page
    assert "\nSetting: 20 trials, `momo(gamma=16)`.\n" in page
    assert "| needle | 4K | 0.9 (0.7 to 0.98) | 0.95 |" in page
    assert page.index("## dense_decode") < page.index("## momo") < page.index("## Quality, smollm2")


def test_of_one_day_the_later_run_stands(report, tree):
    results = tree / "bench" / "results"
    for name, moment, p50 in (
        ("x", "2026-01-03T10:00:00", 30.0),
        ("y", "2026-01-03T09:00:00", 31.0),
    ):
        rows = [{"extra_info": timing(8192, p50, date="2026-01-03")}]
        (results / f"{name}.json").write_text(json.dumps({"benchmarks": rows, "datetime": moment}))
    run(report, tree)
    page = (tree / "docs" / "reference" / "results.md").read_text()
    assert "| 30 us (" in page and "| 31 us (" not in page and "| 7.5 us (" not in page


def test_plots_are_drawn_where_there_is_a_line_to_draw(report, tree):
    run(report, tree)
    images = sorted(path.name for path in (tree / "docs" / "img").iterdir())
    assert images == ["dense_decode.png", "quality-smollm2.png"]
    page = (tree / "docs" / "reference" / "results.md").read_text()
    assert all(f"](../img/{name})" in page for name in images) and "img/momo.png" not in page


def test_markers_are_filled_by_their_filters_and_nothing_else_moves(report, tree):
    run(report, tree)
    text = (tree / "README.md").read_text()
    assert text.startswith(
        "Before.\n<!-- results op=dense_decode heads=28/4 batch=1 -->\n\nSetting: `dense_"
    )
    assert text.endswith("|\n\n<!-- /results -->\nAfter.\n") and "old" not in text
    assert text.count("`dense_decode`") == 1 and "momo" not in text
    assert "dtype" not in text and text.count("bfloat16") == 1  # all rows share it
    assert "| needle | 4K |" in (tree / "docs" / "momo.md").read_text()


def test_a_table_may_join_filters_and_name_its_columns(report, tree):
    (tree / "README.md").write_text(
        "<!-- results columns=tokens,ratio op=momo options=k=8;* | batch=8 -->\n<!-- /results -->"
    )
    run(report, tree)
    lines = (tree / "README.md").read_text().splitlines()
    assert lines[2] == "| tokens | ratio |" and len(lines) == 8
    assert lines[4].startswith("| 1M |") and lines[5].startswith("| 8K |")
    with pytest.raises(SystemExit, match="a term has no rows"):
        text = "<!-- results op=dense_decode | op=momo -->\n<!-- /results -->"
        report.fill_markers(text, [timing(1)], [])
    with pytest.raises(SystemExit, match="no column speed"):
        report.fill_markers("<!-- results columns=speed -->\n<!-- /results -->", [timing(1)], [])


def test_a_table_may_have_a_picture_where_it_has_rows(report, tree):
    text = "<!-- scores {} image=img/some-picture.png -->\n<!-- /scores -->\n"
    rows = [QUALITY | {"study": ""}]
    shown = report.fill_markers(text.format("task=needle"), [], rows)
    assert "\n![some-picture](img/some-picture.png)\n\n| task |" in shown
    none = report.fill_markers(text.format("task=kl"), [], rows)
    assert "![" not in none and "Not measured yet." in none


def test_numbers_of_the_first_page_are_rows_in_large(report):
    call = timing(131072, case="generate", policy="sketch", op="sketch", peer="dense")
    text = "<!-- numbers case=generate -->\nold\n<!-- /numbers -->"
    shown = report.fill_markers(text, [call, timing(8192)], [])
    number = "<strong>1.50x</strong> speed-up of a new token in <code>generate</code> at 128K "
    assert (
        number + "tokens, by <code>sketch</code> beside dense, Qwen2.5-7B on an H200</div>" in shown
    )
    assert shown.count("<strong>") == 1 and "old" not in shown


def test_scores_have_a_line_a_policy_and_a_column_a_length(report, tree):
    rows = [
        QUALITY,
        QUALITY
        | dict(n=8192, value=0.5, low=0.4, high=0.6, diff=-1e-18, diff_low=-0.1, diff_high=0),
        QUALITY | dict(policy="stock", value=0.95, low=0.9, high=1.0),
    ]
    (tree / "bench" / "results" / "quality.json").write_text(json.dumps({"rows": rows}))
    page = tree / "docs" / "momo.md"
    page.write_text(
        "<!-- scores policy=* -->\n<!-- /scores -->\n"
        "<!-- scores n=8192 show=diff -->\n<!-- /scores -->"
    )
    run(report, tree)
    text = page.read_text()
    assert "| task | policy | 4K | 8K |" in text  # one model: no column for it
    assert "| needle | `momo(gamma=16)` | 0.9 (0.7 to 0.98) | 0.5 (0.4 to 0.6) |" in text
    assert "| needle | `stock` | 0.95 (0.9 to 1) |  |" in text
    assert "| needle | 0 (-0.1 to 0) |" in text


def test_a_table_of_scores_says_over_how_many_samples_a_cell_is(report):
    rows = [
        QUALITY | dict(policy="stock"),
        QUALITY,
        QUALITY | dict(n=8192, trials=8),
        QUALITY | dict(n=8192, trials=8, policy="stock"),
    ]
    text = report.scores(rows, "value", "n")
    assert text.endswith("\n\nSamples a cell: 20; 8 in `8K`.") and "samples |" not in text
    rows.append(QUALITY | dict(policy="gvr", trials=3))
    text = report.scores(rows, "value", "n")
    assert text.endswith("Samples a cell, unless it names another number: 20; 8 in `8K`.")
    assert "| `gvr` | 0.9 (0.7 to 0.98), 3 samples |  |" in text and text.count("samples |") == 1


def test_a_cell_of_scores_holds_one_row(report):
    with pytest.raises(SystemExit, match="two rows for needle of momo"):
        report.scores([QUALITY, QUALITY | dict(trials=9)], "value", "n")


def test_the_table_of_the_scratch_cache_is_its_files(report, tree):
    row = dict(block=16, scratch=64, scratch_share=2.5, items_a_step=8.06, hit_rate=0.5)
    folder = tree / "bench" / "results" / "certified"
    folder.mkdir()
    (folder / "scratch.json").write_text(json.dumps([row | {"link_bytes_a_step": 3 << 19}]))
    (tree / "docs" / "momo.md").write_text("<!-- scratch -->\n<!-- /scratch -->\n")
    run(report, tree)
    line = "| 16 | 64 | 1.00 | 8.1 | 0.500 | 1.50 |"
    assert line in (tree / "docs" / "momo.md").read_text()


def test_the_table_of_bounds_is_its_files(report, tree):
    spread = dict(p5=0.001, p50=0.0123, p95=0.2, max=3.0)
    keys = ("E_key", "E_val", "E_round", "bound_over_output", "error_over_output")
    row = dict(policy="certified", head_steps=90, violated=0, recomputed=0.25)
    folder = tree / "bench" / "results" / "certified"
    folder.mkdir()
    rows = [row | dict.fromkeys(keys, spread), {"policy": "a row without bounds"}]
    (folder / "fidelity.json").write_text(json.dumps(rows))
    (tree / "docs" / "momo.md").write_text("<!-- bounds -->\n<!-- /bounds -->\n")
    run(report, tree)
    text = (tree / "docs" / "momo.md").read_text()
    assert "| `certified` | 0.001, 0.012, 0.2, 3 |" in text and "| 0.25 | 0 of 90 |" in text
    assert "without bounds" not in text and "bound / output" in text


def test_the_output_is_a_function_of_the_input(report, tree):
    def everything():
        return {p: p.read_bytes() for p in sorted(tree.rglob("*")) if p.is_file()}

    run(report, tree)
    first = everything()
    run(report, tree)
    assert everything() == first


def test_check_sees_a_stale_page_and_writes_nothing(report, tree, capsys):
    assert run(report, tree, "--check") == 1
    assert (
        not (tree / "docs" / "reference" / "results.md").exists()
        and not (tree / "docs" / "img").exists()
    )
    run(report, tree)
    capsys.readouterr()
    assert run(report, tree, "--check") == 0 and capsys.readouterr().out == ""
    page = tree / "docs" / "reference" / "results.md"
    page.write_text(page.read_text().replace("2.00x", "9.00x"))
    assert run(report, tree, "--check") == 1
    assert "stale docs/reference/results.md" in capsys.readouterr().out


def test_the_committed_pages_are_what_the_results_say(report, capsys):
    assert report.main(["--check"]) == 0, capsys.readouterr().out


def test_no_results_is_said(report, tmp_path):
    (tmp_path / "README.md").write_text("<!-- results op=momo -->\n<!-- /results -->\n")
    assert run(report, tmp_path) == 0
    assert (
        "Nothing has been measured yet."
        in (tmp_path / "docs" / "reference" / "results.md").read_text()
    )
    assert "Not measured yet." in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("marker", "message"),
    [("dense_decode", "'dense_decode' is not key=value"), ("color=red", "rows have no color")],
)
def test_a_wrong_filter_is_refused(report, tree, marker, message):
    (tree / "README.md").write_text(f"<!-- results {marker} -->\n<!-- /results -->\n")
    with pytest.raises(SystemExit, match=message):
        run(report, tree)


def test_a_foreign_json_is_refused(report, tree):
    (tree / "bench" / "results" / "x.json").write_text("[1]")
    with pytest.raises(SystemExit, match=r"x\.json: neither"):
        run(report, tree)


def test_numbers_read_well(report):
    plots = sys.modules["_plots"]
    assert [plots.tokens(n) for n in (1000, 1024, 8192, 131072, 1 << 20)] == [
        "1,000", "1K", "8K", "128K", "1M",
    ]  # fmt: skip
    assert [plots.duration(us) for us in (7.456, 123.4, 1500, 41700, 2.5e6)] == [
        "7.46 us", "123 us", "1.5 ms", "41.7 ms", "2.5 s",
    ]  # fmt: skip


def test_a_policy_goes_by_its_string_without_a_crossover(report):
    bare = sys.modules["_plots"].bare
    assert [bare(text) for text in ("gvr(min_tokens=0)", "a(k=8, min_tokens=0)", "dense")] == [
        "gvr", "a(k=8)", "dense",
    ]  # fmt: skip
    assert bare("a(min_tokens=0, kv='host')") == "a(kv='host')"
    assert bare("momo(min_tokens=0)+a(k=8, min_tokens=0, b=1)") == "momo+a(k=8, b=1)"
    assert bare("a(min_tokens=00)") == "a(min_tokens=00)"
    assert report.filters("policy=a(k=8;min_tokens=0;b=1)") == {"policy": ["a(k=8;b=1)"]}


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("gvr(k=2048, min_tokens=0)", "gvr"),
        ("gather(min_tokens=8192)", None),
        ("gather(scoring='band', k=8)", "gather(k=8)"),
        ("momo(top_k=64, gamma=8, min_tokens=0)+gather(min_tokens=0)",
         "momo(gamma=8, top_k=64)+gather"),
        ("momo+stream(top_k=32)", "momo+stream"),
        ("random_blocks(top_k=64)", None),
        ("stock", None),
    ],
)  # fmt: skip
def test_rows_spell_a_policy_in_one_way(report, asked, name):
    row_policy = importlib.import_module("_results").row_policy
    assert row_policy(asked) == (name or asked) == row_policy(name or asked)


def test_a_row_above_its_ceiling_fails(report, tree, capsys):
    rows = [timing(8192, ceiling_fraction=1.09), timing(4096, 4.0, ceiling_fraction=1.0)]
    path = tree / "bench" / "results" / "z.json"

    def write():
        path.write_text(json.dumps({"datetime": "2027", "rows": rows}))

    write()
    assert run(report, tree, "--check") == run(report, tree) == 1
    assert "above its ceiling: dense_decode op  n=8192: 109.0%" in capsys.readouterr().out
    page = tree / "docs" / "reference" / "results.md"
    for share, shown in ((None, "|  |"), (0.99, "| 99% |")):
        rows[0]["ceiling_fraction"] = share
        write()
        assert run(report, tree) == run(report, tree, "--check") == 0
        assert shown in page.read_text() and "| 100% |" in page.read_text()


def step(policy, n, ratio, memory, **changes):
    row = timing(n, op=policy, case="step", peer="dense", ratio=ratio, policy=policy, memory=memory)
    return row | changes


BOUND = "certified(tolerance=None, explore=0.0)"


def choice_rows():
    timings = [
        step(policy, n, ratio, memory * n)
        for policy, memory, ratio in (("dense", 8, None), ("gather", 10, 1.5))
        for n in (32768, 131072)
    ]
    # neither another batch, nor another peer, is what the table speaks of
    others = [dict(batch=8), dict(peer="cudnn")]
    timings += [step("gather", 1 << 20, 9.0, 1, **other) for other in others]
    timings.insert(0, step("gather", 131072, 9.0, 1, batch=8))
    timings.append(step("certified", 131072, 0.5, 1))
    shape = dict(op="momo", policy="momo", heads_q=32, heads_kv=8, ratio=4.0)
    timings += [timing(131072, **shape), timing(131072, **shape | dict(ratio=3.0, peer="fa3"))]
    timings.append(timing(32768, **shape | dict(ratio=1.5)))
    return timings


def written(policy, task, value, dense, served, **changes):
    row = dict(study="as-written", model="gemma3-270m@64k", n=65536, trials=50, served=served)
    row |= dict(policy=policy, task=task, value=value, dense=dense, diff_low=-0.2, diff_high=0.1)
    return QUALITY | row | changes


SPARSE = {"prefill": "sdpa in 15 of 18 layers, dense in 3 of 18 layers"}
SPARSE["decode"] = SPARSE["prefill"].replace("dense", "gather")


def whole(policy, n, ratio, **changes):
    row = timing(n, op="any", case="call", peer="dense", ratio=ratio, policy=policy)
    return row | {"options": "128 new tokens"} | changes


def test_which_method_when_is_made_of_one_string_each(report):
    timings = choice_rows()
    # neither another batch, nor another peer, nor another answer is what the table speaks of
    others = [dict(batch=8), dict(peer="stock"), dict(options="1 new token")]
    timings += [whole("gather", 131072, 9.0, **other) for other in others]
    timings += [whole("gather", 131072, 1.5), whole("momo+gather", 131072, 0.98)]
    dense = SPARSE | {"decode": SPARSE["prefill"]}
    long = dict(task="long-decode-perplexity", low=14.7, high=14.9)
    scores = [
        written("gather", "multi-key", 0.5, 0.6, SPARSE),
        written("gather", "needle-prose", 0.3, 0.6, SPARSE, diff_high=-0.02),
        written("gather", "needle-prose", 0.1, 0.6, SPARSE, trials=20),
        written("gather", "needle-noise", 0.1, 0.1, SPARSE),  # beyond the model: no claim
        written("gather", "long-decode-perplexity", 14.8, 14.72, SPARSE) | long,
        written("gvr", "multi-key", 0.6, 0.6, dense),
        written("gvr(min_tokens=0)", "multi-key", 0.2, 0.6, SPARSE),
    ]
    text = "<!-- choice pages=there -->\nold\n<!-- /choice -->"
    shown = report.fill_markers(text, timings, scores)
    kept = "0.400 beside 0.600; 1 of 2 tasks worse (needle-prose -0.20 to -0.02); 50 prompts"
    kept += "; perplexity 14.80 (14.70 to 14.90) beside 14.72"
    gather = "| [`gather`](there/gather.md) | caches of 65,536 | not yet"
    assert f"{gather} | {kept} | not yet | runs dense | not yet | **1.50x** | 125% |" in shown
    both = "[`momo`](there/momo.md)+[`gather`](there/gather.md) | prompts of 16,384, caches of 65,"
    assert both in shown and "not yet | 0.98x | 125% |" in shown and "old" not in shown
    assert "| [`gvr`](there/gvr.md) | caches of 163,840 | not yet | runs dense | not yet" in shown
    # the string that a user writes to be served
    certified = "| [`certified(min_tokens=0)`](there/certified.md) | any length | not yet"
    assert certified in shown


def test_a_table_says_who_served_and_what_the_model_cannot_do(report):
    rows = [
        written("stock", "needle-noise", 0.1, 0.1, {}),
        written("gather", "needle-noise", 0.3, 0.1, SPARSE),
        written("gather", "multi-key", 0.5, 0.6, SPARSE),
        written("gather", "perplexity", 9.0, 9.0, {"prefill": SPARSE["prefill"]}),  # has no steps
        written("gvr", "multi-key", 0.6, 0.6, {"prefill": "momo", "decode": "momo"}),
    ]
    text = "<!-- scores study=as-written across=task{} -->\n<!-- /scores -->"
    shown = report.fill_markers(text.format(" floor=yes"), [], rows)
    assert "| `stock` |  |  | 0.1 (0.7 to 0.98) |  |" in shown
    assert "| `gather` | dense, then gather | 0.5 (0.7 to 0.98) | beyond the model | 9" in shown
    assert "| `gvr` | momo | 0.6 (0.7 to 0.98) |  |  |" in shown
    assert "Beyond the model: its own attention (`stock`) scores below 0.2." in shown
    assert "eyond" not in report.fill_markers(text.format(""), [], rows)


def test_the_story_is_drawn_of_what_there_is(report):
    plots = sys.modules["_story_plots"]
    timings = choice_rows()
    timings.append(step("gather", 1 << 19, 3.0, 10 << 19))
    timings.append(step("dense", 1 << 19, None, 8 << 19))
    momo = dict(task="captured-mass", model="gemma3-270m", n=32768, policy="momo", value=0.9)
    figures = plots.draw_story(timings, [QUALITY | momo])
    assert list(figures) == [plots.QUALITY, plots.SPEED, plots.MEMORY]
    (axes,) = figures[plots.QUALITY].axes
    drawn = [line.get_xydata().tolist() for line in axes.lines]
    assert [[1.5, 0.9]] in drawn and len(drawn) == 3  # and dense's cross-hair
    (axes,) = figures[plots.MEMORY].axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[1, 1, 1], [1.25, 1.25, 1.25]]
    text = "<!-- story images=img -->\n<!-- /story -->"
    shown = report.fill_markers(text, timings, [QUALITY | momo])
    assert shown.count("![") == 3 and "(img/story-memory.png)" in shown
    assert report.fill_markers(text, [timings[0]], []).count("Not measured yet.") == 1


def test_no_plot_of_speed_shows_a_length_where_the_default_runs_dense(report, tree):
    plots = sys.modules["_story_plots"]
    lengths = [1 << power for power in (15, 17, 19)]
    timings = [step(name, n, 2.0, 1) for name in ("gather", "certified") for n in lengths]
    (decode,) = plots.draw_story(timings, [])[plots.SPEED].axes
    drawn = [list(line.get_xdata()) for line in decode.lines if line.get_marker() == "o"]
    assert [x for x in drawn if x] == [lengths[1:]]
    asked = QUALITY | dict(task="agreement", model="gemma3-270m", n=32768, policy="gather")
    assert plots.QUALITY not in plots.draw_story(timings, [asked])
    (tree / "bench" / "results" / "d.json").write_text(json.dumps({"rows": timings}))
    assert run(report, tree) == 0
    images = {path.name for path in (tree / "docs" / "img").iterdir()}
    assert "gather-step.png" in images and "certified-step.png" not in images
    page = (tree / "docs" / "reference" / "results.md").read_text()
    assert "certified-step.png" not in page


def test_the_readme_has_no_row_where_the_default_runs_dense_and_other_pages_mark_it(report, tree):
    timings = [
        step("gather", 32768, 1.4, 1),
        step("gather", 32768, 3.2, 1, batch=8),
        step("gather", 131072, 3.4, 1),
        step("certified", 1 << 20, 0.01, 1),
        step("certified", 1 << 20, 1.5, 1, options="bound") | {"policy": BOUND},
        step("gather", 32768, 1.1, 1, case="vllm-decode") | {"policy": "momo+gather"},
        step("momo", 16384, 1.1, 1, case="vllm-ttft") | {"policy": "momo+gather"},
        step("momo", 8192, 1.01, 1, case="vllm-ttft") | {"policy": "momo+gather"},
    ]
    (tree / "bench" / "results" / "d.json").write_text(json.dumps({"rows": timings}))
    marker = "<!-- results op=gather,certified,momo peer=dense -->\n<!-- /results -->\n"
    for page in (tree / "README.md", tree / "docs" / "momo.md"):
        page.write_text(marker)
    assert run(report, tree) == 0
    told = [line.split(" | ") for line in (tree / "README.md").read_text().splitlines()]
    (titles,) = (line for line in told if line[0] == "| op")
    columns = titles.index("tokens"), titles.index("batch")
    lines = sorted([line[c] for c in columns] for line in told if line[0].startswith("| `"))
    assert lines == [["128K", "1"], ["16K", "1"], ["1M", "1"], ["32K", "8"]]
    page = (tree / "docs" / "momo.md").read_text()
    assert page.count(" (dense by default) | ") == 4
    assert "| `gather` | step | 32K (dense by default) | **1.40x** |" in page
    assert "| 1M (dense by default) | 0.01x |" in page


def test_no_policy_serves_where_a_committed_row_is_slower_than_dense(report):
    """By itself, that is, at the row's length and batch: every policy that was timed. Whole calls
    may be a hundredth slower, which is less than two of them differ by."""
    dense = {"dense", "dense from host", "cudnn", "cudnn by layer", "fa3", "flash", "stock", "vllm"}
    timed, _ = report.load(BENCH / "results")
    beside = [row for row in timed if row.get("policy") not in (None, "dense")]
    beside = [row for row in beside if row["peer"] in dense and row["op"] in methods()]
    served = [row for row in beside if report.is_served(row)]
    assert len(served) > 99 and {row["op"] for row in served} >= {"momo", "gather", "sketch"}
    slower = [row for row in served if row["ratio"] < (0.99 if row["case"] == "call" else 1)]
    assert [(row["op"], row["case"], row["policy"], row["n"]) for row in slower] == []


def test_no_row_of_the_readme_is_of_a_length_where_its_default_runs_dense():
    """By the crossovers themselves, whatever wrote the table."""
    text = (BENCH.parent / "README.md").read_text()
    table = text.partition("<!-- results ")[2].partition("<!-- /results -->")[0]
    lines = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    cuda, told = torch.device("cuda"), 0
    for policy, what, length, *_ in lines:
        parsed = parse(policy.strip("| `"))
        prompt = "first token" in what or "1 new token" in what
        method = parsed.prefill if prompt else parsed.decode
        rows = int(what.split()[0]) if "requests" in what else 1
        if hasattr(method, "crossover"):
            tokens = read_length(length.replace(",", ""))
            assert method.serves(rows, tokens, cuda), (policy, length)
            told += 1
    assert told > 3


def test_the_story_joins_rows_of_one_kind(report):
    plots = sys.modules["_story_plots"]
    timings = [step("gather", n, 1.5, 1) for n in (32768, 131072)]
    other = step("gather", 32768, 2.0, 1) | {"policy": "gather(k=9)"}
    timings += [other, other | dict(policy="gather(k=8)", case="op")]
    assert list(plots.timed_alike(timings, ["gather", "sketch"])) == ["gather", "gather(k=9)"]
    about = dict(task="agreement", model="gemma3-270m", n=32768, policy="gather")
    of_all, of_one = QUALITY | about, QUALITY | about | dict(study="gather", trials=50)
    assert plots._quality([of_one, of_all, of_one], "agreement") == {"gather": of_all}


def test_the_story_tells_rows_of_other_commits_apart(report):
    plots = sys.modules["_story_plots"]
    timings = [step("gather", n, 2.5, 1) for n in (131072, 1 << 20)]
    timings.append(step("gather", 1 << 19, 2.01, 1, commit="old"))
    (axes,) = plots.draw_story(timings, [])[plots.SPEED].axes
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert [line.get_xydata().tolist() for line in hollow] == [[[1 << 19, 2.01]]]


def test_names_stand_apart_and_near(report):
    spread = sys.modules["_story_plots"].spread
    assert spread([0.1, 0.5], [0.1, 0.1]) == pytest.approx([0.1, 0.5])
    assert spread([0.4, 0.42, 0.44], [0.1] * 3) == pytest.approx([0.32, 0.42, 0.52])


def test_a_step_has_one_time_on_a_page(report, tree):
    """Beside the peer that is hardest to beat; what a run counted makes no other step."""
    rows = [
        timing(8192, 10.0, peer="fa3", ratio=1.5, options="k=8, hits 0.301, warm"),
        timing(8192, 11.0, peer="cudnn", ratio=1.4, options="k=8, hits 0.302, warm"),
        timing(8192, 12.0, peer="cudnn", ratio=1.3, options="k=9, warm"),
        timing(8192, 13.0, peer=None, peer_p50_us=None, ratio=None, options="k=10", policy="a"),
    ]
    shown = report.fill_markers("<!-- results op=* -->\n<!-- /results -->", rows, [])
    times = [cell for cell in shown.split("|") if " us (" in cell]
    assert [time.split(" (")[0].strip() for time in times] == ["11 us", "12 us", "13 us"]
    assert "peer's time" not in shown and "| policy |" in shown and "| `a` |" in shown
    # a later run of the step replaces the older, whatever it counted
    (tree / "bench" / "results" / "d.json").write_text(
        json.dumps({"datetime": "2027", "rows": [rows[1] | dict(options="k=8, hits 0.9, warm")]})
    )
    (tree / "bench" / "results" / "c.json").write_text(
        json.dumps({"datetime": "2026", "rows": [rows[1]]})
    )
    found = report.load(tree / "bench" / "results")[0]
    assert [row["options"] for row in found if "k=8" in row["options"]] == ["k=8, hits 0.9, warm"]
