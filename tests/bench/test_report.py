"""bench/report.py: JSON rows to pages and plots."""

import importlib
import json
import sys

import pytest
from report_cases import QUALITY, run, timing


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
