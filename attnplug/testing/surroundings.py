"""What `check_policy` runs a model in: known warnings silenced, and a compiler without a past."""

import contextlib
import logging
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def inductor_may_warn() -> Iterator[None]:
    """Where warnings are errors, these of torch's own compiler would look like broken promises."""
    with warnings.catch_warnings():
        for message in (
            "TensorFloat32 tensor cores",  # advice; the contract wants full float32
            "The CUDA Graph is empty",  # captured to hold a memory pool
            ".*torch.jit.script",  # its own imports
        ):
            warnings.filterwarnings("ignore", message=message)
        yield


@contextlib.contextmanager
def assistant_may_warn() -> Iterator[None]:
    """transformers' assisted decoding calls `generate` in a way that transformers warns of."""
    logger = logging.getLogger("transformers.generation.utils")

    def is_news(record: logging.LogRecord) -> bool:
        return "Passing `generation_config` together" not in record.getMessage()

    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


@contextlib.contextmanager
def fresh_dynamo() -> Iterator[None]:
    """Compile from nothing and leave nothing: other compilations count against one limit."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()
