"""attnplug in SGLang: an attention backend that SGLang's plugin mechanism loads by itself.

    ATTNPLUG_POLICY=momo+gather python -m sglang.launch_server --model-path MODEL \\
      --attention-backend attnplug --page-size 64

SGLang calls `register` in every process that it starts. Nothing changes unless the backend is asked
for. This room is the only one that knows SGLang. `options` reads the policy and refuses what cannot
be served, `rows` divides a batch, and `backend` is what SGLang sees: a class over its own
FlashAttention backend, which serves whatever no sparse method does.
"""

import importlib.metadata
import logging
from typing import Any

from packaging.specifiers import SpecifierSet

# Tests run both. Older ones want a transformers that attnplug does not take.
SUPPORTED = SpecifierSet(">=0.5.22,<0.5.24")
logger = logging.getLogger("sglang.attnplug")


def version() -> str | None:
    """The version of the installed SGLang, None where there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def unsupported() -> str:
    """Why attnplug does not serve the installed SGLang, "" where it does."""
    found = version()
    if found is None:
        return f"SGLang is not installed; pip install 'sglang{SUPPORTED}'"
    if SUPPORTED.contains(found.split("+")[0], prereleases=True):
        return ""
    return f"SGLang {found} is not supported: attnplug needs sglang{SUPPORTED}"


def register() -> None:
    """Give SGLang a backend of this name. SGLang calls this through the entry point group
    `sglang.srt.plugins`. In a version that is not supported it says so and registers nothing: a
    server that asks for the backend then does not start, and others are left alone."""
    reason = unsupported()
    if reason:
        logger.warning("attnplug stays out: %s", reason)
        return
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from attnplug.serve.sglang.options import BACKEND

    register_attention_backend(BACKEND)(create)
    if BACKEND not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([BACKEND])


def create(runner: Any) -> Any:
    """The backend for a model runner of SGLang's, after all that can be refused was. Raises
    ServeError or PolicyError."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.utils import get_device_capability

    from attnplug.serve.sglang.options import check_card, check_model, check_server, policy_of

    server, policy = resolved_view(runner.server_args), policy_of()
    check_server(server, policy)
    check_model(runner, policy)
    check_card(get_device_capability(), runner.kv_cache_dtype)
    # Imported last: its kernels are for such a card.
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

    from attnplug.serve.sglang.backend import backend_class

    made = backend_class(FlashAttentionBackend)(runner, server, policy)
    made.warm()
    return made
