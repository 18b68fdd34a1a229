"""The house, counted from its source: who imports whom, which kernel launches pass arguments by
position, which files are long. tests/test_house.py holds it to its rules.

    python tests/house.py    # print the arrows between rooms, and the counts
"""

import ast
import builtins
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOOSE = {"__init__.py"}
LONGEST = 450
MOST = 30  # parameters of a function
SOURCES = {".py", ".js", ".css", ".html"}
REASON = f"over {LONGEST} lines because"  # at the head of a file that has more
HEAD = 20  # lines
SKIPS = 8
POSITIONAL = 0.20
INTEGERS = {"arange", "randint", "randperm"}  # what makes integers of integers
FACTORIES = INTEGERS | {
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randn",
    "tensor",
    "zeros",
}


@dataclass(frozen=True)
class House:
    """A package's source files by dotted module name."""

    package: str
    root: Path
    files: dict[str, Path]

    @classmethod
    def of(cls, root: Path, package: str = "attnplug") -> "House":
        files = {}
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return cls(package, root / package, files)

    def tree(self, module: str) -> ast.Module:
        return ast.parse(self.files[module].read_text())

    def imports(self, module: str) -> set[str]:
        """The package's modules that a module imports anywhere in its code, inside functions and
        under TYPE_CHECKING too. The import of a name from a package is an arrow to the submodule of
        that name if there is one, else to the package."""
        return {name for name in self._imported(module) if name in self.files} - {module}

    def packages(self, module: str) -> set[str]:
        """The packages, other people's too, that a module imports anything from."""
        return {name.partition(".")[0] for name in self._imported(module)}

    def _imported(self, module: str) -> set[str]:
        found: set[str] = set()
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(module, node)
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    found.add(inner if inner in self.files else base)
        return found

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        parts = module.split(".")
        own_package = self.files[module].name == "__init__.py"
        kept = parts[: len(parts) - node.level + (1 if own_package else 0)]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def arrows(self) -> dict[str, set[str]]:
        """Module -> the modules that it imports."""
        return {module: self.imports(module) for module in self.files}


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """The circles of imports: strongly connected modules, sorted, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(arrows[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for module in sorted(arrows):
        if module not in index:
            visit(module)
    return found


def forbidden(arrows: dict[str, set[str]], package: str = "attnplug") -> list[str]:
    """The arrows that the house does not allow, as "module -> module: rule"."""
    return [
        f"{module} -> {other}: {rule}"
        for module in sorted(arrows)
        for other in sorted(arrows[module])
        if (rule := _broken_rule(module, other, package))
    ]


def _broken_rule(module: str, other: str, package: str) -> str:
    """The rule that an arrow breaks, "" if none."""
    ops = f"{package}.ops"
    if _inside(module, f"{package}.models") and _inside(other, f"{package}.policies"):
        return "models never import policies"
    if not _inside(module, ops):
        return ""
    if _inside(other, f"{package}.policies") or _inside(other, f"{package}.models"):
        return "ops import neither policies nor models"
    family, family_of_other = _family(module, ops), _family(other, ops)
    if not family or family_of_other == family:
        return ""
    if not _inside(other, ops):
        allowed = other == f"{package}.errors"
        return "" if family != "common" or allowed else "ops/common imports errors only"
    if family_of_other == "common":
        return ""
    if not family_of_other:
        return "a family does not import the door of ops"
    return "a family of ops imports no other family, only common"


def _inside(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def _family(module: str, ops: str) -> str:
    """The family of ops that a module belongs to, "" for ops itself and other rooms."""
    parts = module.removeprefix(ops).strip(".").split(".")
    return parts[0] if _inside(module, ops) and not parts[0].startswith("_") else ""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: arguments by position, and all. A starred argument is one."""

    where: str
    positional: int
    arguments: int


def launches(house: House, room: str) -> Iterator[Launch]:
    """The kernel launches in a room. A launch is `launch_kernel(kernel, grid=..., ...)`, or a call
    of a subscript, `kernel[grid](...)`. A subscript with a string or a number is a table's entry,
    and a type's is a cast."""
    for module, path in house.files.items():
        if not _inside(module, room):
            continue
        for node in ast.walk(house.tree(module)):
            if isinstance(node, ast.Call) and _is_launch(node):
                given = node.args[isinstance(node.func, ast.Name) :]  # without the kernel
                count = len(given) + len(node.keywords)
                yield Launch(f"{path.name}:{node.lineno}", len(given), count)


def _is_launch(call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id == "launch_kernel"
    if not isinstance(function, ast.Subscript):
        return False
    index = function.slice
    if isinstance(index, ast.Constant | ast.UnaryOp):
        return False
    return not isinstance(function.value, ast.Name) or function.value.id not in vars(builtins)


def defaults(house: House) -> list[str]:
    """Tensors that are made without a device, or without a dtype that torch would not take from
    integers: torch.set_default_device and torch.set_default_dtype, which are the user's, would
    decide. What known_*.py compares with a model's code stands there as it is in transformers."""
    found = []
    for module, path in house.files.items():
        if path.name.startswith("known_"):
            continue
        for node in ast.walk(house.tree(module)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            given = {keyword.arg for keyword in node.keywords}
            wanted = {"device"} if node.func.attr in INTEGERS else {"device", "dtype"}
            if of_torch and node.func.attr in FACTORIES and None not in given and wanted - given:
                found.append(f"{path.name}:{node.lineno}")
    return found


def fields_of_shapes(house: House) -> list[str]:
    """Where a kernel's function asks `tl.zeros` for a shape with a field of one of its arguments,
    such as `[SHAPE.ROWS]`. In a function that another one calls, Triton 3.6 takes that number for
    no constant, and does not compile it; `tl.full` takes it."""
    found = []
    for module, path in house.files.items():
        for function in ast.walk(house.tree(module)):
            if not isinstance(function, ast.FunctionDef) or not function.decorator_list:
                continue
            own = {argument.arg for argument in function.args.args}
            for call in ast.walk(function):
                zeros = isinstance(call, ast.Call) and ast.unparse(call.func) == "tl.zeros"
                if zeros and any(
                    isinstance(x, ast.Attribute)
                    and x.attr != "shape"  # a tensor's
                    and getattr(x.value, "id", None) in own
                    for x in ast.walk(call.args[0])
                ):
                    found.append(f"{path.name}:{call.lineno}")
    return found


def share(found: list[Launch]) -> float:
    """The share of launch arguments that are positional."""
    return sum(launch.positional for launch in found) / max(1, sum(x.arguments for x in found))


def long_files(house: House) -> list[str]:
    """Sources over LONGEST lines, without the words of REASON among their first ones."""
    found = []
    for path in sorted(house.root.rglob("*")):
        if path.suffix not in SOURCES:
            continue
        lines = path.read_text().splitlines()
        head = " ".join(" ".join(lines[:HEAD]).split()).lower()
        if len(lines) > LONGEST and REASON not in head:
            found.append(f"{path.relative_to(house.root)}: {len(lines)} lines")
    return found


def long_signatures(house: House) -> list[str]:
    """Functions of more than MOST parameters."""
    found = []
    for module, path in house.files.items():
        for node in ast.walk(house.tree(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
                if count > MOST:
                    found.append(f"{path.relative_to(house.root)}: {node.name} has {count}")
    return found


def loose_files(house: House) -> list[str]:
    """What lies in ops/ itself and belongs into a family."""
    return [
        path.name
        for path in sorted((house.root / "ops").iterdir())
        if path.is_file() and path.name not in LOOSE
    ]


def skips(house: House) -> list[str]:
    """Lines that switch the formatter off."""
    return [
        f"{path.name}:{number}"
        for path in house.files.values()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "# fmt: skip" in line or "# fmt: off" in line
    ]


def rooms(arrows: dict[str, set[str]], package: str = "attnplug") -> dict[str, set[str]]:
    """The arrows between rooms: the package's parts, and the families of ops."""

    def room(module: str) -> str:
        family = _family(module, f"{package}.ops")
        parts = module.split(".")
        return f"ops/{family}" if family else ".".join(parts[1:2]) or package

    found: dict[str, set[str]] = {}
    for module, others in arrows.items():
        found.setdefault(room(module), set()).update(map(room, others))
    return {name: others - {name} for name, others in found.items()}


def main() -> None:
    house = House.of(ROOT)
    arrows = house.arrows()
    for name, others in sorted(rooms(arrows).items()):
        print(f"{name} -> {', '.join(sorted(others)) or 'nothing'}")
    found = list(launches(house, "attnplug.ops"))
    print(f"{len(arrows)} modules, {sum(map(len, arrows.values()))} arrows")
    print(f"circles: {circles(arrows) or 'none'}")
    print(f"{len(found)} launches, {share(found):.0%} of their arguments by position")
    print(f"{len(skips(house))} fmt: skip; long files: {', '.join(long_files(house)) or 'none'}")


if __name__ == "__main__":
    sys.exit(main())
