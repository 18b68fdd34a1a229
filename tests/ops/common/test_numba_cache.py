"""References where numba can keep nothing, in processes of their own: numba decides at import."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attnplug.ops.common import numba_cache

SUMS = """
from numba_cache import njit, prange


@njit()
def square(x):
    return x * x


@njit(parallel=True)
def squares(n):
    total = 0
    for i in prange(n):
        total += square(i)
    return total
"""
RUN = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="log: %(message)s")
{before}
import sums
print(sums.squares(4))
"""
NOWHERE = "/proc/nowhere"  # no process can make a folder there, and root's neither


def lines_of(folder: Path, before: str = "", sums: str = SUMS, **environment: str) -> list[str]:
    if not (folder / "sums.py").exists() or (folder / "sums.py").read_text() != sums:
        (folder / "sums.py").write_text(sums)
    shutil.copy(numba_cache.__file__, folder)  # alone, it is imported at once
    others = {k: v for k, v in os.environ.items() if k not in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR")}
    environment = {**others, "PYTHONPATH": str(folder), **environment}
    run = subprocess.run(
        [sys.executable, "-B", "-c", RUN.format(before=before)],
        **{"capture_output": True, "text": True, "check": True, "env": environment},
    )
    return run.stdout.splitlines()


def cached(folder: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in folder.rglob("*.nbc")}


def test_what_a_process_compiles_is_kept(tmp_path):
    assert lines_of(tmp_path) == ["14"]
    assert cached(tmp_path) == {"sums.square", "sums.squares"}


def test_a_folder_that_nobody_can_write_to_costs_one_line_of_the_log(tmp_path):
    (tmp_path / "__pycache__").write_text("a file, where numba makes a folder")
    word, result = lines_of(tmp_path, HOME=NOWHERE, NUMBA_CACHE_DIR=NOWHERE)
    assert result == "14"
    assert word.startswith("log: ") and "NUMBA_CACHE_DIR" in word and "no folder" in word
    assert cached(tmp_path) == set()


def test_another_folder_that_is_named_is_taken(tmp_path):
    (tmp_path / "__pycache__").write_text("a file, where numba makes a folder")
    other = tmp_path / "other"
    assert lines_of(tmp_path, HOME=NOWHERE, NUMBA_CACHE_DIR=str(other)) == ["14"]
    assert cached(other) == {"sums.square", "sums.squares"}


def test_a_disk_that_is_full_costs_one_line_of_the_log(tmp_path):
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))"
    word, result = lines_of(tmp_path, full)
    assert result == "14"
    assert word.startswith("log: ") and "NUMBA_CACHE_DIR" in word and "File too large" in word
    assert cached(tmp_path) == set()


def test_a_new_version_whose_code_finds_no_room_is_not_the_old_one_afterwards(tmp_path):
    """numba writes first what a file is to hold, which is small, and then the file, which may be
    that of the version before."""
    assert lines_of(tmp_path) == ["14"]
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    new = SUMS.replace("x * x", "x * x * x")
    assert lines_of(tmp_path, full, new)[-1] == "36"
    assert lines_of(tmp_path, "", new) == ["36"]


def test_no_code_of_a_version_before_stays(tmp_path):
    lines_of(tmp_path)
    before = {*tmp_path.rglob("*.nbc")}
    assert lines_of(tmp_path, "", SUMS.replace("x * x", "x * x * x")) == ["36"]
    after = {*tmp_path.rglob("*.nbc")}
    assert len(after) == len(before) and not after & before


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [b"", bytes(64)], ids=["empty", "zeros"])
def test_files_that_lost_their_content_are_compiled_anew(tmp_path, ending, left):
    """As files do that were written just before a machine lost power."""
    lines_of(tmp_path)
    torn = list(tmp_path.rglob(f"*.{ending}"))
    for path in torn:
        path.write_bytes(left)
    assert lines_of(tmp_path) == ["14"]
    assert cached(tmp_path) == {"sums.square", "sums.squares"}
    assert not any(path.read_bytes() == left for path in tmp_path.rglob(f"*.{ending}"))
