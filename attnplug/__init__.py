"""attnplug: pluggable attention ops for PyTorch compile.

    model = attnplug.apply(model, policy="momo")

Long-context inference on a Hugging Face model as it is: training-free policies over ops that
torch.compile sees as single nodes.
"""

import importlib
from typing import Any

from attnplug.api import LayerReport, Report, applied, apply, make_cache, remove, report
from attnplug.errors import (
    AlreadyAppliedError,
    ArgumentError,
    AttnplugError,
    GradientError,
    HostMemoryError,
    NotAppliedError,
    PolicyError,
    UnsupportedCallError,
    UnsupportedModelError,
    WeightsUnavailableError,
)
from attnplug.policies import Certified, Dense, Gather, Gvr, Momo, Policy, Stream

__version__ = "0.1.0"

__all__ = [
    "AlreadyAppliedError",
    "ArgumentError",
    "AttnplugError",
    "Certified",
    "Dense",
    "Gather",
    "GradientError",
    "Gvr",
    "HostMemoryError",
    "LayerReport",
    "Momo",
    "NotAppliedError",
    "Policy",
    "PolicyError",
    "Report",
    "Stream",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "WeightsUnavailableError",
    "applied",
    "apply",
    "make_cache",
    "remove",
    "report",
]


def __getattr__(name: str) -> Any:
    """`attnplug.trace`, imported when it is first asked for: pyarrow takes its time."""
    if name == "trace":
        return importlib.import_module("attnplug.trace")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
