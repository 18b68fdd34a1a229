"""`attnplug new-policy` writes a package that installs, and whose tests pass."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnplug import files, new_policy
from attnplug.cli import app
from attnplug.errors import FileError

ROOT = Path(__file__).resolve().parent.parent
runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.mark.slow
def test_what_it_writes_installs_and_passes_its_tests(tmp_path):
    result = runner.invoke(app, ["new-policy", "far_sight", "--out", str(tmp_path)])
    folder = tmp_path / "attnplug-far-sight"
    assert result.exit_code == 0 and f"cd {folder} && pip install" in result.stdout
    written = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert written == [
        "README.md",
        "attnplug_far_sight.py",
        "pyproject.toml",
        "tests/test_far_sight.py",
    ]
    for name in written:
        assert not {"my_window", "MyWindow", "my-window"} & set((folder / name).read_text().split())
        assert "window" not in name
    assert "class FarSight(Phase)" in (folder / "attnplug_far_sight.py").read_text()

    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(folder)], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("momo", "the name 'momo' is taken; there are auto, certified"),
        ("my-window", "the name is 'my-window', needs lower-case words"),
        ("lambda", "the name is 'lambda', needs"),
        ("FarSight", "the name is 'FarSight', needs"),
        ("_far", "the name is '_far', needs"),
    ],
)
def test_a_name_that_cannot_be_is_refused(tmp_path, name, message):
    result = runner.invoke(app, ["new-policy", "--out", str(tmp_path), "--", name])
    assert result.exit_code == 1 and message in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    folder = new_policy.write("far", tmp_path)
    (folder / "README.md").write_text("mine")
    result = runner.invoke(app, ["new-policy", "far", "--out", str(tmp_path)])
    assert result.exit_code == 1 and "is there already" in result.stderr
    assert (folder / "README.md").read_text() == "mine"


def test_a_write_that_fails_leaves_no_half_of_a_package(tmp_path, monkeypatch):
    """A disk that is full behind the second file; then there is room."""
    write, written = files.write_text, []

    def full(place, text):
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(place)
        write(place, text)

    monkeypatch.setattr(files, "write_text", full)
    with pytest.raises(FileError, match="No space left"):
        new_policy.write("far_sight", tmp_path)
    assert len(written) == 2 and not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert new_policy.write("far_sight", tmp_path).is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["attnplug-far-sight"]
