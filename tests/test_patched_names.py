"""What tests put in a name's place is still there: a test that only a GPU runs fails unseen once a
name has gone."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
ENGINES = {"vllm", "sglang"}  # which need not be installed


def imported(tree: ast.AST) -> dict[str, tuple[str, ...]]:
    """By its name in a file, a module of attnplug, or a module and what is taken of it."""
    found: dict[str, tuple[str, ...]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                whole = each.name if each.asname else each.name.split(".")[0]
                found[each.asname or whole] = (whole,)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                found[each.asname or each.name] = node.module, each.name
    return {name: way for name, way in found.items() if way[0].split(".")[0] == "attnplug"}


def patched(tree: ast.AST) -> Iterator[tuple[int, tuple[str, ...], list[str]]]:
    """(line, whose, which names lead to it) of each `setattr(THING, "name", ...)` whose THING is
    attnplug's."""
    names = imported(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr != "setattr" or len(node.args) < 3:
            continue
        thing, name = node.args[:2]
        if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
            continue
        way = [name.value]
        while isinstance(thing, ast.Attribute):
            way.insert(0, thing.attr)
            thing = thing.value
        if isinstance(thing, ast.Name) and thing.id in names:
            yield node.lineno, names[thing.id], way


def follow(whose: tuple[str, ...], way: list[str]) -> None:
    module, *taken = whose
    thing: Any = importlib.import_module(module)
    for name in taken:
        if not hasattr(thing, name):  # a module that nobody has imported yet
            importlib.import_module(f"{module}.{name}")
    for name in (*taken, *way):
        thing = getattr(thing, name)


def test_patched_names_are_there():
    gone = []
    for path in sorted(TESTS.rglob("*.py")):
        for line, whose, way in patched(ast.parse(path.read_text())):
            try:
                follow(whose, way)
            except ModuleNotFoundError as error:
                if error.name not in ENGINES:
                    raise
            except AttributeError as error:
                gone.append(f"{path.relative_to(TESTS)}:{line}: {error}")
    assert not gone


def test_a_name_that_has_gone_is_found():
    text = 'from attnplug.eval import generate\nmonkeypatch.setattr(generate, "_gone", 1)\n'
    ((line, *where),) = patched(ast.parse(text))
    assert line == 2
    with pytest.raises(AttributeError, match="_gone"):
        follow(*where)
