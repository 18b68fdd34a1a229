"""How long the trace viewer's page takes in headless Chromium, from opening it to a search.

    python bench/trace_view.py [NAME=TRACE.parquet ...] [--repeat 5]

Beside the traces that are named, two made-up ones: 32K tokens, all of whose edges fit in the page,
and a million, of which they do not. Opening is timed from the navigation to a page that answers
keys, an action from the wish to the drawn frame; a search has 150 ms in it in which one may go on
typing. Writes bench/results/trace-view.json, one row a trace and action."""

import argparse
import contextlib
import datetime
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from attnplug.bench.provenance import provenance
from attnplug.trace import Trace, read, synthesize
from attnplug.trace.view import write_page

RESULTS = Path(__file__).parent / "results" / "trace-view.json"
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
MADE_UP = {
    "made up": dict(tokens=32768, layers=30, heads=9, top_k=32, steps=16),
    "made up, large": dict(tokens=1 << 20, layers=8, heads=8, top_k=16),
}
TIMED = """async (action) => {
  const frame = () => new Promise(requestAnimationFrame);
  const value = (id, value) => { const e = document.getElementById(id);
    e.value = value; e.dispatchEvent(new Event(id === "search" ? "input" : "change")); };
  const count = meta.layers.length;
  const started = performance.now();
  if (action === "another layer") value("layer", 1 + Math.floor(Math.random() * (count - 1)));
  if (action === "another head") value("head", 1 + Math.floor(Math.random() * (meta.heads - 1)));
  if (action === "all layers and heads") { value("layer", "all"); value("head", "all"); }
  if (action === "zoom") map.zoom(0.5);
  if (action === "select a block")
    app.selectBlocks(Math.floor(meta.queryBlocks * (0.5 + Math.random() / 2)), 3);
  const results = document.getElementById("results");
  if (action === "search") { results.replaceChildren(); value("search", "the"); }
  do await frame();
  while (map.busy() || app.busy() || (action === "search" && !results.children.length));
  await frame();
  return performance.now() - started;
}"""
ACTIONS = ("another layer", "another head", "zoom", "select a block", "search")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("traces", nargs="*", metavar="NAME=TRACE")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        files = dict(named.split("=", 1) for named in options.traces)
        for name, shape in MADE_UP.items():
            files[name] = os.path.join(folder, f"{name}.parquet")
            synthesize(files[name], **shape)
        for name, file in files.items():
            rows += measure(browser, name, read(file), Path(folder) / "page.html", options.repeat)
            print(*rows[-len(ACTIONS) - 2 :], sep="\n")
    content = {
        "datetime": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "benchmarks": [{"name": "trace_view", "extra_info": row} for row in rows],
    }
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The browser of the PATH, else Playwright's own."""
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


def measure(
    browser: Browser, name: str, trace: Trace, file: Path, repeat: int
) -> list[dict[str, Any]]:
    """The rows of one trace."""
    size = write_page(trace, file)
    times: dict[str, list[float]] = {}
    for _ in range(repeat):
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(file.as_uri())
        page.wait_for_selector("body[data-ready]", timeout=120_000)
        times.setdefault("open", []).append(float(page.get_attribute("body", "data-ready") or 0))
        for action in (*ACTIONS, "all layers and heads"):
            times.setdefault(action, []).append(timed(page, action))
        page.close()
    heads = len(trace.layers) * trace.heads
    case = f"{name}, {heads} heads in {len(trace.layers)} layers, page of {size / 1e6:.1f} MB"
    shape = dict(
        op="trace_view", case=case, n=trace.meta["tokens"][0], batch=1, heads_q=trace.heads,
        heads_kv=trace.meta["kv_heads"] or trace.heads, head_dim="", dtype="",
    )  # fmt: skip
    rest = dict(peer=None, peer_p50_us=None, ratio=None, bytes=size, flops=0, ceiling_fraction=None)
    run = provenance() | {"gpu": f"none: Chromium {browser.version}, {os.cpu_count()} cores"}
    return [
        shape | {"options": action} | percentiles(milliseconds) | rest | run
        for action, milliseconds in times.items()
    ]


def timed(page: Page, action: str) -> float:
    page.wait_for_timeout(400)  # what the action before left to do
    return page.evaluate(TIMED, action)


def percentiles(milliseconds: list[float]) -> dict[str, float]:
    low, *_, high = statistics.quantiles(milliseconds, n=5, method="inclusive")
    middle = statistics.median(milliseconds)
    return {
        name: round(1000 * value, 1)
        for name, value in (("p20_us", low), ("p50_us", middle), ("p80_us", high))
    }


if __name__ == "__main__":
    main()
