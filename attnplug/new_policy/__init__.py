"""`attnplug new-policy`: a package of one's own with a method, its entry point and its tests."""

import keyword
import os
from importlib.resources import files as resources
from importlib.resources.abc import Traversable
from pathlib import Path

from attnplug import files
from attnplug.errors import ArgumentError

TEMPLATE = "my_window"  # the method's name in `template`, whose files are a package that works
NAMED = {".md", ".py", ".toml"}


def write(name: str, parent: Path) -> Path:
    """Write the package of a method `name` into a new folder of `parent`, attnplug-NAME, and return
    it. Raises ArgumentError for a name that cannot be a method's or is taken, or where the folder
    is there already."""
    from attnplug.policies import names

    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower().strip("_"):
        raise ArgumentError(f"the name is {name!r}, needs lower-case words such as my_window")
    if name in names():
        raise ArgumentError(f"the name {name!r} is taken; there are {', '.join(names())}")
    folder = parent / f"attnplug-{_dashed(name)}"
    if folder.exists():
        raise ArgumentError(f"{folder} is there already; choose another name or --out")
    # Beside its place, so that a kill and a full disk leave no half of a package there.
    files.make_folder(parent)
    with files.writing(folder), files.scratch_folder(parent, folder.name) as work:
        _copy(resources(__name__) / "template", work / "made", name)
        os.rename(work / "made", folder)
    return folder


def _copy(source: Traversable, target: Path, name: str) -> None:
    files.make_folder(target)
    for item in source.iterdir():
        place = target / _renamed(item.name, name)
        if item.is_dir() and item.name != "__pycache__":
            _copy(item, place, name)
        elif Path(item.name).suffix in NAMED:
            files.write_text(place, _renamed(item.read_text("utf-8"), name))


def _renamed(text: str, name: str) -> str:
    """The text with the template's name in its three spellings replaced."""
    for spelling in (str, _dashed, class_name):
        text = text.replace(spelling(TEMPLATE), spelling(name))
    return text


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def class_name(name: str) -> str:
    """The class of a method: MyWindow for my_window."""
    return "".join(word.capitalize() for word in name.split("_"))
