"""Another Python program, run in this process with a policy on each model that it loads."""

import importlib.util
import runpy
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from attnplug.api import apply, report
from attnplug.errors import ArgumentError
from attnplug.models.loading import Loading


class Program(NamedTuple):
    """A Python program: a file, or a module where `is_module`, and its own arguments."""

    name: str
    is_module: bool
    arguments: list[str]

    def run(self, policy: str, tell: Callable[[str], None]) -> None:
        """Run it as Python would, with the policy on each model that it loads. `tell` gets a text
        for each of them. Raises what the program raises, and SystemExit where it ends by that."""

        def serve(model: PreTrainedModel, asked: str) -> None:
            apply(model, asked)
            tell(f"attnplug on {type(model).__name__}: {report(model)}")

        before = sys.argv, sys.path[0]
        sys.argv = [self.name, *self.arguments]
        sys.path[0] = "" if self.is_module else str(Path(self.name).parent)
        try:
            with Loading(policy, serve):
                if self.is_module:
                    runpy.run_module(self.name, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(self.name, run_name="__main__")
        finally:
            sys.argv, sys.path[0] = before


def find(words: Sequence[str]) -> Program:
    """The program that a command line names: a Python file, a program on the PATH, or "-m" and a
    module, and its arguments. Raises ArgumentError where there is none that Python runs."""
    match list(words):
        case ["-m", module, *arguments]:
            if _spec(module) is None:
                raise ArgumentError(f"run: there is no module {module!r}")
            return Program(module, True, arguments)
        case [name, *arguments] if name != "-m":
            return Program(_python_file(name), False, arguments)
    raise ArgumentError("run: name a program after --, such as: attnplug run -- lm_eval --help")


def _spec(module: str) -> object:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of a package that it would be in
        return None


def _python_file(name: str) -> str:
    if name.endswith(".py") and Path(name).is_file():
        return str(Path(name).resolve())
    found = shutil.which(name)
    if found is None:
        raise ArgumentError(f"run: there is no program {name!r}, nor a Python file of that name")
    with open(found, "rb") as file:
        first = file.readline()
    if not (first.startswith(b"#!") and b"python" in first):
        raise ArgumentError(f"run: {found} is not a Python program, so no policy reaches it")
    return found
