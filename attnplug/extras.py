"""Packages that a serving process does without, by the extra of attnplug that installs them."""

import importlib.util

from attnplug.errors import MissingPackageError

# As in pyproject.toml, with what an extra takes from another one written out.
EXTRAS = {
    "demo": ("gguf", "matplotlib"),
    "eval": ("scipy", "matplotlib"),
    "harness": ("lm_eval", "scipy", "matplotlib"),
    "plot": ("matplotlib",),
    "trace": ("pyarrow", "plotly"),
}


def missing(extra: str) -> list[str]:
    """The packages of an extra that are not installed."""
    return [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]


def require(extra: str, purpose: str) -> None:
    """Raise MissingPackageError, which names the extra, where one of its packages is missing.
    `purpose` is what needs them: "attnplug demo"."""
    lacking = missing(extra)
    if lacking:
        raise MissingPackageError(
            f"{purpose} needs {' and '.join(lacking)}; pip install 'attnplug[{extra}]'"
        )
