"""`attnplug vllm` and `attnplug sglang`: an engine's own server with a policy."""

from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from attnplug.cli.output import clear_errors, console

if TYPE_CHECKING:
    from attnplug.serve.paged.commands import Command

Model = Annotated[str, typer.Argument(help="What is served: a hub id or a folder.")]
Policy = Annotated[str, typer.Option(help='Such as "momo+gather".')]


class Engine(Protocol):
    """An engine's `server_command`."""

    def __call__(self, model: str, policy: str, options: list[str]) -> "Command": ...


def vllm(context: typer.Context, model: Model, policy: Policy = "momo+gather") -> None:
    """vLLM's own server with a policy: `vllm serve` with attnplug's options filled in.

    attnplug vllm Qwen/Qwen2.5-7B-Instruct --policy momo+gather --max-model-len 131072

    Options that are not attnplug's are vLLM's. The command that is run is printed first."""
    from attnplug.serve.vllm.command import server_command

    _start(server_command, model, policy, context.args)


def sglang(context: typer.Context, model: Model, policy: Policy = "momo+gather") -> None:
    """SGLang's own server with a policy: `sglang.launch_server` with attnplug's options filled in.

    attnplug sglang Qwen/Qwen2.5-7B-Instruct --policy momo+gather --context-length 131072

    Options that are not attnplug's are SGLang's. The command that is run is printed first."""
    from attnplug.serve.sglang.command import server_command

    _start(server_command, model, policy, context.args)


def _start(engine: Engine, model: str, policy: str, options: list[str]) -> None:
    """Print the engine's command and become its program."""
    with clear_errors():
        command = engine(model, policy, options)
        console(stderr=True).print(str(command), soft_wrap=True)
        command.start()
