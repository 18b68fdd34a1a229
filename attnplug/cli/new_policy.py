"""`attnplug new-policy`."""

from pathlib import Path
from typing import Annotated

import typer

from attnplug.cli.options import check_place
from attnplug.cli.output import clear_errors, console


def new_policy(
    name: Annotated[str, typer.Argument(help="The method's name, such as my_window.")],
    out: Annotated[Path, typer.Option(help="Folder in which the package's folder is made.")] = Path(
        "."
    ),
) -> None:
    """Write a package with a method of your own, its entry point and its tests."""
    with clear_errors():
        from attnplug import new_policy as module

        check_place("out", out, folder=True)
        folder = module.write(name, out)
        said = console()
        said.print(f"wrote {folder}: a method that works, to be made your own")
        said.print(f"next: cd {folder} && pip install -e '.[test]' && pytest", soft_wrap=True)
