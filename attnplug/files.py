"""The one way in which attnplug writes files, and its one class of error for files.

A file is written beside the place that it is to have, flushed to the disk, and renamed: at any
moment, a kill and a full disk included, the place holds the old file or the whole new one. It is
made with the permissions that the user's umask leaves. Its writer holds a lock on it; what a killed
process has left behind nobody holds, and the next writer of the same place deletes it.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attnplug.errors import AttnplugError, FileError

try:
    import fcntl
except ImportError:  # Windows, where nobody can delete a file that is open
    fcntl = None

FULL = {None, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # where an error may be of space
MOST = 1 << 28  # bytes of a file that is read whole
LONGEST_NAME = 255 - len(".12345678.part")  # bytes
PART = r"\.[0-9a-f]{8}\.part"  # behind the name of a file that is being written


@contextlib.contextmanager
def writing(path: object, kind: type[FileError] = FileError) -> Iterator[None]:
    """Raise `kind` instead of OSError: the disk is full, or the user may not write there."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise kind(
            f"{path} cannot be written ({_reason(error)}). What was at that path before is there; "
            f"{free_space(error)}choose another path, and run again"
        ) from error


def free_space(error: BaseException) -> str:
    """The beginning of a sentence on what to do, which speaks of space unless an OSError tells that
    something else is missing."""
    missing = not isinstance(error, OSError) or error.errno in FULL
    return "free some space, or " if missing else ""


@contextlib.contextmanager
def reading(path: object, what: str, kind: type[FileError] = FileError) -> Iterator[None]:
    """Raise `kind` instead of OSError and ValueError: PATH cannot be read as `what`."""
    try:
        yield
    except FileError:
        raise
    except (OSError, ValueError) as error:
        said = _reason(error) if isinstance(error, OSError) else str(error)[:200]
        raise kind(f"{path} cannot be read as {what}: {said}") from error


def read_json(path: Path, what: str, kind: type[FileError] = FileError) -> Any:
    """What a JSON file holds. Raises `kind` where it cannot be read as `what`: it is no regular
    file (a pipe would be waited for, a device has no end), is longer than MOST bytes, or no
    JSON."""
    with reading(path, what, kind):
        return json_of(read_bytes(path))


def read_bytes(path: Path, most: int = MOST) -> bytes:
    """The bytes of a regular file. Raises OSError, and ValueError where it is none or too long."""
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        if found.st_size > most:
            raise ValueError(f"it has {found.st_size:,} bytes, more than {most:,}")
        return file.read(most)


def read_text(path: Path, most: int = MOST) -> str:
    """The text, UTF-8, of a regular file or of a pipe, such as /dev/stdin. Raises OSError, and
    ValueError where it has more than `most` characters, as a device without an end has."""
    with open(path, encoding="utf-8") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise ValueError(f"it has more than {most:,} characters")
    return found


def json_of(text: str | bytes) -> Any:
    """What a text of JSON says. Raises ValueError, also for one that is nested without end."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deep") from error


class Draft:
    """A new file at `part`, beside `path`, until `publish` renames it or `discard` deletes it. A
    link at `path` stays a link. Raises `kind` where no file can be made or replaced at `path`."""

    def __init__(self, path: str | os.PathLike[str], kind: type[FileError] = FileError):
        self.kind = kind
        self.path = check_place(path, kind)
        self._lock: int | None = None
        with writing(self.path, kind):
            name = _short(self.path.name)
            delete_left(self.path.parent, re.escape(name) + PART)
            while self._lock is None:
                token = secrets.token_hex(4)
                self.part = self.path.with_name(f"{name}.{token}.part")
                made = os.open(self.part, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
                self._lock = _locked(made, self.part)

    def publish(self) -> None:
        """Flush the file to the disk and give it its name."""
        assert self._lock is not None  # neither published nor discarded yet
        with writing(self.path, self.kind):
            os.fsync(self._lock)
            if fcntl is None:  # Windows renames no open file
                self._close()
            os.replace(self.part, self.path)
        self._close()

    def discard(self) -> None:
        """Leave no file beside the place; nothing after `publish`."""
        if self._lock is not None:
            if fcntl is None:
                self._close()
            self.part.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], kind: type[FileError] = FileError) -> Iterator[Path]:
    """Where the block is to write the file, which has its name `path` after the block. An exception
    leaves the old file in its place. Raises `kind` instead of OSError."""
    draft = Draft(path, kind)
    try:
        with writing(draft.path, kind):
            yield draft.part
        draft.publish()
    finally:
        draft.discard()


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file, UTF-8."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")


def write_figure(path: Path, figure: Any) -> None:
    """Write a matplotlib figure in the format that the name ends in, PNG where it is none."""
    kind = path.suffix[1:].lower()
    known = kind in figure.canvas.get_supported_filetypes()
    with replacing(path) as part:
        figure.savefig(part, format=kind if known else "png")


def make_folder(folder: Path) -> None:
    """Make a folder and those above it. Raises FileError."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


def make_place(path: Path) -> None:
    """Make the folder of a file, and see that the file can be made or replaced in it, before the
    work whose result it is to hold. Raises FileError."""
    make_folder(path.parent)
    check_place(path)


def users_own(variable: str, own: Callable[[], Path]) -> Path:
    """The path that an environment variable names, of which ~ is the user's home; else `own`.
    Raises FileError where the user has no home, as in a container that makes up a user's number."""
    named = os.environ.get(variable)
    try:
        return Path(named).expanduser() if named else own()
    except RuntimeError as error:
        raise FileError(
            f"this user has no home folder ({error}); set {variable} to a path of your own, from "
            "the root"
        ) from error


@contextlib.contextmanager
def named_by(variable: str) -> Iterator[None]:
    """Within it a FileError says which environment variable names another place: no option of the
    command does."""
    try:
        yield
    except FileError as error:
        raise FileError(f"{error}. To choose it, set {variable}") from error


@contextlib.contextmanager
def scratch_folder(folder: Path, name: str) -> Iterator[Path]:
    """A folder inside `folder` for this process alone, deleted behind the block. Those of `name`
    that killed processes have left are deleted now."""
    delete_left(folder, rf"\.{re.escape(name)}-\w+")
    with contextlib.ExitStack() as held:
        made = _new_folder(folder, f".{name}-", held)
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


def delete_left(folder: Path, pattern: str) -> None:
    """Delete what killed processes have left in a folder: what has a name of that pattern and
    nobody holds. What this user may not delete stays."""
    with contextlib.suppress(OSError):
        for place in [place for place in folder.iterdir() if re.fullmatch(pattern, place.name)]:
            with contextlib.suppress(OSError):
                _delete_unheld(place)


def sync_folder(folder: Path) -> None:
    """Flush the files of a folder to the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Within it, this process alone is in a block of `alone_in` for the folder: what it reads there
    and writes anew, no other has changed between. Leaves no file. Raises FileError."""
    with contextlib.ExitStack() as held:
        if fcntl is not None:  # Windows opens no folder
            with writing(folder):
                lock = os.open(folder, os.O_RDONLY)
            held.callback(os.close, lock)
            lock_file(lock)
        yield


def lock_file(file: int) -> None:
    """Wait until no other process holds an open file, and hold it until it is closed. Does nothing
    on a disk that has no locks."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)


def located(path: str | os.PathLike[str], kind: type[AttnplugError] = FileError) -> Path:
    """Where a path leads to from the root, links followed. Raises `kind` where it is no name, and
    where it begins at a current folder that somebody has deleted."""
    try:
        target = Path(os.path.realpath(path))
        str(target).encode()  # Arrow takes UTF-8 alone
    except ValueError as error:
        raise kind(f"{str(path)[:200]!r} is no name of a file; choose another path") from error
    except OSError as error:
        raise kind(
            f"{str(path)[:200]!r} cannot be found from the current folder ({_reason(error)}); "
            "choose a path from the root"
        ) from error
    return target


def check_place(path: str | os.PathLike[str], kind: type[FileError] = FileError) -> Path:
    """Where a file will be, links followed. Raises `kind` where none can be made or replaced: what
    is no regular file is never replaced."""
    target = located(path, kind)
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    except (OSError, ValueError) as error:  # ValueError: a NUL, in newer Pythons only here
        said = _reason(error) if isinstance(error, OSError) else error
        raise kind(
            f"{str(target)[:200]!r} cannot be a file ({said}); choose another path"
        ) from error
    if not stat.S_ISREG(mode):
        raise kind(f"{target} is no regular file; choose a path of its own")
    if target.exists() and not os.access(target, os.W_OK):
        raise kind(f"{target} may not be written; choose another path")
    if not target.parent.is_dir():
        raise kind(f"{target.parent} is no folder; make it, or choose another path")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise kind(f"{target.parent} may not be written; choose another path")
    return target


def _short(name: str) -> str:
    """A name that leaves room for what a draft's has behind it, of the same file always."""
    if len(name.encode()) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f"{name.encode()[: LONGEST_NAME - 17].decode(errors='ignore')}-{digest}"


def _locked(file: int, path: Path) -> int | None:
    """The open file, held; None where it has been taken for a left one and deleted meanwhile."""
    lock_file(file)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.lstat(path), os.fstat(file)):
            return file
    os.close(file)
    return None


def _new_folder(folder: Path, prefix: str, held: contextlib.ExitStack) -> Path:
    """A new folder, locked until `held` is closed; Windows opens no folder, so it has no lock."""
    while True:
        made = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
        if fcntl is None:
            return made
        lock = _locked(os.open(made, os.O_RDONLY), made)
        if lock is not None:
            held.callback(os.close, lock)
            return made


def _delete_unheld(place: Path) -> None:
    if fcntl is None:
        place.unlink()  # fails for a folder, which stays
        return
    file = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(place) if stat.S_ISDIR(os.fstat(file).st_mode) else place.unlink()
    finally:
        os.close(file)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
