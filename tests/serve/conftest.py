"""What several files of tests of the server need."""

import pytest


@pytest.fixture
def backend(monkeypatch):
    """attnplug's backend module, FlashAttention's kernels being torch's."""
    import vllm.v1.attention.backends.flash_attn as flash
    import vllm_backend_cases as cases

    import attnplug.serve.vllm.backend as plug

    monkeypatch.setattr(flash, "flash_attn_varlen_func", cases.flash_attention, raising=False)
    monkeypatch.setattr(flash, "reshape_and_cache_flash", cases.write_cache, raising=False)
    monkeypatch.setattr(flash, "get_flash_attn_version", lambda **_: 2)
    monkeypatch.setattr(flash.FlashAttentionImpl, "dcp_world_size", 1, raising=False)
    return plug


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a small model that `attnplug serve` may load."""
    from hugging_face_cases import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("served") / "tiny")
