"""Another Python program, run in this process with a policy on each model that it loads."""

import contextlib
import importlib.util
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
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
        for each of them. Raises what the program raises, SystemExit where it ends by that, and
        NoModuleError where there is no such module."""

        def serve(model: PreTrainedModel, asked: str) -> None:
            apply(model, asked)
            tell(f"attnplug on {type(model).__name__}: {report(model)}")

        before = sys.argv
        sys.argv = ["-m" if self.is_module else self.name, *self.arguments]
        try:
            with (
                _searching("" if self.is_module else str(Path(self.name).parent)),
                Loading(policy, serve),
            ):
                if self.is_module:
                    _check_module(self.name)
                    runpy.run_module(self.name, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(self.name, run_name="__main__")
        finally:
            sys.argv = before


class NoModuleError(ArgumentError):
    """`python -m` has nothing to run by that name."""


def find(words: Sequence[str]) -> Program:
    """The program that a command line names: a Python file, a program on the PATH, or "-m" and a
    module, and its arguments. Raises ArgumentError where there is none that Python runs."""
    match list(words):
        case ["-m", module, *arguments]:
            return Program(module, True, arguments)
        case [name, *arguments] if name != "-m":
            return Program(_python_file(name), False, arguments)
    raise ArgumentError("run: name a program after --, such as: attnplug run -- lm_eval --help")


@contextlib.contextmanager
def _searching(folder: str) -> Iterator[None]:
    """Within it modules are looked for in `folder` first ("": the current one), as Python does for
    a program, and not beside attnplug's own script."""
    before = list(sys.path)
    sys.path[0] = folder
    try:
        yield
    finally:
        sys.path[:] = before


def _check_module(module: str) -> None:
    """Raise NoModuleError where `python -m` has nothing to run by that name. Imports the packages
    that the module is in, as Python does, and raises what they raise."""
    if not all(module.split(".")):
        raise NoModuleError(f"run: there is no module {module!r}")
    name, spec = module, _spec(module)
    if spec is not None and spec.submodule_search_locations is not None:  # a package
        name = f"{module}.__main__"
        spec = _spec(name)
    if spec is None:
        raise NoModuleError(f"run: there is no module {name!r}")
    code = getattr(spec.loader, "get_code", None)
    if code is None or code(name) is None:
        raise NoModuleError(f"run: module {module!r} has no Python code to run")


def _spec(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module != missing and not module.startswith(f"{missing}."):
            raise  # a package asks for another one
        return None
    except ValueError:  # a module that has no spec, such as __main__
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
