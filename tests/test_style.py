"""The tree is as ruff wants it (pyright runs in pre-commit)."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=lambda a: a[0])
def test_ruff_agrees(arguments):
    ruff = shutil.which("ruff")
    assert ruff, "ruff is in the extra `test`: pip install -e '.[test]'"
    found = subprocess.run([ruff, *arguments, str(ROOT)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
