"""The command that starts vLLM's server with a policy."""

import json
import shutil
from collections.abc import Sequence

from attnplug.errors import ServeError
from attnplug.serve.paged.commands import Command, Stock
from attnplug.serve.vllm import unsupported
from attnplug.serve.vllm.options import KEY, REQUESTS, read_policy

BACKEND, CONFIG, PROCESSORS = "--attention-backend", "--additional-config", "--logits-processors"
STOCK = Stock("vllm", "vllm serve", dict.fromkeys((BACKEND, CONFIG, PROCESSORS), "--policy"))


def server_command(model: str, policy: str, options: Sequence[str]) -> Command:
    """`vllm serve MODEL` under a policy, with vLLM's own options behind it.

    Raises PolicyError, ServeError for what vLLM cannot serve or where it is not installed, and
    ArgumentError where the options set what the policy sets."""
    asked = read_policy(policy)
    STOCK.check(model, options)
    if reason := unsupported():
        raise ServeError(reason)
    program = shutil.which("vllm")
    if program is None:
        raise ServeError("vLLM is installed, but there is no program vllm on the PATH")
    words = [program, "serve", model, BACKEND, "CUSTOM", CONFIG, json.dumps({KEY: policy})]
    if asked.trace is not None:
        words += [PROCESSORS, REQUESTS]
    return Command([*words, *options], {})
