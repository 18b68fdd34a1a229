"""A browser, and the page of a made-up trace."""

import functools

import numpy as np
import pytest
from view_page import HEADS, LAYERS, LOAD_SECONDS, STEPS, TOKENS, launch, no_browser

from attnplug.trace import Layout, Writer, read, synthesize
from attnplug.trace.view import write_page


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before any fixture, and in one place, so that the summary has one line for all the tests."""
    if "browser" in item.fixturenames and not has_browser():
        no_browser()


@functools.cache
def has_browser() -> bool:
    from playwright.sync_api import sync_playwright  # a machine for GPU tests need not have it

    with sync_playwright() as playwright:
        return launch(playwright.chromium) is not None


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = launch(playwright.chromium)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A made-up trace of 32K tokens with a mask beside it, and its page."""
    folder = tmp_path_factory.mktemp("page")
    needle = synthesize(
        folder / "t.parquet", tokens=TOKENS, layers=LAYERS, heads=HEADS, steps=STEPS
    )
    trace = read(folder / "t.parquet")
    thinned(trace, folder / "mask.parquet")
    write_page(trace, folder / "t.html", masks={"momo": folder / "mask.parquet"})
    return trace, folder / "t.html", needle


def thinned(trace, path):
    """A mask that keeps the even key blocks of the trace's edges, in the prefill."""
    with Writer(path, Layout(64, 64, "mass")) as writer:
        writer.begin([0], [TOKENS])
        for layer in trace.layers:
            dense = trace.dense(layer, queries=(0, TOKENS // 64)) > 0
            dense[..., 1::2] = False
            most = dense.sum(-1).max()
            index = np.argsort(~dense, -1, kind="stable")[..., :most].astype(np.int32)
            index[~np.take_along_axis(dense, index, -1)] = -1
            writer.append(layer, index[None], np.ones((1, *index.shape), np.float32))


@pytest.fixture
def open_page(browser):
    """Opens a page and gives it back when its first picture stands. No error may be logged and
    nothing asked of a network."""
    contexts, complaints = [], []

    def open_(path, width=1280, height=800, scheme="light", fragment=""):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda request: asked(request.url))
        page.goto(path.as_uri() + fragment)
        page.wait_for_selector("body[data-ready]", timeout=1000 * LOAD_SECONDS)
        return page

    def asked(url):
        if not url.startswith(("file:", "data:", "blob:")):
            complaints.append(f"asked for {url}")

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []
