"""The benches, which run on a GPU only, still import what they measure."""

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parent.parent / "bench"
IMPORT = "import importlib, sys; sys.path.insert(0, 'bench'); "


def run(*command):
    done = subprocess.run(
        [sys.executable, *command], cwd=BENCH.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_pytest_collects_every_bench():
    listed = run("-m", "pytest", "bench", "--collect-only", "-q", "-p", "no:cacheprovider")
    for path in BENCH.glob("test_*.py"):
        assert f"{path.name}::" in listed


def test_programs_import():
    programs = [p.stem for p in BENCH.glob("*.py") if not p.stem.startswith(("test_", "conftest"))]
    assert len(programs) > 10
    run("-c", f"{IMPORT}[importlib.import_module(name) for name in {programs!r}]")
