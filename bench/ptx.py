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

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

LAUNCH = JITFunction.run
GPU = torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT32, INT64 = torch.int32, torch.int64
SHARED = 232448  # bytes that a program may have
PROCESSORS = 132  # of an H200
IMPLEMENTED: dict[str, Callable[..., Any]] = {}  # by the op's name, for CUDA
CALLED: set[str] = set()
LAUNCHES: list[dict[str, Any]] | None = None  # those of the op that runs; None: are not noted
MADE: dict[int, int] = {}  # of an op's cases, the arguments' numbers by their storage
KEPT: list[torch.Tensor] = []  # so that no storage gets the address of another
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
    torch.cuda.device = lambda device: contextlib.nullcontext()  # pyright: ignore
    properties = SimpleNamespace(
        multi_processor_count=PROCESSORS, major=9, minor=0, name="NVIDIA H200",
        shared_memory_per_block_optin=SHARED, L2_cache_size=60 << 20,
    )  # fmt: skip
    torch.cuda.get_device_properties = lambda device=None: properties  # pyright: ignore
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    triton.runtime.driver.set_active(Driver())  # pyright: ignore
    hook_ops()
    hook_launches()


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


# ---- the cases ------------------------------------------------------------------------------

Cases = Iterator[tuple[str, Callable[[], Any]]]
CASES: dict[str, Callable[[Any], Cases]] = {}


def cases(function: Callable[[Any], Cases]) -> Callable[[Any], Cases]:
    """Register a generator of (case, call) of the op whose name it has."""
    CASES[function.__name__] = function
    return function


def new(*shape: int, dtype: torch.dtype = INT32) -> torch.Tensor:
    """An argument of an op, which is numbered and kept."""
    made = torch.empty(shape, dtype=dtype, device=GPU)
    MADE[made.untyped_storage()._cdata] = len(MADE)
    KEPT.append(made)
    return made


def attention(batch, heads, kv_heads, queries, size, width, dtype=BF16) -> tuple[torch.Tensor, ...]:
    """q, k, v."""
    rows = (batch, kv_heads, size, width)
    q = new(batch, heads, queries, width, dtype=dtype)
    return q, new(*rows, dtype=dtype), new(*rows, dtype=dtype)


def padding(batch: int, size: int, *, mask: bool = True) -> dict[str, torch.Tensor]:
    """lengths, start and a key mask."""
    made = {"lengths": new(batch, dtype=INT64), "start": new(batch)}
    return {**made, "key_mask": new(batch, size, dtype=torch.bool)} if mask else made


def summaries(
    k: torch.Tensor, block: int, parts: int = 2, int8: bool = False, spread: bool = False
):
    """bounds and progress of a cache."""
    (batch, heads, _, width), blocks = k.shape, -(-k.shape[2] // block)
    rows = blocks + 4 + -(-2 * blocks // width) if int8 else blocks
    rows += -(-2 * -(-width // 32) * blocks // width) if spread else 0
    dtype = torch.uint8 if spread else torch.int8 if int8 else k.dtype
    return new(batch, heads, rows, parts, width, dtype=dtype), new(batch, 2)


@cases
def dense_decode(op: Any) -> Cases:
    def case(*shape, dtype=BF16, **options):
        return lambda: op(*attention(*shape, dtype=dtype), scale=0.1, **options)

    capped = {"softcap": 30.0, "sinks": new(28, dtype=FP32)}
    yield "bench", case(1, 28, 4, 1, 131072, 128, lengths=new(1))
    yield "full buffer", case(1, 28, 4, 1, 131072, 128)
    yield "fp16 D=80", case(2, 8, 2, 3, 1003, 80, dtype=FP16, lengths=new(2, dtype=INT64))
    yield "fp32 D=64", case(1, 4, 4, 17, 500, 64, dtype=FP32)
    yield "padded", case(2, 28, 4, 1, 4096, 128, **padding(2, 4096), **capped)
    yield "window", case(1, 28, 4, 1, 32768, 128, lengths=new(1), window=1024, **capped)
    yield "many queries", case(1, 28, 4, 128, 8192, 128, lengths=new(1))
    yield "D=256", case(1, 16, 8, 1, 8192, 256, lengths=new(1))


@cases
def block_bounds(op: Any) -> Cases:
    def case(
        block, batch, heads, size, width, dtype=BF16, parts=2, int8=False, spread=False, **more
    ):
        k = new(batch, heads, size, width, dtype=dtype)
        made = summaries(k, block, parts, int8, spread)
        return lambda: op(k, *made, block=block, **more)

    yield "bench", case(64, 1, 4, 131072, 128, lengths=new(1))
    yield "mean", case(64, 1, 4, 131072, 128, parts=1, lengths=new(1))
    yield "int8", case(64, 1, 4, 131072, 128, int8=True, lengths=new(1))
    yield "int8 padded", case(32, 2, 4, 4096, 128, int8=True, **padding(2, 4096))
    yield "fp16 D=80 padded", case(16, 2, 3, 1003, 80, FP16, **padding(2, 1003))
    yield "fp32 D=64 block=128", case(128, 1, 2, 1024, 64, FP32)
    yield "spread", case(16, 1, 4, 131072, 128, spread=True, lengths=new(1))
    yield "spread fp16 D=80", case(16, 2, 3, 1003, 80, FP16, spread=True, **padding(2, 1003))


@cases
def select_blocks(op: Any) -> Cases:
    def case(batch, heads, kv, queries, size, width, dtype=BF16, int8=False, block=64, **options):
        q, k, _ = attention(batch, heads, kv, queries, size, width, dtype)
        scoring = options.get("scoring")
        made = summaries(k, block, 1 if scoring == "mean" else 2, int8, scoring == "spread")
        return lambda: op(q, k, *made, scale=0.1, block=block, **options)

    step = {"lengths": new(1), "top_k": 8}
    yield "bench", case(1, 28, 4, 1, 131072, 128, **step)
    yield "top_k=32", case(1, 28, 4, 1, 131072, 128, **{**step, "top_k": 32})
    yield "int8", case(1, 28, 4, 1, 131072, 128, int8=True, **step)
    yield "int8 top_k=32 1M", case(1, 28, 4, 1, 1 << 20, 128, int8=True, top_k=32, lengths=new(1))
    yield "estimate", case(1, 28, 4, 1, 131072, 128, scoring="estimate", **step)
    yield "mean", case(1, 28, 4, 1, 131072, 128, scoring="mean", **step)
    yield "short", case(1, 28, 4, 1, 8192, 128, **step)
    yield "batch=8 512K", case(8, 28, 4, 1, 524288, 128, **step)
    yield "int8 batch=8", case(8, 28, 4, 1, 262144, 128, int8=True, **step)
    yield "top_k=100", case(1, 28, 4, 1, 65536, 128, **{**step, "top_k": 100})
    many = {"block": 16, "top_k": 256, "sink": 8, "local": 32}
    for width, dtype in ((128, BF16), (64, FP16), (96, BF16), (256, BF16)):
        options = {**many, "scoring": "spread", **padding(2, 32768)}
        yield f"spread D={width} padded", case(2, 28, 4, 1, 32768, width, dtype, **options)
    yield (
        "fp16 D=80 padded",
        case(
            2, 8, 2, 3, 2003, 80, dtype=FP16, block=16, top_k=5, sink=2, local=3, **padding(2, 2003)
        ),
    )
    yield (
        "fp32 D=64 estimate",
        case(
            2,
            8,
            2,
            2,
            2048,
            64,
            dtype=FP32,
            block=32,
            top_k=4,
            scoring="estimate",
            **padding(2, 2048),
        ),
    )


@cases
def gather_attention(op: Any) -> Cases:
    def case(batch, heads, kv, queries, size, width, listed, dtype=BF16, **options):
        index = new(batch, kv, queries, listed)
        options = {"scale": 0.1, "block": 64, **options}
        args = attention(batch, heads, kv, queries, size, width, dtype)
        return lambda: op(*args, index, **options)

    yield "bench", case(1, 28, 4, 1, 131072, 128, 8, lengths=new(1))
    yield "32 blocks", case(1, 28, 4, 1, 131072, 128, 32, lengths=new(1))
    yield "batch=64", case(64, 28, 4, 1, 32768, 128, 32, lengths=new(64))
    yield "fused", case(512, 28, 4, 1, 4096, 128, 8, lengths=new(512), sinks=new(28, dtype=FP32))
    yield "fp16 D=80", case(2, 8, 2, 3, 1003, 80, 5, FP16, block=16, lengths=new(2))
    yield (
        "padded",
        case(
            2, 28, 4, 1, 4096, 128, 7, softcap=30.0, sinks=new(28, dtype=FP32), **padding(2, 4096)
        ),
    )
    yield "fp32 D=64", case(1, 4, 4, 2, 1024, 64, 3, FP32, block=128)
    yield "D=256", case(1, 16, 8, 1, 8192, 256, 8, lengths=new(1))


@cases
def gather_decode(op: Any) -> Cases:
    def case(batch, heads, kv, size, width, dtype=BF16, int8=False, **options):
        q, k, v = attention(batch, heads, kv, 1, size, width, dtype)
        options = {"scale": 0.1, "block": 64, "top_k": 8, **options}
        scoring = options.get("scoring")
        parts = 1 if scoring == "mean" else 2
        made = summaries(k, options["block"], parts, int8, scoring == "spread")
        token = (new(batch, kv, 1, width, dtype=dtype) for _ in range(2))
        lengths = options.pop("lengths", new(1))
        args = (q, k, v, *token, *made, lengths)
        return lambda: op(*args, **options)

    yield "bench", case(1, 28, 4, 131072, 128)
    yield "uncounted", case(1, 28, 4, 131072, 128, count=False)
    yield "int8", case(1, 28, 4, 131072, 128, int8=True)
    yield "top_k=32", case(1, 28, 4, 131072, 128, top_k=32)
    yield "int8 top_k=32", case(1, 28, 4, 131072, 128, top_k=32, int8=True)
    yield "window only", case(1, 28, 4, 131072, 128, top_k=0)
    yield "estimate", case(1, 28, 4, 131072, 128, scoring="estimate")
    yield "mean", case(1, 28, 4, 131072, 128, scoring="mean")
    yield "batch=16 512K", case(16, 28, 4, 524288, 128, lengths=new(16))
    yield "fp16 D=80 block=16", case(2, 8, 2, 1003, 80, FP16, block=16, lengths=new(2))
    some = padding(2, 4096)
    capped = {"softcap": 30.0, "sinks": new(28, dtype=FP32), "int8": True}
    yield "padded", case(2, 28, 4, 4096, 128, **some, **capped)
    many = {"block": 16, "top_k": 256, "sink": 8, "local": 32}
    for size in (8192, 32768, 131072, 1 << 20):
        yield f"default {size}", case(1, 28, 4, size, 128, scoring="spread", **many)
        yield f"pages, bounds {size}", case(1, 28, 4, size, 128, int8=True, **many)
    yield "default batch=8", case(8, 28, 4, 1 << 20, 128, scoring="spread", **many)


@cases
def gather_tokens_attention(op: Any) -> Cases:
    def case(batch, heads, kv, queries, size, width, listed, dtype=BF16, **options):
        index = new(batch, kv, queries, listed)
        args = attention(batch, heads, kv, queries, size, width, dtype)
        return lambda: op(*args, index, scale=0.1, **options)

    capped = {"softcap": 30.0, "sinks": new(28, dtype=FP32)}
    yield "bench", case(1, 28, 4, 1, 131072, 128, 2048, lengths=new(1))
    yield "fp16 D=80", case(2, 8, 2, 3, 1003, 80, 33, FP16, lengths=new(2))
    yield "padded", case(2, 28, 4, 1, 4096, 128, 512, **capped, **padding(2, 4096))
    yield "fused", case(2, 28, 4, 1, 4096, 128, 31, sink=0, window=1, **capped, **padding(2, 4096))
    yield "fp32 D=64", case(1, 4, 4, 1, 1024, 64, 64, FP32)


@cases
def measure_blocks(op: Any) -> Cases:
    def case(batch, heads, kv, queries, size, width, dtype=BF16, **options):
        slots = -(-queries // options.get("query_block", 128))
        args = (*attention(batch, heads, kv, queries, size, width, dtype), new(1, slots))
        return lambda: op(*args, scale=0.1, **options)

    yield "bench", case(1, 28, 4, 32768, 32768, 128)
    yield "parts", case(1, 28, 4, 131072, 131072, 128)
    yield "lengths", case(1, 28, 4, 8192, 16384, 128, lengths=new(1))
    yield "fp16 D=64 packed", case(2, 32, 8, 4096, 4096, 64, FP16, gamma=32, top_k=20)
    yield "fp16 D=80", case(1, 8, 2, 2003, 2003, 80, FP16, top_k=7)
    yield "padded", case(2, 28, 4, 4096, 4096, 128, softcap=30.0, **padding(2, 4096))
    yield "block=128", case(1, 8, 2, 4096, 4096, 128, block=128, query_block=256, top_k=16)
    yield "fp32", case(1, 8, 2, 2048, 2048, 64, FP32, top_k=16)


@cases
def query_sparse_attention(op: Any) -> Cases:
    def case(batch, heads, kv, queries, size, width, dtype=BF16, **options):
        args = attention(batch, heads, kv, queries, size, width, dtype)
        return lambda: op(*args, scale=0.1, **options)

    yield "bench", case(1, 28, 4, 32768, 32768, 128)
    yield "pack=2", case(1, 24, 4, 8192, 8192, 128, exact_k=4)
    yield "pack=4 lengths", case(2, 32, 8, 8192, 8192, 128, lengths=new(2))
    yield "nothing selected", case(1, 28, 4, 32768, 32768, 128, top_k=0)
    yield "fp16 D=64", case(1, 28, 4, 8192, 8192, 64, FP16, exact_k=0)
    yield "fp16 D=80", case(1, 8, 2, 2003, 2003, 80, FP16, top_k=20)
    yield "exact", case(1, 28, 4, 8192, 8192, 128, algorithm="exact", top_k=16)
    yield "tournament", case(1, 28, 4, 8192, 8192, 128, algorithm="tournament", top_k=32)
    yield "exact_k=16", case(1, 28, 4, 8192, 8192, 128, exact_k=16)
    yield "padded", case(2, 28, 4, 4096, 4096, 128, softcap=30.0, **padding(2, 4096))
    yield "padded, no mask", case(2, 8, 2, 4096, 4096, 128, top_k=0, **padding(2, 9, mask=False))
    yield "fp32 block=32", case(1, 4, 4, 1024, 1024, 64, FP32, block=32, top_k=8)


@cases
def block_sparse_attention(op: Any) -> Cases:
    def case(batch, heads, kv, queries, size, width, names, dtype=BF16, rows=False, **options):
        slots = -(-queries // options.get("query_block", 128))
        index = new(batch, heads, slots, names)
        args = (*attention(batch, heads, kv, queries, size, width, dtype), index)
        if rows:
            dense = -(-queries // options.get("gamma", 16))
            options["rows"] = new(batch, heads, dense, width, dtype=dtype)
        return lambda: op(*args, scale=0.1, **options)

    yield "bench", case(1, 28, 4, 32768, 32768, 128, 128, window=128)
    yield "lengths", case(1, 28, 4, 8192, 16384, 128, 64, lengths=new(1))
    yield "corrected", case(1, 28, 4, 32768, 32768, 128, 128, rows=True, weight=0.5)
    yield "corrected after", case(1, 28, 4, 8192, 8192, 128, 64, rows=True, gamma=32)
    yield "fp16 D=64", case(2, 8, 2, 4096, 4096, 64, 20, FP16, lengths=new(2))
    yield "fp16 D=80", case(1, 8, 2, 2003, 2003, 80, 7, FP16, sink=2)
    yield (
        "padded",
        case(2, 28, 4, 4096, 4096, 128, 16, rows=True, softcap=30.0, window=70, **padding(2, 4096)),
    )
    yield (
        "query_block=64 block=32",
        case(1, 8, 2, 4096, 4096, 128, 16, query_block=64, block=32, lengths=new(1)),
    )
    yield "block=24", case(1, 8, 2, 1024, 1024, 128, 16, block=24)
    yield "fp32 D=64", case(1, 4, 2, 1024, 1024, 64, 5, FP32)


@cases
def delta_correct(op: Any) -> Cases:
    def case(batch, heads, queries, width, gamma, dtype=BF16, **options):
        out = new(batch, heads, queries, width, dtype=dtype)
        rows = new(batch, heads, -(-queries // gamma), width, dtype=dtype)
        return lambda: op(out, rows, gamma=gamma, **options)

    yield "bench", case(1, 28, 32768, 128, 16, weight=0.5)
    yield "lengths", case(1, 28, 32768, 128, 16, lengths=new(1), kv_length=65536)
    yield "fp16 D=80 padded", case(2, 3, 1003, 80, 24, FP16, **padding(2, 9, mask=False))
    yield "fp32", case(1, 4, 512, 64, 64, FP32)


@cases
def merge_block_rows(op: Any) -> Cases:
    def case(batch, heads, count, names, rows, **options):
        index = new(batch, heads, count, names)
        score, lse = new(*index.shape, dtype=FP32), new(batch, heads, count, dtype=FP32)
        return lambda: op(index, score, lse, rows=rows, **options)

    yield "mass", case(1, 28, 2048, 64, 8, trim=64)
    yield "mean", case(1, 28, 2048, 64, 8, trim=64, merge="mean")
    yield "normalised", case(1, 28, 2048, 64, 8, trim=64, merge="mean_normalised")
    yield "before", case(2, 8, 100, 33, 4, trim=20, sink=1, before=new(2, 25))
    yield "few", case(1, 2, 5, 3, 2, trim=4)


@cases
def stream_mask(op: Any) -> Cases:
    def case(batch, heads, kv, queries, size, width, dtype=BF16, **options):
        q, k, _ = attention(batch, heads, kv, queries, size, width, dtype)
        return lambda: op(q, k, **options)

    yield "bench", case(1, 28, 4, 32768, 32768, 128)
    yield "lengths", case(1, 28, 4, 8192, 16384, 128, lengths=new(1))
    yield "budget", case(1, 28, 4, 8192, 8192, 128, budget=new(1, 28, 128))
    yield (
        "block_mask",
        case(1, 28, 4, 8192, 8192, 128, block_mask=new(1, 1, 128, 128, dtype=torch.bool)),
    )
    yield "padded", case(2, 28, 4, 4096, 4096, 128, top_k=16, **padding(2, 4096))
    yield "one query", case(1, 28, 4, 1, 32768, 128, lengths=new(1))
    yield "fp16 D=80", case(2, 8, 2, 1003, 1003, 80, FP16, query_block=32, block=16, top_k=5)
    yield "fp32 query_block=128", case(1, 4, 4, 1024, 1024, 64, FP32, query_block=128, block=128)


@cases
def stream_edges(op: Any) -> Cases:
    def case(batch, heads, kv, queries, size, width, names, dtype=BF16, **options):
        args = attention(batch, heads, kv, queries, size, width, dtype)
        index = new(batch, heads, -(-queries // options.get("query_block", 64)), names)
        return lambda: op(*args, index, scale=0.1, **options)

    yield "bench", case(1, 28, 4, 32768, 32768, 128, 32)
    for weights in ("score", "value"):
        yield weights, case(1, 28, 4, 8192, 8192, 128, 32, weights=weights, lengths=new(1))
    yield "output", case(1, 28, 4, 8192, 8192, 128, 32, output=True)
    yield "padded", case(2, 28, 4, 4096, 4096, 128, 16, output=True, **padding(2, 4096))
    yield "fp16 D=80", case(2, 8, 2, 1003, 1003, 80, 5, FP16, query_block=32, block=16)
    yield (
        "fp32 query_block=128",
        case(1, 4, 4, 1024, 1024, 64, 4, FP32, query_block=128, block=128, weights="value"),
    )
    yield "one query", case(1, 28, 4, 1, 8192, 128, 16, lengths=new(1))


@cases
def score_tokens(op: Any) -> Cases:
    def case(batch, heads, kv, size, width, dtype=BF16, **options):
        q = new(batch, heads, 1, width, dtype=dtype)
        codes = new(batch, kv, size, width, dtype=torch.int8)
        return lambda: op(q, codes, new(batch, kv, size, dtype=FP32), **options)

    kept = {"sink": 16, "window": 256}
    yield "bench", case(1, 28, 4, 131072, 128, lengths=new(1), **kept)
    yield "1M", case(1, 28, 4, 1 << 20, 128, lengths=new(1), **kept)
    yield "fp16 D=80", case(2, 8, 2, 1003, 80, FP16, lengths=new(2))
    yield "padded", case(2, 28, 4, 4096, 128, **kept, **padding(2, 4096))
    yield "fp32 D=256", case(1, 4, 4, 4096, 256, FP32)


@cases
def topk(op: Any) -> Cases:
    def case(rows, size, k, hint=0, **options):
        options = {**options, "hint": new(rows, hint)} if hint else options
        return lambda: op(new(rows, size, dtype=FP32), k, **options)

    yield "bench hint", case(4, 131072, 2048, hint=2048, lengths=new(1))
    yield "bench", case(4, 131072, 2048, lengths=new(1))
    yield "one row", case(1, 65536, 2048)
    yield "1M hint", case(4, 1 << 20, 2048, hint=2048, lengths=new(1))
    yield "4M", case(1, 1 << 22, 512, lengths=new(1))
    yield "many rows", case(256, 32768, 128, hint=128, lengths=new(256, dtype=INT64))
    yield "k=4096", case(2, 131072, 4096)
    yield "short", case(8, 8192, 512, lengths=new(8))
    yield "sorted", case(8, 4000, 200, sorted=True)
    yield "odd short", case(3, 1003, 7)
    yield "tiny", case(3, 200, 16, lengths=new(3))


def tier_of(quantized: Any, k: torch.Tensor, block: int) -> Any:
    """A quantized tier for the keys `[B,Hkv,S,D]`."""
    (batch, heads, size, width), columns = k.shape, 16 * -(-k.shape[3] // 32)
    grid = (batch, heads, -(-size // block))
    return quantized(
        new(*grid, block, width, dtype=torch.int8), new(*grid, 2, width, dtype=BF16),
        new(*grid, block, columns, dtype=torch.uint8), new(*grid, block, columns // 8),
        new(*grid, 4, dtype=FP32), new(*grid, 2), new(batch, 2),
    )  # fmt: skip


@cases
def quantize_kv(op: Any) -> Cases:
    from attnplug.ops import QuantizedKV

    def case(batch, kv, size, width, dtype=BF16, block=64, **options):
        k, v = (new(batch, kv, size, width, dtype=dtype) for _ in range(2))
        tier = tier_of(QuantizedKV, k, block)
        return lambda: op(k, v, tier, block=block, **options)

    yield "bench", case(1, 8, 131072, 128, lengths=new(1))
    yield "block=16", case(1, 8, 131072, 128, block=16, lengths=new(1))
    yield "fp16 D=80 padded", case(2, 2, 1003, 80, FP16, block=16, **padding(2, 1003))
    yield "fp32 D=64 block=128", case(1, 2, 1024, 64, FP32, block=128)
    yield "padded", case(2, 4, 4096, 128, **padding(2, 4096))


@cases
def tiered_decode(op: Any) -> Cases:
    from attnplug import ops

    resident = getattr(ops, "ResidentBlocks", None) or ops.Near  # its name before

    def case(batch, heads, kv, size, width, dtype=BF16, slots=256, token=True, **options):
        q, k, v = attention(batch, heads, kv, 1, size, width, dtype)
        options = {"scale": 0.1, "block": 64, "top_k": 32, "lengths": new(1), **options}
        block, rows, local = options["block"], (batch, kv), options.get("local", 4)
        near = resident(
            new(*rows, 2, local * block, width, dtype=dtype),
            new(*rows, slots, 2, block, width, dtype=dtype), new(*rows, -(-size // block)),
            new(*rows, slots), new(*rows, slots), new(*rows, 3, dtype=INT64),
        )  # fmt: skip
        if token:
            options["new"] = tuple(new(*rows, 1, width, dtype=dtype) for _ in range(2))
        int8 = options.pop("int8", False)
        parts = 1 if options.get("scoring") == "mean" else 2
        made = summaries(k, block, parts, int8)
        return lambda: op(q, k, v, *made, near, **options)

    yield "bench", case(1, 28, 4, 131072, 128)
    yield "top_k=8 int8", case(1, 28, 4, 131072, 128, top_k=8, int8=True)
    yield "token is there", case(1, 28, 4, 131072, 128, token=False)
    yield "window only", case(1, 28, 4, 131072, 128, top_k=0)
    yield "estimate", case(1, 28, 4, 131072, 128, scoring="estimate")
    yield "mean", case(1, 28, 4, 131072, 128, scoring="mean")
    yield "batch=64", case(64, 28, 4, 32768, 128, slots=64, lengths=new(64))
    yield "fp16 D=80", case(2, 8, 2, 1003, 80, FP16, block=16, top_k=5, slots=33, lengths=new(2))
    capped = {"softcap": 30.0, "sinks": new(28, dtype=FP32)}
    yield "padded", case(2, 28, 4, 4096, 128, top_k=8, **capped, **padding(2, 4096))


def sketched(batch, kv, size, width, codes=24):
    """basis and codes of a cache."""
    fine, coarse = {16: (16, 32), 24: (32, 32), 32: (32, 64)}[codes]
    rows, rank = (batch, kv), fine + coarse
    basis = [
        new(*rows, *shape, dtype=FP32)
        for shape in ((width + 1, rank), (width, 2 * rank + 2 + width), (width,))
    ]
    shapes = (size, fine // 2), (size, coarse // 4), (-(-size // 32),)
    return basis, [*(new(*rows, *shape, dtype=torch.uint8) for shape in shapes), new(batch, 2)]


@cases
def encode_keys(op: Any) -> Cases:
    def case(batch, kv, size, width, dtype=BF16, codes=24, **options):
        _, k, v = attention(batch, kv, kv, 1, size, width, dtype)
        basis, made = sketched(batch, kv, size, width, codes)
        return lambda: op(k, v, basis[0], *made, **options)

    yield "bench", case(1, 4, 131072, 128, lengths=new(1))
    yield "fp32 16 bytes", case(2, 2, 1003, 64, FP32, codes=16, lengths=new(2))
    yield "padded 32 bytes", case(2, 4, 4096, 128, codes=32, **padding(2, 4096))


@cases
def sketch_decode(op: Any) -> Cases:
    def case(batch, heads, kv, size, width, dtype=BF16, token=True, ring=True, codes=24, **options):
        q, k, v = attention(batch, heads, kv, 1, size, width, dtype)
        options = {"scale": 0.1, "lengths": new(1), **options}
        if token:
            options["new"] = tuple(new(batch, kv, 1, width, dtype=dtype) for _ in range(2))
        if ring:
            options["recent"] = new(batch, heads, 512, width, dtype=dtype)
            options["hint"] = new(batch, kv, dtype=FP32)
        basis, made = sketched(batch, kv, size, width, codes)
        return lambda: op(q, k, v, *basis, *made, **options)

    yield "bench", case(1, 28, 4, 131072, 128)
    yield "uncounted", case(1, 28, 4, 131072, 128, count=False)
    yield "token is there", case(1, 28, 4, 131072, 128, token=False, ring=False)
    yield "mean 16 bytes", case(1, 28, 4, 131072, 128, tail="mean", codes=16)
    yield "drop 32 bytes", case(1, 28, 4, 131072, 128, tail="drop", codes=32)
    yield "batch=8 1M", case(8, 28, 4, 1048576, 128, lengths=new(8))
    yield "fp16 D=80", case(2, 8, 2, 1003, 80, FP16, top_k=100, lengths=new(2))
    yield "fp32 D=64", case(2, 9, 3, 4096, 64, FP32, lengths=new(2))
    yield "D=256", case(1, 4, 1, 32768, 256)
    capped = {"softcap": 30.0, "sinks": new(28, dtype=FP32)}
    yield "padded", case(2, 28, 4, 4096, 128, **capped, **padding(2, 4096))


@cases
def sketch_host_decode(op: Any) -> Cases:
    from attnplug.ops import FixedPart

    def case(batch, heads, kv, size, width, dtype=BF16, token=True, **options):
        q, k, v = attention(batch, heads, kv, 1, size, width, dtype)
        options = {"scale": 0.1, "lengths": new(1), **options}
        if token:
            options["new"] = tuple(new(batch, kv, 1, width, dtype=dtype) for _ in range(2))
            options["recent"] = new(batch, heads, 512, width, dtype=dtype)
            options["hint"] = new(batch, kv, dtype=FP32)
        fixed = FixedPart(new(batch, kv, 2, 640, width, dtype=dtype), new(batch, kv, 2))
        basis, made = sketched(batch, kv, size, width)
        return lambda: op(q, k, v, *basis, *made, fixed, **options)

    yield "bench", case(1, 28, 4, 1048576, 128)
    yield "token is there", case(1, 28, 4, 131072, 128, token=False)
    yield "fp16 D=80", case(2, 8, 2, 1003, 80, FP16, top_k=100, lengths=new(2))
    yield "fp32 D=256", case(1, 4, 1, 32768, 256, FP32)
    yield "padded", case(2, 28, 4, 4096, 128, softcap=30.0, **padding(2, 4096))


BOUND = {"tolerance": None, "k_min": 2, "ranking": 1, "explore": 0.0}
PAPER = BOUND | {"coverage": 0.995, "k_max": 128, "v_tol": 0.05}


@cases
def certified_attention(op: Any) -> Cases:
    from attnplug.ops import QuantizedKV, Scratch

    def case(batch, heads, kv, size, width, dtype=BF16, slots=0, block=64, **options):
        q, k, v = attention(batch, heads, kv, 1, size, width, dtype)
        rows, tier = (batch, kv), tier_of(QuantizedKV, k, block)
        if slots:
            options["scratch"] = Scratch(
                new(*rows, slots, block, width, dtype=dtype), *(new(*rows, slots) for _ in "abc"),
                new(*rows, 16, 3, dtype=INT64),
            )  # fmt: skip
        options["telemetry"] = new(*rows, heads // kv, 16, dtype=torch.float64)
        return lambda: op(q, k, v, tier, scale=0.1, block=block, **options)

    one, bench = {"lengths": new(1)}, (1, 32, 8, 131072, 128)
    yield "bound", case(*bench, **one, **BOUND)
    yield "default", case(*bench, **one)
    yield "default scratch", case(*bench, **one, slots=256)
    yield "paper scratch", case(*bench, **one, **PAPER, slots=256)
    yield "bound scratch", case(*bench, **one, **BOUND, slots=128)
    yield "value_budget", case(*bench, **one, value_budget=0.1, coverage=0.5)
    yield "few blocks", case(1, 28, 4, 1000, 128, **one)
    yield "bound few blocks", case(1, 28, 4, 1000, 128, **one, **BOUND | {"ranking": 0})
    yield "many blocks", case(1, 28, 4, 1 << 20, 128, **one)
    yield "bound batch=4 block=16", case(4, 32, 8, 65536, 128, block=16, **BOUND)
    yield "group=8", case(1, 32, 4, 32768, 128, **one)
    yield "fp16 D=64", case(2, 8, 2, 4003, 64, FP16, block=32, lengths=new(2), ranking=4, k_min=4)
    yield "fp32 D=80", case(1, 4, 4, 1024, 80, FP32, block=16)
    capped = {"softcap": 30.0, "sinks": new(28, dtype=FP32)}
    yield "padded", case(2, 28, 4, 8192, 128, **capped, **padding(2, 8192))
    yield "padded no mask", case(2, 28, 4, 8192, 128, **capped, **padding(2, 9, mask=False))


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
