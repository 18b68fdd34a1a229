"""What PyPI and GitHub are told: one version, one address, links that lead somewhere, and forms
that can be read."""

import importlib
import re
import runpy
import tomllib
from pathlib import Path

import pytest
import setuptools
import yaml
from packaging.version import Version

import attnplug

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ADDRESS = PROJECT["urls"]["Repository"]


@pytest.fixture
def readme(monkeypatch) -> str:
    """The README as PyPI gets it."""
    told = {}
    monkeypatch.setattr(setuptools, "setup", lambda **facts: told.update(facts))
    runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")
    assert told["long_description_content_type"] == "text/markdown"
    return told["long_description"]


def test_every_link_of_the_readme_leads_from_pypi_to_the_release(readme):
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", readme)
    assert len(links) > 20
    inner = 0
    for picture, target in links:
        if target.startswith("#"):
            continue
        assert target.startswith("https://"), target
        found = re.fullmatch(rf"{ADDRESS}/(raw|blob)/v(.+?)/([^#]+)(#.*)?", target)
        if found is None:
            continue
        kind, version, path, _ = found.groups()
        assert (kind == "raw") == bool(picture) and version == attnplug.__version__
        assert (ROOT / path).is_file(), path
        inner += 1
    assert inner > 20


def test_a_clone_is_imported_from_the_folder_above_it_too():
    """Without this line setuptools installs a clone by a finder, which Python asks last, behind the
    clone's folder: that has the package's name, and no `__init__.py`."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert tools["package-dir"] == {"": "."}


def test_the_links_beside_a_release_lead_into_the_repository():
    for name, address in PROJECT["urls"].items():
        assert address == ADDRESS or address.startswith(f"{ADDRESS}/"), name
        _, blob, path = address.partition("/blob/main/")
        assert not blob or (ROOT / path).is_file(), path


def test_the_address_is_the_same_in_both_places():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["repository-code"] == ADDRESS
    assert citation["license"] == PROJECT["license"]
    assert "version" not in citation  # attnplug/version.py has it


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    assert str(Version(attnplug.__version__)) == attnplug.__version__
    assert f"## {attnplug.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_workflow_runs_what_is_here():
    flow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = [step.get("run", "") for job in flow["jobs"].values() for step in job["steps"]]
    scripts = {name for step in steps for name in re.findall(r"[\w./]*(?:\.ci/run|\w+\.sh)", step)}
    assert scripts == {".ci/run", "scripts/wheel.sh"}
    assert all((ROOT / name).is_file() for name in scripts)
    tests = re.findall(r"\btests/\w+\.py", "\n".join(steps))
    assert tests == ["tests/test_notebooks.py"] and (ROOT / tests[0]).is_file()


@pytest.mark.parametrize("form", ["bug", "slow", "wish"])
def test_issue_forms_have_what_github_wants(form):
    facts = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{form}.yml").read_text())
    assert facts["name"] and facts["description"]
    fields = [field for field in facts["body"] if field["type"] != "markdown"]
    assert fields and all(field["attributes"]["label"] for field in fields)
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids))
    text = (ROOT / f".github/ISSUE_TEMPLATE/{form}.yml").read_text()
    for command in re.findall(r"`attnplug ([a-z]+)", text):
        assert command in {"doctor", "bench"}


def test_the_modules_that_are_public_say_what_is():
    page = (ROOT / "docs/reference/public.md").read_text().partition("## Not public")[0]
    line = page.partition("of the modules")[2].partition("with its arguments")[0]
    modules = re.findall(r"`(attnplug[\w.]*)`", line)
    assert len(modules) == 6
    for name in modules:
        module = importlib.import_module(name)
        assert all(hasattr(module, each) for each in module.__all__)
