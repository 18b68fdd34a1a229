"""The documentation is true: its examples run and print what it says, links resolve, every option
of every method stands on the method's page, and no figure is quoted outside the results."""

import dataclasses
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import ops_page
import pytest
import torch
import transformers
import yaml
from PIL import Image
from ranks import needs_gloo, run_ranks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import attnplug
import attnplug.models.pretrained
from attnplug.cli import app
from attnplug.models.names import CACHE
from attnplug.policies.crossover import NEVER
from attnplug.testing import tiny_model

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# generated, and notes of what was tried: nothing to run there, and figures are their matter
OTHERS = [page for page in PAGES if page.name == "results.md" or page.parent.name == "log"]
PROSE = [page for page in PAGES if page not in OTHERS]
ROOT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
LINKED = [*PAGES, *ROOT_PAGES, ROOT / "CHANGELOG.md", ROOT / "bench" / "README.md"]
RUN = [page for page in PROSE if "```python" in page.read_text()]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def named(name: str) -> Path:
    """The page of this name, in whichever folder it lies."""
    (page,) = DOCS.rglob(name)
    return page


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block, in order."""
    return FENCED.findall(page.read_text())


def prose(page: Path) -> str:
    """The page without its fenced blocks and generated tables."""
    text = FENCED.sub("", page.read_text())
    return re.sub(r"<!-- (results|numbers|choice)\b.*?<!-- /\1 -->", "", text, flags=re.DOTALL)


def import_page(page: Path, folder: Path):
    """Import all Python blocks of a page as one module. Triton and numba read a kernel's source
    from its file, and dataclasses look their module up, so it is a real one."""
    name = "docs_" + page.stem.replace("-", "_")
    path = folder / f"{name}.py"
    code = "\n\n".join(text for language, text in blocks(page) if language == "python")
    # A page says `cache=` and `first.cache`, as transformers from 5.24 on does.
    path.write_text(re.sub(r"\bcache(?==\w)|(?<==first\.)cache\b", CACHE, code))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that no vocabulary has to be fetched."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index + 1 for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab={"<pad>": 0, **vocabulary}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", padding_side="left"
    )


@pytest.fixture
def own_methods(monkeypatch):
    """What a page registers is gone after the test."""
    methods = dict(attnplug.policies._METHODS)
    monkeypatch.setattr(attnplug.policies, "_METHODS", methods)


@pytest.fixture
def small_world(monkeypatch):
    """`load` gives a tiny model of SmolLM2's depth and length, and torch.compile without a backend
    gives the function itself: thirty layers take Dynamo half a minute, and the contract tests
    compile."""
    model = tiny_model(num_hidden_layers=30, vocab_size=300, max_position_embeddings=8192)
    found = model, byte_tokenizer()
    monkeypatch.setattr(attnplug.models.pretrained, "load", lambda name, device=None: found)
    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda fn, **o: compile(fn, **o) if "backend" in o else fn
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, threads that wait for each other cost the most
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("own_methods", "small_world")
@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_examples_run_and_print_what_the_page_says(page, tmp_path, capsys):
    import_page(page, tmp_path)
    printed = capsys.readouterr().out
    for (language, _), (kind, text) in pairwise(blocks(page)):
        if language == "python" and kind == "text":
            before, found, printed = printed.partition(text)
            assert found and not before.strip(), f"printed {before!r}, the page shows {text!r}"
    assert not printed.strip(), "the page does not show all that it prints"


@needs_gloo
def test_the_scripts_for_several_gpus_run_on_two_processes(tmp_path):
    """With a small model, on the CPU: gloo instead of NCCL."""
    tiny_model(vocab_size=300, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 20)
    split, weights, pieces, decoder = (
        text for language, text in blocks(named("several-gpus.md")) if language == "py"
    )
    here = {
        '"Qwen/Qwen2.5-7B-Instruct"': repr(str(tmp_path / "model")),
        '"book.txt"': repr(str(tmp_path / "book.txt")),
        '"nccl"': '"gloo"',
        '"cuda"': '"cpu"',
        "torch.cuda.set_device(rank)\n": "",
        '{"": rank}': '"cpu"',
        ".input_ids.to(rank)": ".input_ids",
    }
    imported = "from transformers.distributed import DistributedConfig\n"
    for name, code in (("split", split + weights), ("pieces", pieces + imported + decoder)):
        for theirs, ours in here.items():
            code = code.replace(theirs, ours)
        assert "cuda" not in code and "nccl" not in code
        script = tmp_path / f"{name}.py"
        script.write_text(f"{code}assert tokens.shape[1] > 8\ntorch.distributed.barrier()\n")
        run_ranks(str(script))


def test_the_kernel_of_the_page_compiles_for_a_gpu(tmp_path):
    """Its lines run in a process without Triton's interpreter, beside the op alone."""
    page = named("add-an-op.md")
    op, _, _ = page.read_text().partition("## 7. Test it")
    found = [text for language, text in FENCED.findall(op) if language == "python"]
    (tmp_path / "row_max_lse.py").write_text("\n\n".join(found))
    (code,) = [text for language, text in blocks(page) if language == "py"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"[1-9]\d* bytes of shared memory\n", done.stdout)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_the_readmes_lines_run(tmp_path, monkeypatch, capsys):
    """With a small model on the CPU, which has the length of the README's."""
    model = tiny_model(vocab_size=300, max_position_embeddings=131072)
    for cls, found in (("AutoModelForCausalLM", model), ("AutoTokenizer", byte_tokenizer())):
        monkeypatch.setattr(
            getattr(transformers, cls), "from_pretrained", lambda name, found=found, **_: found
        )
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("It was a dark and stormy night.")
    (code,) = [text for language, text in blocks(ROOT / "README.md") if language == "python"]
    said: dict = {}
    exec(code.replace('.to("cuda")', '.to("cpu")'), said)
    assert said["answer"].numel() > 1 and str(said["prompt"].input_ids.device) == "cpu"
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("momo", "gather", "dense in caches below"))
    with pytest.raises(attnplug.NotAppliedError):
        attnplug.report(model)


@pytest.mark.usefixtures("own_methods")
def test_the_entry_point_of_the_page_brings_the_method(tmp_path, monkeypatch):
    """An installed package with the page's method and the page's pyproject table."""
    page = named("add-a-policy.md")
    code = next(text for language, text in blocks(page) if "class Recent" in text)
    table = tomllib.loads(next(text for language, text in blocks(page) if language == "toml"))
    info = tmp_path / "recent_keys-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: recent-keys\nVersion: 0.1\n")
    groups = table["project"]["entry-points"]
    lines = [f"{key} = {value}" for key, value in groups["attnplug.policies"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[attnplug.policies]", *lines]))
    (tmp_path / "recent_keys.py").write_text(code)
    own = attnplug.policies.names()
    assert "recent" not in own
    monkeypatch.syspath_prepend(tmp_path)
    assert attnplug.policies.names() == sorted([*own, "recent"])
    assert str(attnplug.policies.parse("recent(window=8)")) == "recent(window=8)"
    monkeypatch.delitem(sys.modules, "recent_keys")


@pytest.mark.parametrize("method", sorted(attnplug.policies._METHODS))
def test_every_option_stands_on_its_methods_page(method):
    page = DOCS / "methods" / f"{method}.md"
    assert page.is_file(), (
        f"a method has a page: docs/methods/{page.name}, and a line in mkdocs.yml"
    )
    for option in dataclasses.fields(attnplug.policies.methods()[method]):
        row = f"| `{option.name}` | `{option.default!r}` |"
        assert row in page.read_text(), f"docs/methods/{page.name} needs a row {row} ..."


@pytest.mark.parametrize("error", [e for e in attnplug.__all__ if e.endswith("Error")])
def test_every_error_is_explained(error):
    assert re.search(rf"`(attnplug\.)?{error}`", named("quickstart.md").read_text())


def test_commands_exist():
    commands = {command.callback.__name__.replace("_", "-") for command in app.registered_commands}
    commands |= {group.name for group in app.registered_groups}
    for page in [*PROSE, *ROOT_PAGES]:
        named = re.findall(r"(?:`|&& )attnplug ([a-z-]+)", page.read_text())
        assert set(named) <= commands


def test_every_family_of_the_contract_is_named():
    source = (Path(__file__).parent / "contract" / "families.py").read_text()
    table = named("concepts.md").read_text().partition("## What is served")[2]
    table = table.partition("\n\nOther decoders")[0]
    line = (ROOT / "README.md").read_text().partition("Families that the contract tests run:")[2]
    families = re.findall(r'Family\(\s*"([\w-]+)"', source)
    assert len(families) > 9
    for text in (table, line.partition("\n\n")[0]):
        text = re.sub(r"[\s-]", "", text).lower()
        for family in families:
            assert family.removesuffix("-sliding").replace("-", "") in text


@pytest.mark.parametrize("page", ["README.md", "docs/start/choose-a-method.md"])
def test_the_lengths_from_which_a_method_pays_are_its_crossovers(page):
    rows = (ROOT / page).read_text().partition("| you need |")[2].partition("\n\n")[0].splitlines()
    told = 0
    for name, method in attnplug.policies.methods().items():
        if not hasattr(method, "crossover"):
            continue
        crossover = method().crossover(torch.device("cuda"))
        length = f"{crossover:,} tokens" if crossover < NEVER else f"`{name}(min_tokens=0)`; the"
        assert any(f"[`{name}`]" in row and length in row for row in rows), (name, length)
        told += 1
    assert told > 3


@pytest.mark.parametrize(
    "module", ["", ".policies", ".testing", ".trace", ".models.pretrained"], ids=lambda name: name
)
def test_every_public_name_is_in_the_api_reference(module):
    """The methods stand there as names of attnplug, the ops on a page of their own."""
    page = named("api.md").read_text()
    listed = re.findall(r"^::: attnplug([\w.]*)\.(\w+)$", page, re.MULTILINE)
    assert len(listed) == len(set(listed))
    own = {name for home, name in listed if home == module}
    public = set(importlib.import_module(f"attnplug{module}").__all__)
    assert own <= public
    missing = sorted(public - own - {name for home, name in listed if home == ""})
    assert not missing, f"docs/reference/api.md needs ::: lines of {', '.join(missing)}"


def test_every_op_stands_in_the_reference():
    page = ops_page.PAGE.read_text()
    listed = [match[2] for match in ops_page.MARKED.finditer(page)]
    missing = sorted(set(ops_page.ops()) - set(listed))
    assert not missing, (
        "docs/reference/ops.md needs a heading, a line '<!-- op NAME -->', a line '<!-- /op -->' "
        f"and a table of shapes for {', '.join(missing)}"
    )
    assert sorted(listed) == sorted(ops_page.ops()) and len(listed) > 17
    assert set(listed) <= set(ops_page.schemas())
    assert ops_page.fill(page) == page, "run python tests/ops_page.py"


@pytest.mark.parametrize("op", sorted(ops_page.ops()))
def test_the_shapes_of_the_reference_are_the_docstrings(op):
    section = ops_page.PAGE.read_text().partition(f"<!-- op {op} -->")[2]
    table = section.partition("<!-- /op -->")[2].partition("\n#")[0]
    docstring = re.sub(r"\s", "", ops_page.ops()[op].__doc__ or "")
    shapes = re.findall(r"`(\[[^`]*\])`", table)
    assert shapes, f"docs/reference/ops.md: {op} needs a table of its tensors' shapes"
    for shape in shapes:
        assert re.sub(r"\s", "", shape) in docstring, shape


def test_every_cited_paper_is_listed():
    papers = named("papers.md").read_text()
    for page in PROSE:
        for author in re.findall(r"([A-Z]\w+) et al\.,? \(?20\d\d", prose(page)):
            assert author in papers, (name_of(page), author)


def test_every_page_is_in_the_navigation():
    def files(entry) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [name for part in parts for name in files(part)]

    nav = files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert len(nav) == len(set(nav))
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES}
    assert pages == set(nav), f"mkdocs.yml, nav: differs by {sorted(pages ^ set(nav))}"


@pytest.mark.parametrize("page", sorted((DOCS / "log").glob("[!i]*.md")), ids=name_of)
def test_the_log_is_dated_and_newest_first(page):
    """Every entry under a date; what a later entry overtook names it."""
    text = page.read_text()
    dates = re.findall(r"^## (20\d\d-\d\d-\d\d): ", text, re.MULTILINE)
    assert dates and len(dates) == len(re.findall(r"^## ", text, re.MULTILINE))
    assert dates == sorted(dates, reverse=True)
    assert all("](" in note for note in re.findall(r"\*\*Superseded\*\* \((.*)", text))
    assert f"({page.name})" in (page.parent / "index.md").read_text()


def test_pictures_of_dark_pages_are_not_turned_over_in_dark_mode():
    """site.css turns over what is drawn on white."""
    pictures = {p.stem: Image.open(p).convert("L") for p in (DOCS / "img").glob("*.png")}
    dark = {name for name, picture in pictures.items() if picture.getpixel((3, 3)) < 128}
    rule = re.search(r"\):not\((.*)\) \{\n  filter: invert", (DOCS / "css/site.css").read_text())
    assert rule and set(re.findall(r'\[src\*="([\w-]+)"\]', rule[1])) == dark


def test_the_search_finds_pages_of_today_and_not_the_log():
    """Headings of the log are whole sentences, which would stand before the page that answers."""
    left_out = {
        p for p in PAGES if p.read_text().startswith("---\nsearch:\n  exclude: true\n---\n")
    }
    assert left_out == {*(DOCS / "log").glob("[!i]*.md"), named("results.md")}
    assert "search" in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["plugins"]


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_internal_links_resolve(page):
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page))):  # code links to nothing
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        if page.is_relative_to(DOCS):  # what mkdocs cannot serve is no link of a page
            assert linked.resolve().is_relative_to(DOCS), target
        if anchor:
            assert anchor in anchors(linked), target


def test_the_pages_that_sources_cite_exist():
    sources = [p for room in ("attnplug", "bench", "tests") for p in (ROOT / room).rglob("*.py")]
    cited = 0
    for path in sources:
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text()):
            cited += 1
            assert (ROOT / page).is_file(), f"{name_of(path)} cites {page}"
    assert cited > 20


def anchors(page: Path) -> set[str]:
    """The anchors that mkdocs gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}


FIGURE = re.compile(r"\b\d[\d.,]*\s?(?:x|×|us|µs|ms|s|[GT]B/s|TFLOP\S*|%)(?!\w)")


@pytest.mark.parametrize("page", [*PROSE, *ROOT_PAGES], ids=name_of)
def test_no_figure_outside_the_results(page):
    assert not FIGURE.findall(prose(page))


def test_figures_are_recognised():
    for text in ("1.3x faster", "ran in 12 us", "4.0 TB/s", "430 TFLOP/s", "captures 91%"):
        assert FIGURE.search(text)
    for text in ("2 Hq T^2 D", "128K", "8 heads", "float32", "gamma = 16", "`4 NQ top_k`"):
        assert not FIGURE.search(text)
