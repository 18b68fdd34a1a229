"""What commands print: text and tables, JSON, and errors."""

import contextlib
import io
import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from rich.console import Console

from attnplug.errors import AttnplugError, first_line


def console(*, stderr: bool = False) -> Console:
    """Prints what it is given: a file may be named [red].png."""
    return Console(stderr=stderr, markup=False, highlight=False)


def escape_letters() -> None:
    """From now on stdout prints letters that its encoding lacks as escapes: a locale may be ASCII,
    and a file's name may be no text at all."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # None where it is closed
        sys.stdout.reconfigure(errors="backslashreplace")


def print_json(facts: Mapping[str, Any]) -> None:
    """Print an object as JSON, and nothing else. JSON has no NaN: null stands for it."""
    typer.echo(json.dumps(_without_nan(facts), indent=1, allow_nan=False))


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nan(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_error(error: object) -> None:
    """One line on stderr, whatever bytes a file's name has."""
    text = f"error: {error}".encode(errors="backslashreplace").decode()
    console(stderr=True).print(text, style="red", soft_wrap=True)


@contextlib.contextmanager
def quiet_log() -> Iterator[None]:
    """Within it the log of attnplug gives no warnings: a report prints the same."""
    log = logging.getLogger("attnplug")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Within it an error that a user can do something about is a line and exit code 1. A reader
    that has gone, such as `head`, is none: click ends without a word."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (AttnplugError, OSError) as error:  # a disk may fill while something is written
        print_error(error)
        raise typer.Exit(1) from error
    except (MemoryError, RuntimeError) as error:
        if not is_of_memory(error):
            raise
        print_error(f"there is not enough memory for this ({first_line(error)})")
        raise typer.Exit(1) from error


def is_of_memory(error: Exception) -> bool:
    """Whether memory of the machine or of a GPU was refused; torch has several classes for it."""
    told = ("DefaultCPUAllocator", "out of memory")  # the latter by CUDA, where torch asked it
    return isinstance(error, MemoryError) or any(words in str(error) for words in told)
