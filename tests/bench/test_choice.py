"""What bench/report.py says of whole calls: which method when, and where a default runs dense."""

import json
import sys

import pytest
import torch
from report_cases import BENCH, QUALITY, run, timing

from attnplug.cli.options import read_length
from attnplug.policies import methods, parse


def test_numbers_of_the_first_page_are_rows_in_large(report):
    call = timing(131072, case="generate", policy="sketch", op="sketch", peer="dense")
    text = "<!-- numbers case=generate -->\nold\n<!-- /numbers -->"
    shown = report.fill_markers(text, [call, timing(8192)], [])
    number = "<strong>1.50x</strong> speed-up of a new token in <code>generate</code> at 128K "
    assert (
        number + "tokens, by <code>sketch</code> beside dense, Qwen2.5-7B on an H200</div>" in shown
    )
    assert shown.count("<strong>") == 1 and "old" not in shown


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
