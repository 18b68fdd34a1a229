"""What the tests of the viewer's page share: a browser, waiting for the page, and reading off what
it shows."""

import os
import shutil

import numpy as np
import pytest

TOKENS, STEPS, LAYERS, HEADS = 32768, 4, 3, 4
LOAD_SECONDS = 60  # unmarked: what a shared machine may take; docs/tools/trace-viewer.md has times

# A page of one machine needs no sandbox, and a browser of a test no servers of its maker's.
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NO_BROWSER = "no browser: apt-get install chromium, or playwright install --with-deps chromium"


def launch(chromium):
    """Chromium from the PATH, else the one of `playwright install`; None where there is neither. A
    browser that is there and does not start is an error."""
    from playwright.sync_api import Error

    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        return chromium.launch(executable_path=path, args=FLAGS)
    except Error as error:
        if "Executable doesn't exist" not in error.message:
            raise
    return None


def no_browser():
    """The test skips; it fails where ATTNPLUG_REQUIRE_BROWSER is 1, as in .ci/run."""
    if os.environ.get("ATTNPLUG_REQUIRE_BROWSER") == "1":
        pytest.fail(NO_BROWSER, pytrace=False)
    pytest.skip(NO_BROWSER)


def until(page, condition):
    """Waits for a condition. The page forbids eval, which Playwright's own waiting needs."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never came true: {condition}")


def settled(page):
    """Waits until the map is drawn and the panel shows what was chosen."""
    page.wait_for_timeout(100)
    until(page, "!map.busy() && !app.busy()")


def cells(page, kind="z", place=0):
    """Shown cells as (values, x0, dx, y0, dy)."""
    trace = page.evaluate(
        """(i) => { const t = document.getElementById("map").data[i];
        return {z: t.z.map((row) => [...row].map((v) => isNaN(v) ? null : v)),
                x0: t.x0, dx: t.dx, y0: t.y0, dy: t.dy}; }""",
        place,
    )
    values = np.array([[np.nan if v is None else v for v in row] for row in trace["z"]])
    return values, trace


def shares(trace, layer, head, rows):
    """log10 of the mean share of attention of each block pair, NaN where there is none."""
    dense = trace.dense(layer)[head][: rows[1]][rows[0] :]
    spans = trace.query_blocks()[rows[0] : rows[1]]
    with np.errstate(divide="ignore"):
        mean = np.log10(dense / (spans[:, 1] - spans[:, 0])[:, None])
    return np.where(np.isfinite(mean), mean, np.nan)


def choice(page):
    return page.input_value("#layer"), page.input_value("#head")


def listed(page, name):
    """Blocks of a list of edges, in its order."""
    return [
        int(x)
        for x in page.eval_on_selector_all(f"#{name} button", "l => l.map(b => b.dataset.block)")
    ]


def assert_shows(page, trace, layer, head):
    values, _ = cells(page)
    wanted = shares(trace, layer, head, (0, len(trace.query_blocks())))
    assert values.shape == wanted.shape
    np.testing.assert_allclose(values, wanted, atol=0.0145)  # 3.3 % of rounding
    assert f"ayer {layer}, head {head}" in page.inner_text("#shown")
