"""The rules of the house: no circle of imports, no arrow up, families of ops on their own, launches
by keyword, files of a readable length. Each rule is tried on a small house that breaks it."""

from pathlib import Path

import house as source
import pytest
from house import House

HOUSE = House.of(source.ROOT)
ARROWS = HOUSE.arrows()


def built(folder: Path, **files: str) -> House:
    """A small package `attnplug` with the given modules: "ops__gather__attend" and its text."""
    for name, text in {"": "", **files}.items():
        path = folder.joinpath("attnplug", *name.split("__"))
        path = path / "__init__.py" if not name else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return House.of(folder)


def test_imports_have_no_circle():
    assert source.circles(ARROWS) == []


def test_every_arrow_is_allowed():
    assert source.forbidden(ARROWS) == []


def test_ops_has_no_loose_file():
    assert source.loose_files(HOUSE) == [], "give it to a family: attnplug/ops/NAME/"


def test_launches_pass_their_arguments_by_keyword():
    found = list(source.launches(HOUSE, "attnplug.ops"))
    assert len(found) > 30  # the launches are found at all
    worst = sorted(found, key=lambda launch: -launch.positional)[:5]
    assert source.share(found) < source.POSITIONAL, (
        f"{source.share(found):.0%} of the launch arguments are positional; by keyword: {worst}"
    )


def test_references_are_compiled_in_one_place():
    """numba's own decorator raises where it can write to no folder."""
    users = [module for module, path in HOUSE.files.items() if "numba.njit" in path.read_text()]
    assert users == ["attnplug.ops.common.numba_cache"], "elsewhere, import njit and prange from it"


def test_triton_is_imported_in_one_place():
    """Elsewhere a file could not be imported on macOS and Windows."""
    users = [module for module in HOUSE.files if "triton" in HOUSE.packages(module)]
    assert users == ["attnplug.ops.common.triton"], "elsewhere, import triton and tl from it"


def test_tensors_take_no_defaults_of_the_user():
    assert source.defaults(HOUSE) == [], "pass device and dtype"


def test_shapes_of_zeros_compile_with_the_oldest_triton(tmp_path):
    assert source.fields_of_shapes(HOUSE) == []
    text = "@triton.jit\ndef f(SHAPE, n):\n    return tl.zeros([n, {}], tl.float32)\n"
    small = built(tmp_path, a=text.format("SHAPE.ROWS"), b=text.format("TABLE.ROWS"))
    assert source.fields_of_shapes(small) == ["a.py:3"]


def test_files_are_of_readable_length():
    found = source.long_files(HOUSE)
    assert found == [], f"split it, or write why at its head ({source.REASON!r} ...)"


def test_functions_take_few_parameters():
    found = source.long_signatures(HOUSE)
    assert found == [], "what travels together is one NamedTuple (attnplug/ops/common/views.py)"


def test_the_formatter_is_rarely_switched_off():
    found = source.skips(HOUSE)
    assert len(found) <= source.SKIPS, f"{len(found)} lines switch it off: {found[:10]} ..."


@pytest.mark.parametrize(
    "first, second",
    [
        ("import attnplug.b", "import attnplug.a"),
        ("from attnplug import b", "from attnplug.a import thing"),
        ("from .b import thing", "from . import a"),
        ("from attnplug.b import x", "def f():\n    from attnplug.a import y"),
        ("import attnplug.b", "if TYPE_CHECKING:\n    import attnplug.a"),
    ],
)
def test_a_circle_is_found(tmp_path, first, second):
    small = built(tmp_path, a=first, b=second, c="import attnplug.a")
    assert source.circles(small.arrows()) == [["attnplug.a", "attnplug.b"]]


def test_a_longer_circle_is_found_once(tmp_path):
    ring = {"a": "import attnplug.b", "b": "import attnplug.c", "c": "import attnplug.a"}
    found = source.circles(built(tmp_path, **ring).arrows())
    assert found == [["attnplug.a", "attnplug.b", "attnplug.c"]]
    ring["c"] = "import torch"
    assert source.circles(built(tmp_path, **ring).arrows()) == []


def test_packages_are_found(tmp_path):
    text = "import numpy.linalg\nfrom . import b\ndef f():\n    from triton import language"
    assert built(tmp_path, a=text, b="").packages("attnplug.a") == {"attnplug", "numpy", "triton"}


@pytest.mark.parametrize(
    "module, other, rule",
    [
        ("models__hf", "policies__base", "models never import policies"),
        ("ops__gather__attend", "ops__gvr__topk", "imports no other family"),
        ("ops__gather__kernels__attend", "ops__gvr__kernels__topk", "imports no other family"),
        ("ops__gather__attend", "policies__base", "neither policies nor models"),
        ("ops__common__rows", "models__cache", "neither policies nor models"),
        ("ops__common__rows", "ops__gather__attend", "imports no other family"),
        ("ops__common__rows", "call", "ops/common imports errors only"),
        ("ops__gather__attend", "ops__common__rows", ""),
        ("ops__gather__attend", "ops__gather__select", ""),
        ("ops__common__rows", "errors", ""),
        ("policies__base", "models__cache", ""),
        ("policies__base", "ops__gather__attend", ""),
    ],
)
def test_a_forbidden_arrow_is_found(tmp_path, module, other, rule):
    name = "attnplug." + other.replace("__", ".")
    small = built(tmp_path, **{other: "thing = 1", module: f"from {name} import thing"})
    found = source.forbidden(small.arrows())
    assert len(found) == (1 if rule else 0)
    assert all(rule in line and name in line for line in found)


def test_the_door_of_ops_is_closed_from_inside(tmp_path):
    small = built(tmp_path, ops__gather__attend="from attnplug.ops import topk")
    (tmp_path / "attnplug/ops/__init__.py").write_text("topk = 1")
    assert "door of ops" in source.forbidden(House.of(tmp_path).arrows())[0]
    assert source.forbidden(small.arrows()) == []  # no such module yet: nobody is imported


def test_a_loose_file_is_found(tmp_path):
    small = built(tmp_path, ops__fast="", ops__gather__attend="")
    assert source.loose_files(small) == ["fast.py"]


def test_launch_arguments_are_counted(tmp_path):
    text = """
kernel[grid](a, b, *q.stride(), C=1, D=2)
launch_kernel(kernel, a, grid=grid, b=b)
kernel.run(a, grid=grid)
subprocess.run(a)
module.kernels["name"][(1, 2)](a)
list[int](a, b)
TABLE["name"](a, b)
plain(a, b)
"""
    small = built(tmp_path, ops__gather__attend=text, models__hf="kernel[grid](a)")
    found = list(source.launches(small, "attnplug.ops"))
    assert [(launch.positional, launch.arguments) for launch in found] == [(3, 5), (1, 3), (1, 1)]
    assert source.share(found) == 5 / 9


def test_tensors_of_default_device_or_dtype_are_found(tmp_path):
    text = """
torch.empty(3, device="cpu")
torch.empty(3, dtype=torch.int8)
torch.arange(3, device="cpu")
torch.arange(3)
torch.zeros(3, **like)
torch.full((3,), 1.0, dtype=torch.float32, device="cpu")
x.new_zeros(3)
np.empty(3)
"""
    assert source.defaults(built(tmp_path, a=text)) == ["a.py:2", "a.py:3", "a.py:5"]


def test_a_long_file_is_found(tmp_path):
    body = "x = 1\n" * source.LONGEST
    excused = (
        f'"""Kept whole.\n\nIt has\n{source.REASON.capitalize()} one proof\nruns through."""\n'
    )
    small = built(tmp_path, a=body, b=body + "y = 2\n", c=excused + body)
    script = tmp_path / "attnplug/page.js"
    script.write_text(body + body)
    assert source.long_files(small) == ["b.py: 451 lines", "page.js: 900 lines"]


def test_a_long_signature_is_found(tmp_path):
    names = [f"x{i}" for i in range(source.MOST)]
    few, many = ", ".join(names), ", ".join([*names[:10], "/", *names[10:20], "*", *names[20:]])
    text = f"def few({few}): ...\nasync def many({many}, last): ...\n"
    assert source.long_signatures(built(tmp_path, a=text)) == ["a.py: many has 31"]


def test_a_switched_off_formatter_is_found(tmp_path):
    small = built(tmp_path, a="x = 1\ny = [1]  # fmt: skip\n# fmt: off\n", b="z = 1\n")
    assert source.skips(small) == ["a.py:2", "a.py:3"]
