"""Which committed rows were measured by older code than what ships.

    python bench/stale.py            # a table: rows, their commit, what changed since

A row depends on package files: those of its op, or of its policy with the ops that it calls. They
follow from the imports, from the op's or policy's own file on. If the code of one of them (not its
comments, docstrings or imports, nor its place) differs between the row's commit and HEAD, the row
is `stale`, unless it was measured on a GPU and the kernels are known to be the same: what each op
compiles to for an H200 and how it is launched, in bench/compiled.json of both commits (or in
bench/compiled/COMMIT.json, for commits that were before that file), the torch ops that fit sketch's
bases, and the defaults of the row's policies. `bench/ptx.py digest` writes these files.

A row may also have no commit, one with "-dirty", or one that the repository does not have: these
are listed as what they are. A row is `gone` if what it measured was deleted: it stays as history,
and report.py shows it on no page. The host's code of a whole model, eval's tasks, torch and the
GPU's own compiler are not looked at where the kernels are known.

A shallow clone, or a tree without git, has no history to compare with: the program says so, and
exits 0.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from _kernel_digests import same

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
OPS, POLICIES = "attnplug/ops", "attnplug/policies"
EXACT = f"{POLICIES}/exact.py"
# a row's `op` that names neither an op nor a policy, and the files a whole model adds
NAMED_ELSEWHERE = {
    "tiered": f"{POLICIES}/gather.py",
    "trace_view": "attnplug/trace/view.py",
    "random_blocks": "attnplug/eval/control.py",
    "stock": None,  # transformers alone
    "snapkv": f"{OPS}/gvr/gather_tokens_attention.py",  # of the docs' example: what its steps call
    # of the literature, in bench/frontier.py
    **dict.fromkeys(
        ("quest", "quest-mean", "double-sparsity", "loki", "exact-scores"), "bench/_selectors.py"
    ),
    **dict.fromkeys(("mean-pooling", "vertical-slash", "oracle"), "bench/rival_masks.py"),
}
# of the literature, in rows of the study `rivals`, where names may be those above
OF_RIVALS = {
    **dict.fromkeys(
        ("streaming", "matched_window", "quest", "double_sparsity", "loki", "snapkv"),
        "bench/rivals.py",
    ),
    **dict.fromkeys(("pooled_blocks", "vertical_slash"), "bench/rival_prefills.py"),
}
WHOLE_MODEL = ("e2e-decode", "e2e-ttft", "e2e-part", "trace")
MODEL_FILES = frozenset({"attnplug/models/hf.py", "attnplug/models/layers.py"})
STUDIES = {"topk": f"{OPS}/gvr/topk.py"}  # whose policies are no policies
# Of deleted options, by key of a row: what its text holds there.
GONE = {
    "op": re.compile("^share_tokens$"),
    "policy": re.compile(
        r"\bgather\([^)]*scoring='(spread|estimate|mean)'|\bgvr\([^)]*group='share'"
    ),
    "options": re.compile(r"^spread, block=16|scoring=(estimate|mean)"),
}
OF_TORCH = {"fit_bases": f"{OPS}/sketch/basis.py"}  # what no kernel of ours computes
# what chooses a method but computes nothing of its rows
NOT_FOLLOWED = {
    f"{POLICIES}/{name}.py" for name in ("base", "crossover", "dense", "grammar", "policy")
}
NOT_FOLLOWED |= {f"{OPS}/common/checks.py"}
# what serves models with latents, of which no row of bench/results is
NOT_FOLLOWED |= {f"{POLICIES}/_absorbed.py"}


class NoHistoryError(RuntimeError):
    """There is no full history to compare with."""


class State(NamedTuple):
    """What is known of a row: "", "gone", "stale", "dirty", "no commit" or "unknown commit", the
    newest commit that changed its code, and the files that changed."""

    word: str
    newest: str = ""
    files: tuple[str, ...] = ()


def main() -> int:
    try:
        history = History(ROOT)
    except NoHistoryError as error:
        print(f"Nothing is compared: {error}.")
        return 0
    groups: dict[tuple[str, ...], int] = {}
    rows = 0
    for file, row in read_rows(ROOT / "bench" / "results"):
        rows += 1
        state = history.state(row)
        if state.word:
            files = ", ".join(path.removeprefix("attnplug/") for path in state.files[:3])
            more = f" and {len(state.files) - 3} more" if len(state.files) > 3 else ""
            commit = row.get("commit", "")
            key = (file.as_posix(), _title(row), commit, state.word, state.newest, files + more)
            groups[key] = groups.get(key, 0) + 1
    lines = [(str(number), *key) for key, number in groups.items()]
    heads = ("rows", "file", "what", "commit", "state", "newest change", "changed files")
    for line in _aligned([heads, *sorted(lines, key=lambda line: line[1:])]):
        print(line)
    words = [key[3] for key in groups]
    told = ", ".join(
        f"{sum(n for key, n in groups.items() if key[3] == word)} {word}"
        for word in sorted(set(words))
    )
    print(f"\n{rows} rows: {told or 'all by the code that ships'}.")
    return 0


def read_rows(folder: Path) -> Iterator[tuple[Path, Row]]:
    """Each row of all results, those in folders of their own too, with its file in `folder`."""
    for path in sorted(folder.rglob("*.json")):
        content = json.loads(path.read_text())
        rows = content if isinstance(content, list) else content.get("rows", [])
        if isinstance(content, dict):
            benches = [bench["extra_info"] for bench in content.get("benchmarks", ())]
            rows = rows + [row for row in benches if "op" in row]
        yield from ((path.relative_to(folder), row) for row in rows)


def gone(row: Row) -> bool:
    """Whether what the row measured was deleted since."""
    return any(pattern.search(row.get(key) or "") for key, pattern in GONE.items())


def _title(row: Row) -> str:
    if "op" in row:
        case = row["case"].partition(",")[0]
        return row["op"] if case == "op" else f"{row['op']}, {case}"
    return f"quality of {row['study'] if row.get('study') in STUDIES else _bare(row['policy'])}"


def _bare(policy: str) -> str:
    """A policy without options, which may have some of their own (`exact`'s draft)."""
    while "(" in policy:
        policy, changed = re.subn(r"\([^()]*\)", "", policy)
        if not changed:
            break
    return policy


def _options(policy: str) -> dict[str, set[str]]:
    """The methods of a policy, and the options that it names of each."""
    terms = re.findall(r"([\w-]+)(?:\(([^)]*)\))?", policy)
    named = {name: set(re.findall(r"(\w+)=", options)) for name, options in terms}
    named |= {"momo": set(), "sketch": set()} if "auto" in named else {}  # what it takes
    return named | ({_draft(policy): set()} if "exact" in named else {})


def _aligned(lines: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


class History:
    """The repository at `root`: what changed between a row's commit and HEAD."""

    def __init__(self, root: Path):
        self.root = root
        self._codes: dict[str, str] = {}  # by blob
        try:
            top = self._git("rev-parse", "--show-toplevel").strip()
            shallow = self._git("rev-parse", "--is-shallow-repository").strip()
        except (OSError, subprocess.CalledProcessError) as error:
            raise NoHistoryError("this tree has no git history") from error
        if Path(top).resolve() != root.resolve():
            raise NoHistoryError("this tree is not a repository of its own")
        if shallow == "true":
            raise NoHistoryError("the clone is shallow, so commits of rows are missing")

    def state(self, row: Row) -> State:
        """Whether older code measured this row."""
        if gone(row):
            return State("gone")
        commit = row.get("commit") or ""
        if commit in ("", "unknown"):
            return State("no commit")
        if commit.endswith("-dirty"):
            return State("dirty")
        if not self._has(commit):
            return State("unknown commit")
        changed = self._changed(commit) & dependencies(self.root, row)
        if changed and row.get("gpu", "none").startswith("NVIDIA") and self._compiles(commit, row):
            return State("")
        if not changed:
            return State("")
        files = tuple(sorted(changed, key=lambda path: (f"{OPS}/common/" in path, path)))
        return State("stale", self._newest(commit, files), files)

    def _compiles(self, commit: str, row: Row) -> bool:
        """Whether the row's kernels and defaults are known, and today's are the same."""
        ran, now = self._kernels(commit), self._kernels("HEAD")
        files = dependencies(self.root, row)
        known = {**_exports(self.root), **OF_TORCH}
        ops = {op for op, path in known.items() if path in files and op.islower()}
        ops = {op for op in ops if self._had(commit, op)}
        return bool(ran and now) and same(ran, now, ops, _options(row.get("policy") or ""))

    @functools.cache  # noqa: B019
    def _had(self, commit: str, op: str) -> bool:
        """Whether there was an op of this name at this commit."""
        asked = ["git", "grep", "-q", "-w", op, commit, "--", OPS]
        return subprocess.run(asked, cwd=self.root, capture_output=True).returncode == 0

    @functools.cache  # noqa: B019
    def _kernels(self, commit: str) -> dict[str, Any] | None:
        """What was written of the kernels at this commit; None: nothing, or of other code."""
        kept = self.root / "bench" / "compiled" / f"{commit[:7]}.json"
        if kept.is_file():
            return json.loads(kept.read_text())
        try:
            found = json.loads(self._git("show", f"{commit}:bench/compiled.json"))
        except subprocess.CalledProcessError:
            return None
        return found if found["code"] == self._ops_code(commit) else None

    @functools.cache  # noqa: B019
    def _ops_code(self, commit: str) -> str:
        """What `ops_code` gives for the tree of this commit."""
        listed = self._git("ls-tree", "-r", commit, "--", OPS).splitlines()
        files = [line.split(maxsplit=3)[2:] for line in listed if line.endswith(".py")]
        blobs = [blob for blob, path in files if "reference" not in Path(path).name]
        self._read(blobs)
        return digest_of(self._codes[blob] for blob in blobs)

    @functools.cache  # noqa: B019
    def _newest(self, commit: str, files: tuple[str, ...]) -> str:
        return self._git("log", "-1", "--format=%h", f"{commit}..HEAD", "--", *files).strip()

    @functools.cache  # noqa: B019 - one object a run
    def _has(self, commit: str) -> bool:
        asked = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
        return subprocess.run(asked, cwd=self.root, capture_output=True).returncode == 0

    @functools.cache  # noqa: B019
    def _changed(self, commit: str) -> frozenset[str]:
        """Today's paths whose code is not what it was, where it was, at this commit."""
        raw = self._git("diff", "--raw", "-M40%", "--no-abbrev", "-z", commit, "HEAD", "--", OPS,
                        POLICIES, "attnplug/models", "attnplug/trace", "attnplug/eval")  # fmt: skip
        fields = iter(raw.split("\0")[:-1])
        pairs: dict[str, tuple[str, str]] = {}
        for entry in fields:
            *_, before, after, status = entry.split(" ")
            path = next(fields)
            path = next(fields) if status[0] in "RC" else path
            if path.endswith(".py") and status[0] != "D":
                pairs[path] = before, after
        self._read(itertools.chain.from_iterable(pairs.values()))
        return frozenset(
            p for p, (old, new) in pairs.items() if self._codes[old] != self._codes[new]
        )

    def _read(self, blobs: Iterable[str]) -> None:
        """Keep the code of these blobs, in one process; a blob of zeros is no file."""
        wanted = [blob for blob in dict.fromkeys(blobs) if blob not in self._codes]
        self._codes.update((blob, "") for blob in wanted if not blob.strip("0"))
        wanted = [blob for blob in wanted if blob.strip("0")]
        told = subprocess.run(
            ["git", "cat-file", "--batch"], cwd=self.root, input="\n".join(wanted).encode(),
            capture_output=True, check=True,
        ).stdout  # fmt: skip
        for blob in wanted:
            head, _, told = told.partition(b"\n")
            size = int(head.split()[2])
            self._codes[blob], told = code(told[:size].decode()), told[size + 1 :]

    def _git(self, *arguments: str) -> str:
        asked = ["git", *arguments]
        return subprocess.run(
            asked, cwd=self.root, capture_output=True, text=True, check=True
        ).stdout


def digest_of(codes: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(codes).encode()).hexdigest()[:16]


def ops_code(root: Path) -> str:
    """A digest of the code of all ops in this folder, but for the CPU's references."""
    paths = sorted((root / OPS).rglob("*.py"), key=Path.as_posix)
    return digest_of(code(path.read_text()) for path in paths if "reference" not in path.name)


def code(source: str) -> str:
    """A module without comments, docstrings, imports and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            body = [each for each in node.body if not isinstance(each, ast.Import | ast.ImportFrom)]
            if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
                body = body[1:]
            node.body = body
    return ast.dump(tree)


def dependencies(root: Path, row: Row) -> frozenset[str]:
    """The package files whose code a row was measured by, as far as they are there today. `exact`
    imports all methods that can draft; a row ran dense and the draft that it names."""
    found = set(MODEL_FILES) if row.get("case") in WHOLE_MODEL else set()
    for path in roots(root, row):
        parts = [path]
        if path == EXACT:
            found.add(path)
            parts = [f"{POLICIES}/{name}.py" for name in ("dense", _draft(row["policy"]))]
        for part in parts:
            found |= _reached(root, part)
    return frozenset(found)


def _draft(policy: str) -> str:
    """The method that drafts for `exact`."""
    named = re.search(r"draft=['\"](\w+)", policy)
    return named[1] if named else "gather"


def roots(root: Path, row: Row) -> list[str]:
    """The files that the row's op or policy names."""
    if "op" in row:
        names = [row["op"]]
        if row["case"] == "e2e-decode" and row["op"] == "dense_decode":
            names.append("dense")
    elif row.get("study") in STUDIES:
        return [STUDIES[row["study"]]]
    else:
        names = _bare(row["policy"]).split("+")
    found = []
    for name in names:
        policy = f"{POLICIES}/{name}.py"
        known = {**_exports(root), **NAMED_ELSEWHERE}
        known |= OF_RIVALS if row.get("study") == "rivals" else {}
        path = policy if (root / policy).is_file() else known.get(name)
        found += [path] if path else []
    return found


@functools.cache
def _exports(root: Path) -> dict[str, str]:
    """Where each name that `attnplug.ops` exports is defined."""
    tree = ast.parse((root / OPS / "__init__.py").read_text())
    return {
        alias.name: f"{node.module.replace('.', '/')}.py"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "attnplug"
        for alias in node.names
    }


@functools.cache
def _reached(root: Path, path: str) -> frozenset[str]:
    """The file and what it imports of ops and of its policy's own files, however deep."""
    found, open_ = set(), [path]
    while open_:
        path = open_.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(ast.parse((root / path).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                open_ += [each for each in _imported(root, node) if each not in NOT_FOLLOWED]
    return frozenset(found)


def _imported(root: Path, node: ast.ImportFrom) -> Iterator[str]:
    """Files of ops and policies that this statement imports from."""
    module = (node.module or "").replace(".", "/")
    for alias in node.names:
        named = f"{module}/{alias.name}.py"  # a module of a package
        path = _exports(root).get(alias.name, "") if module == OPS else f"{module}.py"
        for each in (named, path):
            if each.startswith((f"{OPS}/", f"{POLICIES}/")) and (root / each).is_file():
                yield each


if __name__ == "__main__":
    sys.exit(main())
