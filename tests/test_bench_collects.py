"""The benches, which run on a GPU only, still import what they measure."""

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parent.parent / "bench"
IMPORT = "import importlib, sys; sys.path.insert(0, 'bench'); "
COLLECT = """
import pytest
sys.exit(pytest.main(["bench", "--collect-only", "-q", "-p", "no:cacheprovider"]))
"""


def test_programs_import_and_pytest_collects_every_bench():
    """In one process, of which importing torch is most of the time."""
    programs = [p.stem for p in BENCH.glob("*.py") if not p.stem.startswith(("test_", "conftest"))]
    assert len(programs) > 10
    done = subprocess.run(
        [sys.executable, "-c", f"{IMPORT}[importlib.import_module(name) for name in {programs!r}]"
         + COLLECT],
        cwd=BENCH.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for path in BENCH.glob("test_*.py"):
        assert f"{path.name}::" in done.stdout
