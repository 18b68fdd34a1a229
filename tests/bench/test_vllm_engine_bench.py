"""bench/vllm_engine.py: rows of both engines, and a call that goes on from stock's figures."""

import argparse
import importlib
import json
import os
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
STEP = "vllm-decode 8192 1"


@pytest.fixture
def bench(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("vllm_engine")
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    ran, status = [], []

    def run(engine, tell_of):
        ran.append(engine)
        tell_of(STEP, [4000.0, 4200.0] if engine == module.STOCK else [5000.0])
        return status.pop() if status else 0

    monkeypatch.setattr(module, "run_engine", run)
    return module, ran, status


def options(tmp_path, *, resume: bool, rounds: int = 2) -> argparse.Namespace:
    asked = dict(parts="decode", ttft="", decode="8192x1", load="", memory=0.85, chunk=None)
    return argparse.Namespace(
        shape="tiny", policy="momo+gather", resume=resume, rounds=rounds,
        out=tmp_path / "rows.json", **asked,
    )  # fmt: skip


def test_a_call_that_was_cut_goes_on_from_stocks_figures(bench, tmp_path):
    module, ran, status = bench
    with pytest.raises(SystemExit, match="measure stock first"):
        module.compare(options(tmp_path, resume=True))
    module.compare(options(tmp_path, resume=False))
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (row["peer"], row["peer_p50_us"], row["p50_us"]) == ("vllm", 4100.0, 5000.0)
    (tmp_path / "rows.json").unlink()
    module.compare(options(tmp_path, resume=True))
    assert ran == ["stock", "momo+gather", "momo+gather"]
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["ratio"] == row["ratio"]
    with pytest.raises(SystemExit, match="measure stock again"):  # of something else
        module.compare(options(tmp_path, resume=True, rounds=3))
    kept = tmp_path / "attnplug-tiny" / "stock.json"
    old = kept.stat().st_mtime - module.FRESH - 1
    os.utime(kept, (old, old))
    with pytest.raises(SystemExit, match="minutes old"):
        module.compare(options(tmp_path, resume=True))
    status.append(1)  # a stock engine that fails leaves nothing, not even what was there
    module.compare(options(tmp_path, resume=False))
    assert not kept.exists()
