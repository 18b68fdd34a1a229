"""`attnplug run`: another program under a policy."""

from typing import Annotated

import typer

from attnplug.cli.output import clear_errors, console, print_error


def run(
    context: typer.Context,
    policy: Annotated[str, typer.Option(help='Such as "momo+gather".')] = "auto",
) -> None:
    """Run another Python program with a policy on each model that it loads.

    attnplug run --policy momo+gather -- lm_eval --model hf --model_args pretrained=MODEL

    What follows -- is a program on the PATH, a file, or -m and a module, and its arguments. The
    program runs in this process. A line on stderr tells of each model that gets the policy. Other
    processes that the program starts run without it."""
    with clear_errors():
        from attnplug import policies, program

        policies.parse(policy)  # a typing mistake should not wait for the weights
        found = program.find(context.args)
    said = console(stderr=True)
    try:
        found.run(policy, lambda text: said.print(text, soft_wrap=True))
    except program.NoModuleError as error:
        print_error(error)
        raise typer.Exit(1) from error
