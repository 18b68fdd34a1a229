"""attnplug: pluggable attention ops for PyTorch compile.

    model = attnplug.apply(model, policy="momo")

Long-context inference on a Hugging Face model as it is: training-free policies over ops that
torch.compile sees as single nodes.
"""

import importlib
from typing import TYPE_CHECKING, Any

from attnplug.errors import (
    AlreadyAppliedError,
    ArgumentError,
    AttnplugError,
    CardError,
    FileError,
    GradientError,
    HostMemoryError,
    MissingPackageError,
    NotAppliedError,
    PolicyError,
    RankError,
    ServeError,
    TraceFileError,
    UnsupportedCallError,
    UnsupportedModelError,
    WeightsUnavailableError,
)
from attnplug.version import __version__ as __version__

if TYPE_CHECKING:
    from attnplug.api import applied, apply, make_cache, remove, report, warm
    from attnplug.loading import Loading, on_load
    from attnplug.long_prompt import Prefilled, prefill
    from attnplug.policies import (
        Auto,
        Certified,
        Dense,
        Exact,
        Gather,
        Gvr,
        Momo,
        Policy,
        Sketch,
        Stream,
        Trained,
    )
    from attnplug.reports import LayerReport, Report

__all__ = [
    "AlreadyAppliedError",
    "ArgumentError",
    "AttnplugError",
    "Auto",
    "CardError",
    "Certified",
    "Dense",
    "Exact",
    "FileError",
    "Gather",
    "GradientError",
    "Gvr",
    "HostMemoryError",
    "LayerReport",
    "Loading",
    "MissingPackageError",
    "Momo",
    "NotAppliedError",
    "Policy",
    "PolicyError",
    "Prefilled",
    "RankError",
    "Report",
    "ServeError",
    "Sketch",
    "Stream",
    "TraceFileError",
    "Trained",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "WeightsUnavailableError",
    "applied",
    "apply",
    "make_cache",
    "on_load",
    "prefill",
    "remove",
    "report",
    "warm",
]


_API = ("applied", "apply", "make_cache", "remove", "report", "warm")
_HOMES = {
    **dict.fromkeys(_API, "attnplug.api"),
    **dict.fromkeys(("Loading", "on_load"), "attnplug.loading"),
    **dict.fromkeys(("Prefilled", "prefill"), "attnplug.long_prompt"),
    **dict.fromkeys(("LayerReport", "Report"), "attnplug.reports"),
}
_HOME_OF = {  # of what is not here yet: the methods are in policies
    name: _HOMES.get(name, "attnplug.policies") for name in __all__ if name not in globals()
}
_MODULES = ("api", "eval", "models", "ops", "plan", "policies", "telemetry", "testing", "trace")


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is first asked for, so that `import attnplug` and
    `attnplug --help` take no seconds."""
    if name in _MODULES:
        return importlib.import_module(f"attnplug.{name}")
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
        globals()[name] = value  # asked for once
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
