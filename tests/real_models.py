"""The small real models that tests read text with."""

import os

import pytest

from attnplug.errors import WeightsUnavailableError
from attnplug.models.pretrained import load


def real_model(name):
    """A model on the CPU, and its tokenizer. Where its weights are not to be had, on a machine
    without a network, the test skips; with ATTNPLUG_REQUIRE_WEIGHTS=1, as in .ci/run, it fails."""
    try:
        return load(name, device="cpu")
    except WeightsUnavailableError as error:
        if os.environ.get("ATTNPLUG_REQUIRE_WEIGHTS") == "1":
            raise
        pytest.skip(str(error))
