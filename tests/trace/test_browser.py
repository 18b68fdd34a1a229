"""A machine without a browser: the viewer's tests skip, and CI's fail."""

import pytest
from view_page import NO_BROWSER, launch, no_browser

# A machine for GPU tests has no playwright, and no test here wants a GPU.
Error = pytest.importorskip("playwright.sync_api").Error


class Absent:
    """A browser type whose launch fails with `message`."""

    def __init__(self, message):
        self.message = message

    def launch(self, **options):
        raise Error(self.message)


def test_a_missing_browser_is_told_from_one_that_does_not_start():
    assert launch(Absent("BrowserType.launch: Executable doesn't exist at /root/chrome")) is None
    with pytest.raises(Error, match="missing dependencies"):
        launch(Absent("Host system is missing dependencies to run browsers."))


def test_without_a_browser_tests_skip_and_say_how_to_get_one(monkeypatch):
    monkeypatch.delenv("ATTNPLUG_REQUIRE_BROWSER", raising=False)
    with pytest.raises(pytest.skip.Exception) as skipped:
        no_browser()
    assert str(skipped.value) == NO_BROWSER
    assert "apt-get install chromium" in NO_BROWSER and "playwright install" in NO_BROWSER
    assert "\n" not in NO_BROWSER


def test_where_a_browser_is_required_its_absence_fails(monkeypatch):
    monkeypatch.setenv("ATTNPLUG_REQUIRE_BROWSER", "1")
    with pytest.raises(pytest.fail.Exception, match="no browser"):
        no_browser()
