"""`import attnplug` and `attnplug --help` answer at once: torch and transformers come with the
first name that needs them."""

import subprocess
import sys

import attnplug

HEAVY = "torch transformers numba triton pyarrow matplotlib"


def modules_after(code: str) -> set[str]:
    check = f"import sys; print(*set('{HEAVY}'.split()) & set(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, check=True
    )
    return set(run.stdout.splitlines()[-1].split())


def test_importing_the_package_imports_nothing_heavy():
    assert modules_after("import attnplug; attnplug.__version__, attnplug.PolicyError") == set()
    assert "torch" in modules_after("import attnplug; attnplug.apply")


def test_help_imports_nothing_heavy():
    code = """
from typer.testing import CliRunner
from attnplug.cli import app
for command in ([], ["report"], ["eval"], ["plan"], ["trace"], ["trace", "record"]):
    assert CliRunner().invoke(app, [*command, "--help"]).exit_code == 0
"""
    assert modules_after(code) == set()


def test_every_public_name_is_there():
    for name in attnplug.__all__:
        assert getattr(attnplug, name).__name__ == name
    assert set(attnplug.__all__) <= set(dir(attnplug))
    assert attnplug.ops.topk and attnplug.trace.read and attnplug.plan.H200


def test_a_package_that_is_imported_again_serves():
    """As after an import that failed half-way, or in a notebook that reloads what was edited."""
    code = """
import sys
import torch
import attnplug.testing

def tokens():
    import attnplug
    model = attnplug.apply(attnplug.testing.tiny_model(), "momo(min_tokens=0)+gather(min_tokens=0)")
    return model.generate(torch.arange(3, 40)[None], max_new_tokens=3, do_sample=False).tolist()

first = tokens()
for name in [name for name in sys.modules if name.split(".")[0] == "attnplug"]:
    del sys.modules[name]
import attnplug.testing
print(tokens() == first)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.splitlines()[-1:] == ["True"], run.stderr
