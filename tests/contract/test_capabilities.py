"""The README's table of what works is the contract's."""

from capabilities import ROOT, fill


def test_the_readme_is_current():
    readme = (ROOT / "README.md").read_text()
    assert fill(readme) == readme, "run python tests/contract/capabilities.py"
