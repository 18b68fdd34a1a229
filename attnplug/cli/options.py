"""Options that several commands have, and checks of what they were given."""

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from attnplug import files
from attnplug.errors import ArgumentError

Model = Annotated[str, typer.Argument(help="smollm2-135m, gemma3-270m, a folder or a hub id.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is a GPU.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
MOST = 1 << 40  # of anything that is counted: what torch multiplies by it stays within 64 bits
IMAGES = (".png", ".svg", ".pdf")


def read_length(text: str | int) -> int:
    """Tokens: "8192", or "8K" and "1M" as tables print them, 1,024 and 1,048,576 times as many."""
    found = re.fullmatch(r"(-?\d+)([km]?)", str(text).strip().lower())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a length; write 8192, 8K or 1M")
    length = int(found[1]) * UNITS[found[2]]
    if length > MOST:
        raise typer.BadParameter(f"{text!r} is more than {MOST:,} tokens")
    return length


class Lengths(tuple[int, ...]):
    """Several lengths. Of this type, as typer takes a list for an option that may be repeated."""


def read_lengths(text: str | Lengths) -> Lengths:
    """Lengths with commas between, "8K,32K,1M", each of them once."""
    if isinstance(text, Lengths):  # a default
        return text
    found = [read_length(word) for word in text.split(",") if word.strip()]
    if not found:
        raise typer.BadParameter(f"{text!r} has no length; write 8192, 8K or 8K,128K,1M")
    return Lengths(dict.fromkeys(found))


def tokens_option(name: str, what: str) -> Any:
    """An option that is a number of tokens. typer 0.27 takes a metavar for the option's own name
    where none is given."""
    return typer.Option(name, parser=read_length, metavar="TOKENS", help=what)


def lengths_option(name: str, what: str, **more: Any) -> Any:
    """An option that is several lengths, named as for `tokens_option`."""
    return typer.Option(name, parser=read_lengths, metavar="LENGTHS", help=what, **more)


def check_count(option: str, value: int, least: int) -> None:
    """Raise ArgumentError where a number is too small, or more than a machine can count to."""
    if value < least:
        raise ArgumentError(f"{option} is {value}, needs at least {least}")
    if value > MOST:
        raise ArgumentError(f"{option} is {value}, needs at most {MOST}")


def check_place(option: str, path: Path, *, folder: bool = False, image: bool = False) -> None:
    """Raise ArgumentError for a place that cannot be written: it should not wait for the work."""
    if path.is_symlink() and not folder:
        files.check_place(path)  # where the link leads to, nobody makes a folder
    whole = path if path.is_absolute() else files.located(".", ArgumentError) / path
    places = (path, *whole.parents)
    # A link that leads nowhere is a place, too: where a folder is to be, nothing replaces it.
    there = next(place for place in places if place.exists() or (folder and place.is_symlink()))
    fits = there.is_dir() == (folder or there != path)
    if not fits or not os.access(there, os.W_OK):
        kind = "a folder" if folder else "a file"
        raise ArgumentError(f"{option} is {path}, where {kind} cannot be written")
    if image and path.suffix.lower() not in IMAGES:
        raise ArgumentError(f"{option} is {path}, needs a name that ends in {', '.join(IMAGES)}")
