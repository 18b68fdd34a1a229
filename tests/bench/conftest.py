"""bench/report.py as a module, and a project for it."""

import importlib
import json
import sys

import pytest
from report_cases import BENCH, QUALITY, timing


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
