"""What README and docs tell a reader to type is understood: attnplug's commands take the options
that the pages give them, the scripts exist, and so do the extras that are installed."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from attnplug.cli import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "bench/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
SHELL = re.compile(r"^```(?:sh|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """The words of each command in a page's shell blocks, without comments and variables."""
    found: list[list[str]] = []
    for block in SHELL.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            words: list[str] = []
            for word in [*shlex.split(line, comments=True), "&&"]:
                if word != "&&":
                    words.append(word)
                    continue
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                found += [words] if words else []
                words = []
    return found


ALL = [
    pytest.param(words, id=f"{page.relative_to(ROOT)}: {' '.join(words)}")
    for page in PAGES
    for words in commands(page)
]


def parsed(words: list[str]) -> str:
    """The name of the command that `attnplug WORDS` would run. Raises what typer says of a wrong
    option, value or command."""
    command, context = typer.main.get_command(app), None
    while True:
        context = command.make_context(words[0], list(words[1:]), parent=context)
        if not hasattr(command, "resolve_command"):
            return words[0]
        typed = [*context._protected_args, *context.args]  # the subcommand's name, and what follows
        _, command, rest = command.resolve_command(context, typed)
        words = [command.name, *rest]


@pytest.mark.parametrize("words", ALL)
def test_a_command_of_a_page_is_understood(words):
    if words[0] == "attnplug":
        assert parsed(words)
    for name in words:
        if name.startswith(("bench/", "scripts/")) and not name.startswith("bench/results"):
            assert (ROOT / name).is_file(), name
    if words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        asked = re.findall(r"(?:\.|attnplug)\[([\w,]+)\]", " ".join(words))
        assert {e for each in asked for e in each.split(",")} <= set(
            extras["optional-dependencies"]
        )


def test_a_wrong_command_is_not_understood():
    with pytest.raises(Exception, match="lenghts"):
        parsed(["attnplug", "eval", "smollm2-135m", "--lenghts", "4K"])
    with pytest.raises(Exception, match="plna"):
        parsed(["attnplug", "plna", "qwen2.5-7b"])


def test_the_pages_have_commands():
    assert sum(words.values[0][0] == "attnplug" for words in ALL) > 20
