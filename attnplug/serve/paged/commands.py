"""The command that starts an engine's server: what the commands of all engines share."""

import os
import shlex
from collections.abc import Iterable, Mapping
from typing import NamedTuple, NoReturn

from attnplug.errors import ArgumentError


class Command(NamedTuple):
    """The words of a command, the path of its program first, and the environment variables that it
    has besides the process's."""

    words: list[str]
    variables: Mapping[str, str]

    def __str__(self) -> str:
        """As a shell takes it."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(self.words)])

    def start(self) -> NoReturn:
        """Become the program."""
        os.execve(self.words[0], self.words, {**os.environ, **self.variables})


class Stock(NamedTuple):
    """An engine's own command: attnplug's name for it, the words that start it without attnplug,
    and the options of the engine that attnplug fills in, each with what the user gives instead."""

    name: str
    words: str
    filled: Mapping[str, str]

    def check(self, model: str, options: Iterable[str]) -> None:
        """Raise ArgumentError where an option stands in the place of the model, or the options set
        what attnplug fills in."""
        if model.startswith("-"):
            raise ArgumentError(f"{self.name}: name the model before {model}")
        for option in options:
            name = option.replace("_", "-").partition("=")[0]
            for filled, instead in self.filled.items():
                if name == filled or name.startswith(f"{filled}."):
                    raise ArgumentError(
                        f"{self.name}: {name} is what {instead} sets; start `{self.words}` yourself"
                    )
