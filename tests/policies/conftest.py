"""Fixtures of the policies' tests."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def byte_tokenizer():
    """A tokenizer of text for `tiny_model`: bytes, folded into its vocabulary."""

    def tokenizer(text, return_tensors):
        return SimpleNamespace(input_ids=torch.tensor([list(text.encode())]) % 90 + 2)

    return tokenizer
