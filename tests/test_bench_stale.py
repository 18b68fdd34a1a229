"""bench/stale.py: which rows older code measured, and bench/report.py's marks of them."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnplug.policies import methods

ROOT = Path(__file__).parent.parent
OP = "attnplug/ops/one/scan.py"
KERNEL = "attnplug/ops/one/kernels/walk.py"
ROW = dict(op="scan", case="op", n=1, commit="")


@pytest.fixture
def stale(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    yield importlib.import_module("stale")
    for name in ("report", "stale", "_plots", "_results", "_kernel_digests"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def ours():
    """The history of this repository, which reads many files of old commits, once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        stale = importlib.import_module("stale")
        try:
            return stale.History(ROOT)
        except stale.NoHistoryError as error:
            pytest.skip(str(error))


def git(folder, *arguments):
    named = {
        f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    return subprocess.run(
        ["git", "-c", "init.defaultBranch=main", *arguments], cwd=folder, check=True,
        capture_output=True, text=True, env=os.environ | named,
    ).stdout.strip()  # fmt: skip


def write(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def commit(folder, **files):
    write(folder, {path.replace("__", "/") + ".py": text for path, text in files.items()})
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "-m", "on")
    return git(folder, "rev-parse", "--short=12", "HEAD")


@pytest.fixture
def house(tmp_path):
    """A package with an op of two files, an op beside it and a policy that calls the first."""
    root = tmp_path / "house"
    root.mkdir()
    git(root, "init", "--quiet")
    write(root, {
        "attnplug/ops/__init__.py": "from attnplug.ops.one.scan import scan\n"
        "from attnplug.ops.two.sort import sort\n",
        OP: '"""Old words."""\nfrom attnplug.ops.one.kernels.walk import walk\n\n'
        "def scan(x):\n    return walk(x) + 1\n",
        KERNEL: "def walk(x):\n    return x\n\n# a long enough file for git to see that it moved\n"
        "def step(x):\n    return x * 2\n",
        "attnplug/ops/two/sort.py": "def sort(x):\n    return sorted(x)\n",
        "attnplug/policies/near.py": "from attnplug.ops import scan\n\ndef attend(q):\n"
        "    return scan(q)\n",
    })  # fmt: skip
    return root


def test_a_row_is_stale_once_code_that_it_depends_on_changes(stale, house):
    first = commit(house)
    row = ROW | {"commit": first}
    assert stale.History(house).state(row) == stale.State("")
    commit(house, attnplug__ops__two__sort="def sort(x):\n    return x\n")  # another op's
    assert stale.History(house).state(row).word == ""
    changed = (house / KERNEL).read_text().replace("return x\n", "return x + 1\n")
    second = commit(house, attnplug__ops__one__kernels__walk=changed)
    commit(house)
    for each in (row, {"task": "needle", "policy": "near(k=8, of='a+b')", "commit": first}):
        state = stale.History(house).state(each)
        assert (state.word, state.files) == ("stale", (KERNEL,))
        assert second.startswith(state.newest)
    assert stale.History(house).state(row | {"commit": second}).word == ""
    assert stale.History(house).state(row | {"op": "sort"}).files == ("attnplug/ops/two/sort.py",)


def test_words_imports_and_places_are_no_code(stale, house):
    row = ROW | {"commit": commit(house)}
    text = (house / OP).read_text().replace("Old words.", "New words.")
    commit(house, attnplug__ops__one__scan=text.replace("return", "# why\n    return"))
    assert stale.History(house).state(row).word == ""
    git(house, "mv", KERNEL, "attnplug/ops/one/walk.py")
    commit(house, attnplug__ops__one__scan=text.replace(".kernels.walk", ".walk"))
    stale._reached.cache_clear()
    assert "attnplug/ops/one/walk.py" in stale.dependencies(house, row)
    assert stale.History(house).state(row).word == ""
    commit(house, attnplug__ops__one__walk=(house / "attnplug/ops/one/walk.py").read_text() * 2)
    assert stale.History(house).state(row).files == ("attnplug/ops/one/walk.py",)


GPU_ROW = ROW | {"gpu": "NVIDIA H200", "policy": "near"}


def kernels(stale, folder, case="a1", default="8", code=None):
    """bench/compiled.json of the tree in this folder."""
    found = {"code": code or stale.ops_code(folder), "triton": "3.8.0"}
    found |= {"ops": {"scan": {"bench": case}}, "defaults": {"near": {"k": default}}}
    write(folder, {"bench/compiled.json": json.dumps(found)})


def test_a_row_of_a_gpu_is_stale_once_its_kernels_or_defaults_change(stale, house):
    def word(**row):
        stale._reached.cache_clear()
        return stale.History(house).state(GPU_ROW | {"commit": first} | row).word

    kernels(stale, house)
    first = commit(house)
    changed = (house / KERNEL).read_text().replace("return x\n", "y = x\n    return y\n")
    write(house, {KERNEL: changed})
    commit(house)
    assert word() == "stale"  # nobody has looked at today's kernels
    kernels(stale, house)
    commit(house)
    assert word() == "" and word(gpu="none") == "stale" and word(op="sort") == ""
    kernels(stale, house, default="16")
    commit(house)
    assert word() == "stale" and word(policy="far") == ""
    kernels(stale, house, case="b2")
    commit(house)
    assert word() == "stale"
    kernels(stale, house, code="of another tree")
    commit(house)
    assert word() == "stale"


def test_kernels_of_commits_before_the_file_lie_beside_it(stale, house):
    first = commit(house)
    changed = (house / KERNEL).read_text().replace("x * 2", "2 * x")
    kernels(stale, house)
    (house / "bench" / "compiled").mkdir()
    (house / "bench/compiled.json").rename(house / "bench" / "compiled" / f"{first[:7]}.json")
    write(house, {KERNEL: changed})
    kernels(stale, house)
    commit(house)
    assert stale.History(house).state(GPU_ROW | {"commit": first}).word == ""
    other = {"triton": "3.9.0", "ops": {"scan": {"bench": "a1"}}, "defaults": {}}
    write(house, {f"bench/compiled/{first[:7]}.json": json.dumps(other)})
    assert stale.History(house).state(GPU_ROW | {"commit": first}).word == "stale"


def test_a_digest_is_of_instructions_in_any_order_and_of_what_they_are_given(stale, tmp_path):
    digests = importlib.import_module("_kernel_digests")
    launch = dict(kernel="k", grid=[4], shared=64, warps=4, maxnreg=None, pdl=False)
    launch["passed"] = ["%r:1 = 0.125", "%rd:2 = input 3 from 0"]
    text = "add.s32 %r:1, %r:2, 7;\nmul.f32 %f:1, %f:2, %f:3;\n"

    def found(text=text, **changed):
        tmp_path.joinpath("r.ptx").mkdir(exist_ok=True)
        tmp_path.joinpath("r.ptx", "0123456789abcdef.ptx").write_text(text)
        record = launch | {"ptx": "0123456789abcdef00"} | changed
        tmp_path.joinpath("r.json").write_text(json.dumps({"dense_decode | bench | 0 | k": record}))
        digests.write_digests(tmp_path / "r.json", tmp_path / "out.json", ROOT)
        return json.loads(tmp_path.joinpath("out.json").read_text())

    first = found()
    assert first["code"] == stale.ops_code(ROOT) and first["defaults"]["gather"]["k"] == "256"
    assert found("mul.f32 %f:9, %f:1, %f:2;\nadd.s32 %r:3, %r:0, 7;\n") == first
    assert found(passed=["%rd:9 = input 5 from 0", "%r:4 = 0.125"]) == first
    other = [
        found(text.replace(" 7;", " 8;")), found(grid=[5]), found(warps=8),
        found(passed=["%r:1 = 0.25", "%rd:2 = input 3 from 0"]),
        found(passed=["%r:1 = 0.125", "%rd:2 = input 3 from 4"]),
    ]  # fmt: skip
    assert all(each["ops"]["dense_decode"] != first["ops"]["dense_decode"] for each in other)
    assert all(each["ops"]["fit_bases"] == first["ops"]["fit_bases"] for each in other)


@pytest.mark.parametrize(
    ("named", "word"),
    [
        ("", "no commit"),
        ("unknown", "no commit"),
        ("0123456789ab", "unknown commit"),
        ("0123456789ab-dirty", "dirty"),
    ],
)
def test_a_commit_that_cannot_be_found_is_named_as_what_it_is(stale, house, named, word):
    commit(house)
    assert stale.History(house).state(ROW | {"commit": named}) == stale.State(word)


def test_without_history_nothing_is_compared(stale, house, tmp_path, monkeypatch, capsys):
    commit(house)
    commit(house)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--depth=1", house.as_uri(), str(clone))
    bare = tmp_path / "copied"
    bare.mkdir()
    for folder, reason in ((clone, "shallow"), (bare, "no git history")):
        with pytest.raises(stale.NoHistoryError, match=reason):
            stale.History(folder)
        monkeypatch.setattr(stale, "ROOT", folder)
        assert stale.main() == 0 and reason in capsys.readouterr().out


def test_the_page_of_results_marks_what_older_code_measured(stale, house):
    report = importlib.import_module("report")
    fresh = dict.fromkeys(report.TIMING, "") | dict.fromkeys(report.RUN, "today")
    fresh |= dict(ROW, heads_q=1, heads_kv=1, batch=1, peer=None, ratio=None, ceiling_fraction=None)
    fresh |= dict(p20_us=1.0, p50_us=1.0, p80_us=1.0, head_dim=64, dtype="bf16")
    old = fresh | {"commit": commit(house), "n": 2}
    changed = (house / OP).read_text().replace("+ 1", "+ 2")
    rows = [old, fresh | {"commit": commit(house, attnplug__ops__one__scan=changed)}]
    rows.append(fresh | {"commit": "0123456789ab", "n": 3})
    marks = report.stale_marks(rows, house)
    assert marks == {id(rows[0]): "stale", id(rows[2]): "unknown"}
    marked, unmarked = report.results_page(rows, [], marks), report.results_page(rows, [])
    assert marked.count("(#runs) stale |") == marked.count("(#runs) unknown |") == 1
    assert marked != unmarked and report.STALE_MARK.sub("", marked) == unmarked


def test_no_first_page_shows_a_row_that_is_stale(stale, ours, monkeypatch):
    report = importlib.import_module("report")
    monkeypatch.setattr(report, "History", lambda root: ours)
    timing, _ = report.load(ROOT / "bench" / "results")
    marks = report.stale_marks(timing, ROOT)
    assert marks
    shown = report.served(timing)
    for page in ("docs/index.md", "README.md"):
        text = (ROOT / page).read_text()
        assert not report.shows_stale(text, shown, marks), page
    wanted = ("dense", "call", 8192)
    one = next(row for row in shown if (row["op"], row["case"], row["n"]) == wanted)
    assert report.shows_stale(text, shown, {id(one): "stale"})


def ran_a_policy(stale, row):
    """All but the rows of an op alone, which has plain arguments, and of the trace viewer."""
    whole = (*stale.WHOLE_MODEL, "step")
    return "op" not in row or row["op"] in (*methods(), "tiered") or row["case"] in whole


def test_every_row_of_a_policy_names_it_and_each_policy_has_one_spelling(stale):
    row_policy = importlib.import_module("_results").row_policy
    studies = importlib.import_module("studies").STUDIES
    as_asked = {name for name, options in studies.items() if options.as_asked}
    seen = set()
    for file, row in stale.read_rows(ROOT / "bench" / "results"):
        policy = row.get("policy")
        assert policy or not ran_a_policy(stale, row), (file, row)
        if policy in seen or stale.gone(row):
            continue
        if set(re.findall(r"[\w-]+", stale._bare(policy or ""))) & set(methods()):
            if row.get("study") not in as_asked:  # which ask a default and min_tokens=0 beside it
                assert row_policy(policy) == policy, file
            seen.add(policy)
    assert {"dense", "momo", "gather", "gvr", "sketch", "certified"} < seen


def test_every_row_of_ours_is_known_to_depend_on_something(stale):
    """All but rows of no code of ours: transformers alone, and what the bench computes itself."""
    seen, foreign = 0, ("stock", "QuantizedCache", "the 8 blocks with", "the 32 blocks with")
    for file, row in stale.read_rows(ROOT / "bench" / "results"):
        if not stale.gone(row) and ("op" in row or not row["policy"].startswith(foreign)):
            assert stale.dependencies(ROOT, row), (file, row)
            seen += 1
    assert seen > 1000
    tier = stale.dependencies(ROOT, dict(op="tiered", case="op"))
    assert {"attnplug/ops/gather/tiered_decode.py", "attnplug/ops/gather/kernels/tiered.py"} < tier
    assert not any("/momo/" in path for path in tier)
    selector = dict(study="frontier", policy="double-sparsity(bytes=16, k=1024)")
    assert "bench/_selectors.py" in stale.dependencies(ROOT, selector)
    rival = dict(selector, policy="quest(like='gather')", study="rivals")
    assert stale.roots(ROOT, rival) == ["bench/rivals.py"]
    assert stale.roots(ROOT, dict(rival, policy="pooled_blocks")) == ["bench/rival_prefills.py"]
    mask = dict(study="masks", policy="vertical-slash(k=16)")
    assert "bench/rival_masks.py" in stale.dependencies(ROOT, mask)


def test_every_row_of_ours_names_a_clean_commit_of_this_repository(stale, ours):
    words = {}
    for file, row in stale.read_rows(ROOT / "bench" / "results"):
        words.setdefault(ours.state(row).word, []).append(str(file))
    assert set(words) <= {"", "stale", "gone"}, words.keys()


def test_rows_of_deleted_options_are_history(stale, tmp_path):
    """Pages show the others, and a new run of a study keeps their text."""
    report = importlib.import_module("report")
    row_policy = importlib.import_module("_results").row_policy
    old = "gather(scoring='mean', min_tokens=0)"
    asked = dict(task="kl", model="m", n=8192, trials=1, value=1.0)
    rows = [asked | {"policy": policy} for policy in (old, "gather(scoring='bounds')")]
    (tmp_path / "eval.json").write_text(json.dumps({"rows": rows}))
    assert [row["policy"] for row in report.load(tmp_path)[1]] == ["gather(scoring='bounds')"]
    assert [stale.gone(row) for row in rows] == [True, False] and row_policy(old) == old
    found = sum(stale.gone(row) for _, row in stale.read_rows(ROOT / "bench" / "results"))
    assert found > 90


def test_a_row_of_exact_depends_on_the_draft_that_it_names(stale):
    for policy, draft, others in (
        ("exact", "gather", ("sketch", "gvr")),
        ("momo+exact(draft='sketch(k=4096)')", "sketch", ("gather", "gvr")),
        ('exact(draft="gvr", m=3)', "gvr", ("gather", "sketch")),
    ):
        row = {"policy": policy, "case": "generate", "n": 1}
        files = stale.dependencies(ROOT, row)
        own, dense = (f"attnplug/policies/{name}.py" for name in ("exact", "dense"))
        assert {own, dense, f"attnplug/policies/{draft}.py"} <= files
        assert not {f"attnplug/policies/{name}.py" for name in others} & files
        assert draft in stale._options(policy)
