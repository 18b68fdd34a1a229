import pytest
from real_models import real_model

from attnplug.testing import tiny_model


@pytest.fixture(scope="session")
def smollm2():
    return real_model("smollm2-135m")


@pytest.fixture(scope="session")
def tokenizer(smollm2):
    return smollm2[1]


@pytest.fixture
def tiny(tokenizer):
    """A random model that reads SmolLM2's tokens."""
    return tiny_model(vocab_size=len(tokenizer))
