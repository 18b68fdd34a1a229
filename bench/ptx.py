"""Compile the kernels of every op without a GPU, and compare two trees by their PTX for sm_90.

    ptx.py record OUT.json [--only OP] [--root TREE]   compile; the PTX lies in OUT.ptx/. Exits 1 if
                                                       a launch wants more shared memory than an
                                                       H200 has
    ptx.py compare A.json B.json                       exits 1 on any difference
    ptx.py digest RECORD.json bench/compiled.json      what stale.py compares: a whole record, short
    ptx.py bind [--only OP] [--root TREE]              microseconds of a call's Python, warm
    ptx.py fits [--target sm_89,gfx942] [--quick]      what the default policies launch, for other
                                                       cards: compiles and fits, or exits 1
    ptx.py plans OUT.json [--target sm_90]             how launches are cut there; compiles nothing

The public ops are called with tensors that have no memory and say that they are on a GPU; Triton's
launches end where the kernel is compiled. Names are (op, case, ordinal of the launch, kernel), so
that launchers and parameters may move between two trees. Two launches are identical if their PTX is
equal in the form of `canonical`, which is blind to the order and names of parameters, and if what
is passed in each of them is the same (scratch memory by its size only); "reordered" have the same
instructions in another order, and the same registers and memory.
"""

import argparse
import collections
import hashlib
import json
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "ptx" / "cache"))
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

import _ptx_blocks  # noqa: F401 - its cases register themselves, and so do the others
import _ptx_gpu
import _ptx_latent  # noqa: F401
import _ptx_tokens  # noqa: F401
import torch
from _kernel_digests import write_digests
from _ptx_fits import fits
from _ptx_gpu import CALLED, IMPLEMENTED, TARGETS, pretend, resources
from _ptx_inputs import CASES, MADE
from _ptx_plans import plans
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = JITFunction.run
LAUNCHES: list[dict[str, Any]] | None = None  # those of the op that runs; None: are not noted
TEXTS: dict[str, str] = {}  # canonical PTX by its hash

# ---- what a kernel is -----------------------------------------------------------------------


def describe(
    function: Any, kernel: Any, grid: Any, options: dict[str, Any], bound: dict[str, Any]
) -> dict[str, Any]:
    """One launch: the digest of its PTX, and what else a change of it would show in. `passed` is
    what each register that holds a parameter was given."""
    text, homes = canonical(kernel.asm["ptx"], kernel.metadata.name)
    meta, given = kernel.metadata, passed(kernel.src.signature, bound)
    digest = hashlib.sha256(text.encode()).hexdigest()
    TEXTS[digest] = text
    return {
        "kernel": function.fn.__name__, "ptx": digest, "lines": text.count("\n"),
        "opcodes": opcodes(text), "grid": [int(x) for x in grid], "shared": meta.shared,
        "warps": meta.num_warps, "stages": getattr(meta, "num_stages", None),
        "maxnreg": meta.maxnreg, "pdl": bool(options.get("launch_pdl")),
        "passed": sorted(f"{home} = {given[i]}" for home, i in homes if i < len(given)),
        **resources(kernel.asm.get("cubin") or b""),
    }  # fmt: skip


def passed(signature: dict[str, Any], bound: dict[str, Any]) -> list[str]:
    """The arguments of a launch as text, in the order of the kernel's parameters."""
    given: list[str] = []

    def add(kind: Any, value: Any) -> None:
        if isinstance(kind, tuple):
            for each in zip(kind, value, strict=True):
                add(*each)
        elif isinstance(kind, str) and kind.startswith("tensordesc"):
            what = f"{label(value.base)} {value.shape} {value.strides} {value.block_shape}"
            given.extend([what] * (1 + 2 * len(value.shape)))
        elif kind != "constexpr":
            given.append(label(value))

    for name, kind in signature.items():
        add(kind, bound[name])
    return given


def label(value: Any) -> str:
    """An argument as text: a tensor of the call by its number, others by their dtype and size."""
    if not isinstance(value, torch.Tensor):
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    made = MADE.get(value.untyped_storage()._cdata)
    if made is None:
        return f"{value.dtype} of {value.numel()}"
    return f"input {made} from {value.storage_offset()}"


LOAD = re.compile(r"ld\.param(\.\S+)\s+(.+?),\s*\[(\w+)([+\d]*)\];")
RENAMED = re.compile(r"%(?!clock|pm\d|envreg)[a-z]+\d+|\$L_*\w+|\bPARAM_\d+")


def canonical(ptx: str, name: str) -> tuple[str, list[tuple[str, int]]]:
    """PTX without comments and debug lines; registers, labels and parameters named in the order in
    which they are used. The loads of parameters stand last, in the order of their registers. Also
    (register or name, place) of each parameter that is used."""
    ptx = re.sub(r"/\*.*?\*/", "", ptx, flags=re.S)
    body, loads = [], []
    for line in ptx.partition("\t.section\t.debug")[0].split("\n"):
        line = " ".join(line.partition("//")[0].split())
        line = re.sub(rf"\b{re.escape(name)}_param_(\d+)", r"PARAM_\1", line)
        line = re.sub(rf"\b{re.escape(name)}\b", "KERNEL", line)
        if not line or line.startswith((".loc", ".file", ".param", ".reg", ".version")):
            continue
        found = LOAD.search(line)
        (body if found is None else loads).append(line)
    names: dict[str, str] = {}

    def rename(match: re.Match[str]) -> str:
        known = match.group()
        kind = known[:2] if known[0] == "$" else re.sub(r"\d+$", "", known)
        return names.setdefault(known, f"{kind}:{len(names)}")

    text = "\n".join(RENAMED.sub(rename, line) for line in body)
    homes = [(home, int(x.split("_")[1])) for x, home in names.items() if x.startswith("PARAM")]
    moved = []
    for line in loads:
        kind, home, parameter, offset = LOAD.search(line).groups()  # pyright: ignore
        home = RENAMED.sub(lambda x: names.get(x.group(), "unused"), home)
        homes.append((home, int(parameter.split("_")[1])))
        moved.append(f"ld.param{kind} {home}, [{offset}];")
    moved.sort(key=lambda x: (len(x), x))
    return "\n".join([text, *moved, ""]), homes


def opcodes(text: str) -> str:
    """A digest of how often each instruction stands there, whatever its operands."""
    lines = (re.sub(r"^@!?\S+ ", "", line) for line in text.split("\n"))
    count = collections.Counter(line.split(" ")[0].rstrip(";") for line in lines)
    return hashlib.sha256(repr(sorted(count.items())).encode()).hexdigest()[:16]


def hook_launches() -> None:
    """Have a launch compile only, and note what it would have run. A hook of another program is in
    place, as in vLLM, for which Triton writes a launch's arguments as JSON: all of them must go."""
    run = LAUNCH
    knobs.runtime.jit_post_compile_hook = lambda **about: None

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if LAUNCHES is not None:
            bound = self.device_caches[0][4](*args, **kwargs)[0]
            LAUNCHES.append(describe(self, kernel, grid, kwargs, bound))
        return kernel

    JITFunction.run = compile_only  # pyright: ignore


# ---- commands -------------------------------------------------------------------------------


def calls(only: str | None) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """(op, case, call) of all ops or one."""
    import attnplug.ops

    for op, made in CASES.items():
        MADE.clear()
        if only in (None, op):
            for case, call in made(getattr(attnplug.ops, op)):
                yield op, case, call


def record(path: Path, only: str | None) -> int:
    """Compile everything and write the digests, the texts beside them."""
    global LAUNCHES
    found, failed, over, start = {}, [], [], time.monotonic()
    for op, case, call in calls(only):
        LAUNCHES, begin = [], time.monotonic()
        try:
            call()
        except Exception:
            failed.append(f"{op} | {case}")
            traceback.print_exc()
        for ordinal, launch in enumerate(LAUNCHES):
            name = f"{op} | {case} | {ordinal} | {launch['kernel']}"
            found[name] = launch
            if launch["shared"] > _ptx_gpu.target.shared:
                over.append(f"{name}: {launch['shared']} bytes of shared memory")
        seconds = time.monotonic() - begin
        print(f"{op:24} {case:24} {len(LAUNCHES):3} launches {seconds:6.1f} s", flush=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    texts = path.with_suffix(".ptx")
    texts.mkdir(exist_ok=True)
    for digest, text in TEXTS.items():
        (texts / f"{digest[:16]}.ptx").write_text(text)
    print(f"{len(found)} launches, {len(TEXTS)} kernels, {time.monotonic() - start:.0f} s")
    left = sorted(IMPLEMENTED.keys() - CALLED) if only is None else []
    print(f"failed: {failed or 'none'}; ops not called: {left or 'none'}")
    print("\n".join(["over the card's limit:", *over]) if over else "all fit the card")
    return len(failed) + len(over) > 0


def load(path: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    """By (op, case, ordinal): a kernel may have another name."""
    read = json.loads(path.read_text())
    return {tuple(key.split(" | ")[:3]): launch for key, launch in read.items()}


def verdict(a: dict[str, Any] | None, b: dict[str, Any] | None) -> tuple[str, list[str]]:
    """How two launches of one name compare, and in what they differ."""
    if a is None or b is None:
        return "missing", ["only in " + ("B" if a is None else "A")]
    keys = sorted((a.keys() & b.keys()) - {"kernel", "passed"})
    changed = [f"{x} {a.get(x)} -> {b.get(x)}" for x in keys if a.get(x) != b.get(x)]
    if not changed:
        old, now = (collections.Counter(x.get("passed", ())) for x in (a, b))
        if old == now or "passed" not in a or "passed" not in b:
            return "identical", []
        lost, got = (old - now).elements(), (now - old).elements()
        return "differing", [f"passed {', '.join(lost)} -> {', '.join(got)}"]
    reordered = all(x.startswith(("ptx ", "lines ")) for x in changed)
    return "reordered" if reordered else "differing", changed


def compare(first: Path, second: Path) -> int:
    """Print, for each op, how many launches are the same, and what the others differ in."""
    a, b = load(first), load(second)
    count: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for key in sorted(a.keys() | b.keys()):
        what, changed = verdict(a.get(key), b.get(key))
        count[key[0]][what] += 1
        if changed:
            kernel = (a.get(key) or b[key])["kernel"]
            print(f"{what}: {' | '.join(key)} | {kernel}: {'; '.join(changed)}")
    kinds = ("identical", "reordered", "differing", "missing")
    for op, of in count.items():
        print(f"{op:24} " + ", ".join(f"{of[kind]} {kind}" for kind in kinds))
    return any(of[kind] for of in count.values() for kind in kinds[1:])


def launch_nothing() -> None:
    """Have a launch do all that it does on a GPU, but for the driver's call."""
    JITFunction.run = LAUNCH  # pyright: ignore
    CompiledKernel.run = property(lambda self: lambda *args: None)  # pyright: ignore
    CompiledKernel.function = CompiledKernel._init_handles = lambda *args: None  # pyright: ignore


def bind(only: str | None, repeats: int = 300) -> int:
    """Print the median microseconds of Python of each case's call, once all is compiled."""
    launch_nothing()
    for op, case, call in calls(only):
        for _ in range(10):
            call()
        times = []
        for _ in range(repeats):
            begin = time.thread_time_ns()
            call()
            times.append(time.thread_time_ns() - begin)
        print(f"{op:24} {case:26} {statistics.median(times) / 1e3:8.1f} us", flush=True)
    return 0


def see_every_launch() -> None:
    """Have no call made again as it was written down; a tree from before that needs nothing."""
    import attnplug.ops  # noqa: F401

    launches: Any = sys.modules.get("attnplug.ops.common.launches")
    if launches is not None:
        launches.REPEATING = False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("record", "compare", "digest", "bind", "fits", "plans"))
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--only", help="one op; with fits: cases that have this in their name")
    parser.add_argument("--target", default=",".join(TARGETS), help="of fits, plans; default: all")
    parser.add_argument("--processors", default="", help="of plans, as 28,304; default: the card's")
    parser.add_argument("--quick", action="store_true", help="of fits: few cases")
    parser.add_argument("--root", help="the tree that has the package; default: as Python finds it")
    args = parser.parse_args()
    if args.command == "compare":
        return compare(*args.paths)
    if args.root:
        sys.path.insert(0, args.root)
    if args.command == "digest":
        return write_digests(*args.paths, Path(args.root or ROOT))
    torch.set_grad_enabled(False)
    pretend()
    if args.command != "bind":
        see_every_launch()
    if args.command == "fits":
        return fits(args.target.split(","), args.quick, args.only)
    if args.command == "plans":
        processors = [int(x) for x in args.processors.split(",") if x]
        return plans(*args.paths, args.target.split(","), processors)
    hook_launches()
    import attnplug

    print(f"attnplug from {Path(attnplug.__file__).parent}", flush=True)
    return record(*args.paths, args.only) if args.command == "record" else bind(args.only)


if __name__ == "__main__":
    sys.exit(main())
