"""The `attnplug` command. An error is one line on stderr and exit code 1, wrong usage exit code 2.

A command is a function of this folder. torch and transformers take seconds to import, so each
command imports what it needs, and --help answers at once."""

import os
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from attnplug import __version__
from attnplug.cli.engines import sglang, vllm
from attnplug.cli.measure import bench, calibrate, demo, doctor, eval, plan, report, tune
from attnplug.cli.new_policy import new_policy
from attnplug.cli.output import clear_errors, console, escape_letters
from attnplug.cli.run import run
from attnplug.cli.serve import serve
from attnplug.cli.trace import trace

__all__ = ["app"]


class Commands(TyperGroup):
    """attnplug's commands. A program that starts others without a terminal may set $COLUMNS to 0.
    Help, tables and errors would be cut to that width, and nothing of them be left, so the variable
    is removed then."""

    def main(self, *args: Any, **options: Any) -> Any:
        if not os.environ.get("COLUMNS", "none").strip("0"):
            del os.environ["COLUMNS"]
        return super().main(*args, **options)


app = typer.Typer(name="attnplug", cls=Commands, pretty_exceptions_enable=False)
for command in (demo, report, plan, eval, bench, tune, calibrate, serve, new_policy, doctor):
    app.command()(command)
# What follows -- is another program's: none of it is ours to read.
app.command(context_settings={"allow_extra_args": True})(run)
# Options that are not ours are the engine's.
engines_own = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command(context_settings=engines_own)(vllm)
app.command(context_settings=engines_own)(sglang)
app.add_typer(trace, name="trace")


@app.callback(invoke_without_command=True)
def greet(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    """attnplug swaps the attention of a Hugging Face model for long prompts: one call, no training,
    and the weights stay as they are."""
    if context.invoked_subcommand != "run":  # whose output is another program's
        escape_letters()
    if context.invoked_subcommand is not None and not version:
        return
    with clear_errors():
        if version:
            console().print(f"attnplug {__version__}")
        else:
            assert isinstance(context.command, TyperGroup)
            console().print(*_greeting(context.command))
    raise typer.Exit()


def _greeting(group: TyperGroup) -> tuple[str, Table, str]:
    """What attnplug is, its commands, and where to begin."""
    table = Table.grid(padding=(0, 2))
    for name, command in group.commands.items():
        what = (command.help or "").partition("\n\n")[0]
        table.add_row(f"  {name}", " ".join(what.split()))
    return (
        " ".join((group.help or "").split()) + "\n",
        table,
        "\nTo begin: pip install 'attnplug[demo]' && attnplug demo\n"
        "More about a command: attnplug plan --help",
    )
