"""References where numba can keep nothing, in processes of their own: numba decides at import."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

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


def lines_of(folder: Path, before: str = "", **environment: str) -> list[str]:
    (folder / "sums.py").write_text(SUMS)
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
