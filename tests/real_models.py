"""The small real models that tests read text with."""

import os

import pytest

from attnplug.errors import WeightsUnavailableError
from attnplug.models.pretrained import fetch, load


def real_model(name):
    """A model on the CPU, and its tokenizer."""
    return _or_skip(load, name, device="cpu")


def real_folder(name):
    """The folder of a checkpoint, made if it is missing."""
    return _or_skip(fetch, name)


def _or_skip(get, name, **options):
    """Where weights are not to be had, on a machine without a network, the test skips; with
    ATTNPLUG_REQUIRE_WEIGHTS=1, as in .ci/run, it fails."""
    try:
        return get(name, **options)
    except WeightsUnavailableError as error:
        if os.environ.get("ATTNPLUG_REQUIRE_WEIGHTS") == "1":
            raise
        pytest.skip(str(error))
