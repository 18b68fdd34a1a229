"""Compile the kernels of every op for sm_90 without a GPU, and compare two trees by their PTX.

    ptx.py record OUT.json [--only OP] [--root TREE]   compile; the PTX lies in OUT.ptx/
    ptx.py compare A.json B.json                       exits 1 on any difference
    ptx.py bind [--only OP] [--root TREE]              microseconds of a call's Python, warm

The public ops are called with tensors that have no memory and say that they are on a GPU; Triton's
launches end where the kernel is compiled. Names are (op, case, ordinal of the launch, kernel), so
that launchers and parameters may move between two trees. Two launches are identical if their PTX is
equal in the form of `canonical`, which is blind to the order and names of parameters, and if what
is passed in each of them is the same (scratch memory by its size only); "reordered" have the same
instructions in another order, and the same registers and memory.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import os
import re
import statistics
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "ptx" / "cache"))
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

import _ptx_blocks  # noqa: F401 - its cases register themselves, and so do the others
import _ptx_tokens  # noqa: F401
import torch
import triton
from _ptx_inputs import CASES, GPU, MADE
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

LAUNCH = JITFunction.run
SHARED = 232448  # bytes that a program may have
PROCESSORS = 132  # of an H200
IMPLEMENTED: dict[str, Callable[..., Any]] = {}  # by the op's name, for CUDA
CALLED: set[str] = set()
LAUNCHES: list[dict[str, Any]] | None = None  # those of the op that runs; None: are not noted
TEXTS: dict[str, str] = {}  # canonical PTX by its hash

# ---- a GPU that is not there ----------------------------------------------------------------


class Fake(torch.Tensor):
    """A meta tensor that says it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)


def faked(result: Any) -> Any:
    """`result`, its tensors on the GPU that is not there."""
    if isinstance(result, torch.Tensor):
        return result.as_subclass(Fake)
    if type(result) in (tuple, list):
        return type(result)(map(faked, result))
    if hasattr(result, "values") and hasattr(result, "indices"):
        return SimpleNamespace(values=faked(result.values), indices=faked(result.indices))
    return result


def keep_fake(name: str) -> None:
    """Have a method of tensors return tensors that say the same."""
    method = getattr(torch.Tensor, name)
    setattr(Fake, name, lambda *args, **kwargs: faked(method(*args, **kwargs)))


def plain(value: Any) -> Any:
    """A meta tensor that says so: the formulas of torch's meta device want no other."""
    return value.as_subclass(torch.Tensor) if isinstance(value, Fake) else value


def compute_plain(owner: Any, name: str) -> None:
    """Have an arithmetic function or method see plain meta tensors, and return fake ones."""
    function, target = getattr(owner, name), Fake if owner is torch.Tensor else owner

    def compute(*args: Any, **kwargs: Any) -> Any:
        result = function(*map(plain, args), **kwargs)
        return faked(result) if any(isinstance(x, Fake) for x in args) else result

    setattr(target, name, compute)


def make_fake(name: str) -> None:
    """Have a function of torch make a tensor on the GPU that is not there."""
    function = getattr(torch, name)

    def make(*args: Any, **kwargs: Any) -> Any:
        on_gpu = torch.device(kwargs.get("device") or "cpu").type == "cuda"
        if not on_gpu and not any(isinstance(x, Fake) for x in args):
            return function(*args, **kwargs)
        if on_gpu:
            kwargs["device"] = "meta"
        return faked(function(*map(plain, args), **kwargs))

    setattr(torch, name, make)


class Driver:
    """What Triton asks of a driver before it launches."""

    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": SHARED})

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return GPU


def pretend() -> None:
    """Stand in for the GPU in torch and Triton, before the package is imported."""
    for name in (
        "__getitem__", "expand", "flatten", "narrow", "new_empty", "permute", "reshape", "split",
        "squeeze", "transpose", "unbind", "unflatten", "unsqueeze", "view",
    ):  # fmt: skip
        keep_fake(name)
    for name in ("arange", "empty", "empty_like", "empty_strided", "full", "ones", "zeros"):
        make_fake(name)
    for name in (
        "__add__", "__and__", "__lt__", "__mul__", "__sub__", "any", "clamp", "contiguous",
        "cummax", "cummin", "cumsum", "flip", "gather", "int", "long", "new_full", "new_zeros",
        "to",
    ):  # fmt: skip
        compute_plain(torch.Tensor, name)
    compute_plain(torch, "where")
    compute_plain(torch.nn.functional, "pad")
    pretend_h200()
    hook_launches()


def pretend_h200() -> None:
    """Have torch and Triton see an H200, and the package's ops run there."""
    torch.cuda.device = lambda device: contextlib.nullcontext()  # pyright: ignore
    properties = SimpleNamespace(
        multi_processor_count=PROCESSORS, major=9, minor=0, name="NVIDIA H200",
        shared_memory_per_block_optin=SHARED, L2_cache_size=60 << 20,
    )  # fmt: skip
    torch.cuda.get_device_properties = lambda device=None: properties  # pyright: ignore
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    triton.runtime.driver.set_active(Driver())  # pyright: ignore
    hook_ops()


def hook_ops() -> None:
    """Have the package's ops run what they register for CUDA, past the dispatcher."""
    implement = torch.library.Library.impl

    def note(self: Any, name: Any, function: Any, key: str = "", **kwargs: Any) -> Any:
        if self.ns == "attnplug" and key == "CUDA":
            IMPLEMENTED[f"attnplug::{name}"] = function
        return implement(self, name, function, key, **kwargs)

    def divert(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        function = IMPLEMENTED.get(self._schema.name)
        CALLED.add(self._schema.name)
        return (function or self._op)(*args, **kwargs)

    torch.library.Library.impl = note  # pyright: ignore
    torch._ops.OpOverload.__call__ = divert  # pyright: ignore


def hook_launches() -> None:
    """Have a launch compile only, and note what it would have run."""
    run = LAUNCH

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if LAUNCHES is not None:
            bound = self.device_caches[0][4](*args, **kwargs)[0]
            LAUNCHES.append(describe(self, kernel, grid, kwargs, bound))
        return kernel

    JITFunction.run = compile_only  # pyright: ignore


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


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread and bytes of its stack (spills are in it), from the attributes of an ELF
    file's .nv.info: 0x2f and 0x12, each with a symbol and a value."""
    if not cubin:
        return {}
    offset, size, count, index = (
        struct.unpack_from("<Q", cubin, 0x28)[0], *struct.unpack_from("<HHH", cubin, 0x3A),
    )  # fmt: skip
    headers = [struct.unpack_from("<IIQQQQ", cubin, offset + i * size) for i in range(count)]
    found = {}
    for name, _, _, _, at, length in headers:
        start = headers[index][4] + name
        if cubin[start : cubin.index(b"\0", start)] != b".nv.info":
            continue
        while length >= 4:
            form, attribute, bytes_ = struct.unpack_from("<BBH", cubin, at)
            step = 4 + (bytes_ if form == 4 else 0)
            if form == 4 and attribute in (0x2F, 0x12):
                value = struct.unpack_from("<II", cubin, at + 4)[1]
                found["registers" if attribute == 0x2F else "stack"] = value
            at, length = at + step, length - step
    return found


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
    found, failed, start = {}, [], time.monotonic()
    for op, case, call in calls(only):
        LAUNCHES, begin = [], time.monotonic()
        try:
            call()
        except Exception:
            failed.append(f"{op} | {case}")
            traceback.print_exc()
        for ordinal, launch in enumerate(LAUNCHES):
            found[f"{op} | {case} | {ordinal} | {launch['kernel']}"] = launch
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
    return len(failed) > 0


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("record", "compare", "bind"))
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--only", help="one op")
    parser.add_argument("--root", help="the tree that has the package; default: as Python finds it")
    args = parser.parse_args()
    if args.command == "compare":
        return compare(*args.paths)
    if args.root:
        sys.path.insert(0, args.root)
    torch.set_grad_enabled(False)
    pretend()
    import attnplug

    print(f"attnplug from {Path(attnplug.__file__).parent}", flush=True)
    return record(*args.paths, args.only) if args.command == "record" else bind(args.only)


if __name__ == "__main__":
    sys.exit(main())
