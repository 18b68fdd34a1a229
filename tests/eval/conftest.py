import pytest

from attnplug.models.pretrained import load
from attnplug.testing import tiny_model


@pytest.fixture(scope="session")
def smollm2():
    return load("smollm2-135m", device="cpu")


@pytest.fixture(scope="session")
def tokenizer(smollm2):
    return smollm2[1]


@pytest.fixture
def tiny(tokenizer):
    """A random model that reads SmolLM2's tokens."""
    return tiny_model(vocab_size=len(tokenizer))
