"""The notebooks run from top to bottom and keep what they claim, and those committed were run."""

import ast
import importlib
import json
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from real_models import real_folder

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 150_000  # of a notebook's outputs
LONG = pytest.mark.long


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


@pytest.fixture
def notebooks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield importlib.import_module("notebooks")
    sys.modules.pop("notebooks", None)


def code(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell) -> set[str]:
    """What a cell puts out: text, pictures. What stderr has depends on the machine."""
    return {
        kind
        for output in cell.outputs
        for kind in (output.get("data") or {output.get("name"): ""})
        if kind != "stderr"
    }


def test_both_are_here():
    assert [path.stem for path in NOTEBOOKS] == ["first-steps", "write-a-policy"]


# The second is a study of a real model, for which .github/workflows/ci.yml has a job of its own.
# Tests of docs, eval and testing run what it is made of.
@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem == "first-steps" else LONG)
        for path in NOTEBOOKS
    ],
)
def test_it_runs_and_its_asserts_hold(path, notebooks, monkeypatch):
    real_folder("smollm2-135m")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # tests on a GPU are marked
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # as its readers have it
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # other workers want the cores, too
    before = path.read_bytes()
    fresh = notebooks.run(path)
    assert path.read_bytes() == before
    kept = nbformat.read(path, as_version=4)
    for cell, again in zip(code(kept), code(fresh), strict=True):
        assert kinds(cell) == kinds(again), f"python scripts/notebooks.py; stale: {cell.id}"


def test_it_asserts_what_it_claims(path):
    checks = {
        cell.id
        for cell in code(nbformat.read(path, as_version=4))
        for node in ast.walk(ast.parse(cell.source))
        if isinstance(node, ast.Assert)
    }
    assert checks, "nothing in it would fail"


def test_the_committed_one_was_run_in_order(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {"image/png"} <= {kind for cell in cells for kind in kinds(cell)}
    assert all(output.output_type != "error" for output in outputs)
    assert all(output.get("name") != "stderr" for output in outputs)
    assert len(json.dumps(outputs)) <= MOST_BYTES


def test_its_links_lead_somewhere(path):
    notebook = nbformat.read(path, as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    targets = [part.partition(")")[0] for part in text.split("](")[1:]]
    inner = [target for target in targets if not target.startswith("https://")]
    assert inner and all((path.parent / target).is_file() for target in inner), inner
