"""README.md as PyPI is to show it: links into the repository are absolute, and lead to the tag of
the release. All else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def absolute(text: str, repository: str, tag: str) -> str:
    """The text with its relative links made absolute. PyPI shows no picture of a blob."""

    def link(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        return f"{mark}[{label}]({repository}/{'raw' if mark else 'blob'}/{tag}/{target})"

    return LINK.sub(link, text)


if __name__ == "__main__":
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    package = (ROOT / "attnplug/version.py").read_text()
    version = re.search(r'^__version__ = "(.+)"$', package, re.MULTILINE)
    assert version is not None
    readme = (ROOT / "README.md").read_text()
    setup(
        long_description=absolute(readme, urls["Repository"], f"v{version[1]}"),
        long_description_content_type="text/markdown",
    )
