"""The docs' table of what works is the contract's."""

from capabilities import PAGE, fill


def test_the_page_is_current():
    page = PAGE.read_text()
    assert fill(page) == page, "run python tests/contract/capabilities.py"
