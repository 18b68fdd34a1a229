"""Files are written whole or not at all, whatever ends the writer, and with the user's permissions;
and every writer of the package goes this way."""

import ast
import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from full_disk import file_size_limit
from house import ROOT

from attnplug import doctor, files
from attnplug.calibration import basis_file
from attnplug.cli import options
from attnplug.errors import ArgumentError, FileError, TraceFileError, WeightsUnavailableError
from attnplug.models import pretrained
from attnplug.policies import tuned
from attnplug.trace.command import run as run_trace

KILLED = """
import os, sys
from attnplug import files
with files.replacing(sys.argv[1]) as part:
    part.write_text("half")
    os.kill(os.getpid(), 9)
"""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 99_999])
def test_a_full_disk_keeps_what_was_there(tmp_path, size):
    path = tmp_path / "a.txt"
    for before in (None, "before"):
        if before:
            path.write_text(before)
        with file_size_limit(size), pytest.raises(FileError, match=r"cannot be written.*at that"):
            files.write_text(path, "x" * 100_000)
        assert names(tmp_path) == ({"a.txt"} if before else set())
        assert not before or path.read_text() == before


def test_an_exception_keeps_what_was_there(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert names(tmp_path) == {"a.txt"} and path.read_text() == "before"


def test_what_a_killed_writer_leaves_is_deleted_by_the_next(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)]).returncode == -9
    assert len(names(tmp_path)) == 2 and path.read_text() == "before"
    files.write_text(path, "after")
    assert names(tmp_path) == {"a.txt"} and path.read_text() == "after"


def test_two_writers_of_one_place_do_not_meet(tmp_path):
    path = tmp_path / "a.txt"
    with files.replacing(path) as first:
        first.write_text("first")
        with files.replacing(path) as second:
            second.write_text("second")
        assert first.read_text() == "first" and path.read_text() == "second"
    assert names(tmp_path) == {"a.txt"} and path.read_text() == "first"


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_permissions_are_those_of_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        files.write_text(tmp_path / "a", "")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~umask


def test_a_link_stays_one(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "a.txt")
    files.write_text(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "a.txt").read_text() == "x"


def test_a_place_that_can_be_no_file_is_one_class_of_error(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    odd = [
        "pipe",
        ".",
        "none/a",
        "file/a",
        "loop",
        "x" * 300,
        "a\0b",
        "\udcff",
        "\ud800",
    ]
    for place in [*odd, "/dev/null"]:
        with pytest.raises(FileError):
            files.write_text(os.path.join(tmp_path, place), "x")
    assert names(tmp_path) == {"pipe", "loop", "file"} and not os.path.isfile("/dev/null")


@pytest.mark.parametrize("name", ["x" * 255, "\u00e9" * 127, "x" * 242, "x" * 241])
def test_a_name_may_be_as_long_as_the_disk_takes(tmp_path, name):
    """The draft's name is longer than the file's."""
    for text in "ab":
        files.write_text(tmp_path / name, text)
    assert (tmp_path / name).read_text() == "b" and names(tmp_path) == {name}
    left = files.Draft(tmp_path / name)  # by a writer that was killed then
    left._close()
    files.write_text(tmp_path / name, "c")
    assert names(tmp_path) == {name}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe{", b"[" * 200_000, b'{"a":' * 200_000, b"1" * 5000, None, "pipe"],
)
def test_what_is_no_json_is_one_class_of_error(tmp_path, content):
    place = tmp_path / "a.json"
    if content is None:
        place.mkdir()
    elif content == "pipe":
        os.mkfifo(place)  # opening it would wait for a writer
    else:
        place.write_bytes(content)
    with pytest.raises(FileError, match="cannot be read as facts"):
        files.read_json(place, "facts")


def test_a_file_without_an_end_is_not_read():
    with pytest.raises(FileError, match="no regular file"):
        files.read_json(Path("/dev/zero"), "facts")


def test_a_file_is_read_whole_up_to_a_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert files.read_bytes(tmp_path / "a", 5) == b"12345"
    with pytest.raises(ValueError, match="5 bytes, more than 4"):
        files.read_bytes(tmp_path / "a", 4)


def test_a_current_folder_that_is_gone_is_one_class_of_error(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(TraceFileError, match="from the current folder"):
        files.check_place("trace.parquet", TraceFileError)
    with pytest.raises(FileError, match="from the root"):
        files.write_text("page.html", "text")
    with pytest.raises(ArgumentError, match="from the root"):
        run_trace("smollm2-135m", "some text", policy=None, out=Path("trace.parquet"))
    with pytest.raises(ArgumentError, match="from the root"):
        options.check_place("--out", Path("page.html"))


def test_errors_of_files_are_one_family():
    for kind in (TraceFileError, WeightsUnavailableError):
        assert issubclass(kind, FileError)
    assert issubclass(FileError, ArgumentError) and issubclass(FileError, OSError)


WRITERS = {"write_bytes", "print_png", "mkdtemp", "TemporaryDirectory", "NamedTemporaryFile"}


def writes(tree: ast.AST) -> list[str]:
    """The calls of a module that write a file."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name in {
            "print_png",
            "mkdtemp",
            "TemporaryDirectory",
            "NamedTemporaryFile",
        }:
            found.append(name)
        modes = [a.value for a in node.args if isinstance(a, ast.Constant)]
        modes += [k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)]
        if name == "open" and any(isinstance(m, str) and set(m) & set("wax+") for m in modes):
            found.append(f"open {modes}")
        if name in {"write_bytes", "write_text", "savefig", "mkdir"}:
            owner = called.value if isinstance(called, ast.Attribute) else None
            if not (isinstance(owner, ast.Name) and owner.id in {"files", "part"}):
                found.append(name)
    return found


# A file in the scratch folder of a conversion, which one rename publishes; a trace's seal, which is
# put into the file beside; the folders that pretrained and a server of traces make, whose errors
# are their own.
OTHERS = {
    "attnplug/files.py": {"mkdtemp", "mkdir", "savefig"},
    "attnplug/models/pretrained.py": {"open ['wb']", "mkdir"},
    "attnplug/trace/seal.py": {"open ['r+b']"},
    "attnplug/serve/vllm/traces.py": {"mkdir"},
}


def test_every_file_is_written_in_one_way():
    found = {
        str(path.relative_to(ROOT)): set(writes(ast.parse(path.read_text())))
        for path in sorted((ROOT / "attnplug").rglob("*.py"))
    }
    assert {path: calls for path, calls in found.items() if calls} == OTHERS


@pytest.fixture
def homeless(monkeypatch):
    """A user whose number no file knows, as containers make up, with no variable that helps."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "ATTNPLUG_CACHE", tuned.PATH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it does then


@pytest.mark.parametrize(
    ("make", "variable"),
    [(pretrained.cache_dir, "ATTNPLUG_CACHE"), (tuned.make_place, tuned.PATH)],
)
def test_a_user_without_a_home_is_told_what_to_set(make, variable, homeless):
    with pytest.raises(FileError, match=f"no home folder.*set {variable} to a path"):
        make()


def test_a_user_without_a_home_applies_policies_and_asks_the_doctor(homeless):
    assert tuned.lookup(torch.device("cpu"), "4/2x64", "gather") is None
    assert {(x.status, "no home" in x.detail) for x in doctor._weights()} == {("note", True)}


def test_a_path_in_the_users_home_is_there(monkeypatch, tmp_path):
    """Of an environment variable no shell has made a path from the root, where a file of a service
    or of an image sets it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ATTNPLUG_CACHE", "~/cache")
    monkeypatch.setenv(tuned.PATH, "~/kept.json")
    assert pretrained.cache_dir() == tmp_path / "cache"
    assert tuned.crossover_file() == tmp_path / "kept.json"


def test_a_cache_of_somebody_elses_is_told(monkeypatch, tmp_path):
    """Python raises PermissionError where it asks whether a file is in a folder that this user may
    not search, which root may in all."""

    def forbidden(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setenv("ATTNPLUG_CACHE", str(tmp_path))
    monkeypatch.setattr(basis_file, "weights_of", lambda folder: "0" * 16)
    monkeypatch.setattr(Path, "stat", forbidden)
    found = doctor._weights()
    assert {(x.status, "Permission denied" in x.detail) for x in found} == {("note", True)}
    with pytest.raises(FileError, match="cannot be read as a model's basis: Permission denied"):
        basis_file.find(tmp_path, "0" * 8, "model")
