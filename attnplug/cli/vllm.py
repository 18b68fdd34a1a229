"""`attnplug vllm`: vLLM's server with a policy."""

import os
import shlex
from typing import Annotated

import typer

from attnplug.cli.output import clear_errors, console


def vllm(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="What vLLM serves: a hub id or a folder.")],
    policy: Annotated[str, typer.Option(help='Such as "momo+gather".')] = "momo+gather",
) -> None:
    """vLLM's own server with a policy: `vllm serve` with attnplug's options filled in.

    attnplug vllm Qwen/Qwen2.5-7B-Instruct --policy momo+gather --max-model-len 131072

    Options that are not attnplug's are vLLM's. The command that is run is printed first."""
    with clear_errors():
        from attnplug.serve.vllm.command import server_command

        words = server_command(model, policy, context.args)
    console(stderr=True).print(shlex.join(words), soft_wrap=True)
    os.execv(words[0], words)
