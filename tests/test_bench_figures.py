"""bench/figures.py: a figure in README or docs is in a row, or says why it need not be."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TIMING = dict(
    op="momo", case="op", n=131072, batch=1, options="k=8, hits 0.301, link 55.5 GB/s",
    p20_us=42_000.0, p50_us=42_601.0, p80_us=43_000.0, peer_p50_us=184_900.0, ratio=4.34,
    bytes=4.26e10, flops=None, ceiling_fraction=0.676,
)  # fmt: skip
STEP = TIMING | dict(op="gather", case="e2e-decode", p50_us=5_000.0, ratio=1.2)
QUALITY = dict(
    task="needle-prose", model="gemma3-270m", n=32768, trials=20, dense=0.9, policy="momo(top_k=8)",
    value=0.75, low=0.53, high=0.89, diff=-0.15, dense_only=3, policy_only=0,
)  # fmt: skip
KL = QUALITY | dict(task="kl", value=0.00153, dense=0.0, trials=10)


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    yield importlib.import_module("figures")
    sys.modules.pop("figures", None)


@pytest.fixture
def told(figures, tmp_path, capsys):
    """What the program says of a README with this text."""
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    (results / "rows.json").write_text(json.dumps({"rows": [TIMING, STEP, QUALITY, KL]}))

    def check(text, page="README.md"):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text(text)
        status = figures.main(["--root", str(tmp_path)])
        out = capsys.readouterr().out
        assert status == bool(out)
        return out

    return check


TRUE = (
    "momo is 4.3x as fast",
    "momo is 4.34 times\n  faster at 128K",
    "At 131,072 tokens momo takes 42.6 ms",
    "momo takes 0.0426 seconds",
    "momo reaches 68% of the ceiling",
    "momo reads at 1.0 TB/s",
    "momo finds 30% hits",
    "gather writes 200 tokens per second",
    "momo answers 75% of needle-prose",
    "momo finds the needle in 15 answers of 20 on Gemma",
    "momo loses 3 needles of 20",
    "momo's KL is 0.0015",
    "momo loses 0.002 nats",
    "momo answers needle-prose with 0.75, for 0.90",
    "momo has 20 prompt events",
    "of 18 needles that dense finds momo loses 3 of 18",
    "Gemma's mask loses 0.15 of them to momo",
)
INVENTED = (
    "momo is 4.4x as fast",
    "momo is 4.34x as fast at 32K",
    "gather is 4.34x as fast",
    "It is 4.34x as fast",
    "momo is seven times faster",
    "momo takes 41.6 ms",
    "momo takes 42.6 us",
    "momo reaches 69% of the ceiling",
    "momo reaches 68%",
    "momo reads at 2.0 TB/s",
    "gather writes 210 tokens/s",
    "momo answers 74% of needle-prose",
    "momo answers 75% of needle-prose on SmolLM2",
    "momo keeps all but\nhalf a percent of needle-prose",
    "momo finds the needle in 14 answers of 20 on Gemma",
    "momo's `kl` is 0.0016",
    "momo loses 0.003 nats",
    "momo keeps 0.777 of the best mask",
    "momo answers needle-prose with 0.74, for 0.90",
    "momo answers needle-prose with 0.75, for 0.91",
    "momo loses 9 of 30 needles",
    "momo has 19 prompt events",
    "momo loses 3 of 19.",
    "momo's KL at 32K is 0.0999, where others have 0.0015",
    "momo comes to 13.99, and dense to 13.09",
    "Output:\n\n```text\nmomo took 41 ms\n```",
    "- momo takes 42.6 ms\n- gather is 4.3x as fast",
)


@pytest.mark.parametrize("text", TRUE)
def test_a_figure_of_a_row_passes(told, text):
    assert told(f"Words.\n\n{text}.\n") == ""


@pytest.mark.parametrize("text", INVENTED)
def test_an_invented_figure_fails(told, text):
    assert "is in no row" in told(f"Words.\n\n{text}.\n")


def test_a_page_of_a_method_speaks_of_it(told):
    assert told("It is 4.3x as fast.", "docs/methods/momo.md") == ""
    assert "momo.md:1: '4.4x'" in told("It is 4.4x as fast.", "docs/methods/momo.md")


@pytest.mark.parametrize(
    "text",
    [
        "2 Hq T^2 D",
        "128K",
        "8 heads",
        "`4.4x`",
        "four times the keep set",
        "as fast",
        "Python 3.11 to 3.12",
        "torch 2.11",
        "confidence 0.95",
        "arXiv 2505.11254",
    ],
)
def test_what_is_no_figure_passes(told, text):
    assert told(f"momo has {text}.") == ""


def test_tables_are_generated_or_quoted(told):
    table = "| k | share |\n| --- | --- |\n| 8 | 0.25 |\n"
    assert "README.md:3: a table typed by hand" in told(table)
    assert told("| k | `0.25` |\n| 8 | Version 1.0 of a thing |\n") == ""
    assert told(f"<!-- results op=momo -->\n{table}<!-- /results -->") == ""
    assert told(f"<!-- quoted the paper's -->\n\n{table}\n<!-- /quoted -->") == ""


def test_a_quotation_has_a_reason_and_a_figure(told, figures, tmp_path, capsys):
    assert told("<!-- quoted by the paper -->momo is 9x as fast<!-- /quoted -->.") == ""
    assert figures.main(["--root", str(tmp_path), "--quoted"]) == 0
    assert capsys.readouterr().out == "README.md:1: by the paper\n"
    assert "no reason" in told("<!-- quoted -->momo is 9x as fast<!-- /quoted -->.")
    assert "no figure" in told("<!-- quoted by the paper -->momo is fast<!-- /quoted -->.")
    assert "9x" in told("<!-- quoted why -->momo is 8x as fast<!-- /quoted -->, or 9x as fast.")


def test_the_log_is_free(told):
    assert told("It was 4.4x as fast.", "docs/log/momo.md") == ""


def test_every_figure_of_ours_is_in_a_row(figures, capsys):
    assert figures.main([]) == 0, capsys.readouterr().out
    assert len(figures.pages(ROOT)) > 20 and len(list(figures.load(ROOT / "bench/results"))) > 1000


@pytest.mark.parametrize(
    "page", ["README.md", "docs/methods/momo.md", "docs/reference/measured.md"]
)
def test_a_figure_invented_for_a_page_of_ours_fails(figures, page):
    rows = list(figures.load(ROOT / "bench" / "results"))
    text = (ROOT / page).read_text()
    for sentence, fails in (
        ("At 128K momo is 7.7x as fast.", True),
        ("At 128K momo is 4.3x as fast.", False),
    ):
        told = list(figures.problems(ROOT / page, f"{text}\n\n{sentence}\n", rows))
        assert len(told) == fails, told
