"""The command that starts SGLang's server with a policy."""

import argparse
import os
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from attnplug.errors import ArgumentError, ServeError
from attnplug.files import json_of
from attnplug.serve.paged.commands import Command, Stock
from attnplug.serve.paged.phases import VARIABLE
from attnplug.serve.sglang import unsupported
from attnplug.serve.sglang.options import (
    BACKEND,
    check_cache,
    check_server,
    page_error,
    page_for,
    read_policy,
)

PLUGINS = "SGLANG_PLUGINS"
MODULE = "sglang.launch_server"
STOCK = Stock(
    "sglang",
    f"python -m {MODULE}",
    {"--attention-backend": "--policy", "--model-path": "MODEL"},
)
# The options of SGLang's that `check_server` asks for, by the names of its fields. Their other
# spellings are SGLang's, too.
SWITCHES = (
    "enable_dp_attention",
    "enable_two_batch_overlap",
    "enable_pdmux",
    "enable_torch_compile",
    "enable_hierarchical_cache",
    "enable_lmcache",
    "enable_flexkv",
    "enable_unified_memory",
    "enable_kv_cache_sharding",
    "enable_hisparse",
    "prefill_only_disable_kv_cache",
)
TEXTS: dict[str, str | None] = {
    "model_path": None,
    "attention_backend": None,
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "speculative_algorithm": None,
    "dllm_algorithm": None,
    "disaggregation_mode": "null",
    "radix_cache_backend": None,
    "kv_cache_dtype": "auto",
    "cuda_graph_backend_prefill": None,
    "cuda_graph_config": None,
}
COUNTS = {"page_size": None, "attn_dp_size": 1, "attn_cp_size": 1, "dcp_size": 1}
SPELLINGS = {
    "model_path": "--model",
    "enable_hierarchical_cache": "--enable-hicache",
    "attn_dp_size": "--attention-data-parallel-size",
    "attn_cp_size": "--attention-context-parallel-size",
    "dcp_size": "--decode-context-parallel-size",
}


def server_command(model: str, policy: str, options: Sequence[str]) -> Command:
    """`python -m sglang.launch_server --model-path MODEL` under a policy, with SGLang's own options
    behind it. Pages become whole blocks of gather unless the options give their size.

    Raises PolicyError, ServeError for what SGLang cannot serve with the policy or where it is not
    installed, and ArgumentError where the options set what the policy or the model sets."""
    asked, given = read_policy(policy), read_options(options)
    filled = ("model_path", "attention_backend")
    STOCK.check(model, [_flag(name) for name in filled if getattr(given, name) is not None])
    given.attention_backend = BACKEND
    check_server(given, asked)
    check_cache(given.kv_cache_dtype, asked)
    words = [sys.executable, "-m", MODULE, "--model-path", model, "--attention-backend", BACKEND]
    if asked.decode is not None:
        if given.page_size is None:
            words += ["--page-size", str(page_for(asked.decode))]
        elif error := page_error(asked.decode, given.page_size):
            raise error
    _check_plugins(os.environ.get(PLUGINS, ""))
    if reason := unsupported():
        raise ServeError(reason)
    return Command([*words, *options], {VARIABLE: policy})


def read_options(options: Sequence[str]) -> Any:
    """What SGLang's options set of the arguments that `check_server` asks for, SGLang's defaults
    elsewhere. Abbreviations count, as they do for SGLang."""
    parser = _Parser(prog="sglang", add_help=False)
    for name in SWITCHES:
        parser.add_argument(*_flags(name), dest=name, action="store_true")
    for name, default in TEXTS.items():
        parser.add_argument(*_flags(name), dest=name, default=default)
    for name, default in COUNTS.items():
        parser.add_argument(*_flags(name), dest=name, default=default, type=int)
    given, _ = parser.parse_known_args(list(options))
    prefill = _prefill_graph(given.cuda_graph_config) or given.cuda_graph_backend_prefill
    given.cuda_graph_config = SimpleNamespace(prefill=SimpleNamespace(backend=prefill))
    return given


class _Parser(argparse.ArgumentParser):
    """Says what is wrong as the other commands do."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"sglang: {message}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _flags(name: str) -> list[str]:
    return [_flag(name), *([SPELLINGS[name]] if name in SPELLINGS else [])]


def _prefill_graph(config: str | None) -> str | None:
    """The backend of prefill's graph in `--cuda-graph-config`, which SGLang asks first."""
    try:
        phases = json_of(config or "{}")
    except ValueError as error:
        raise ArgumentError(f"sglang: --cuda-graph-config is no JSON ({error})") from error
    prefill = phases.get("prefill") if isinstance(phases, dict) else None
    return prefill.get("backend") if isinstance(prefill, dict) else None


def _check_plugins(allowed: str) -> None:
    """Raise ServeError where SGLang would load certain plugins and not attnplug."""
    if allowed and BACKEND not in map(str.strip, allowed.split(",")):
        raise ServeError(
            f"{PLUGINS} is {allowed!r}, which keeps attnplug out of SGLang; add attnplug to it, or "
            "unset it"
        )
