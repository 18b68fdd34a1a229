"""Enough of Gluon, in numpy, to run a one-warp kernel's source on a CPU: tensors are arrays,
layouts are nothing, inline assembly is interpreted. Says whether the program is right, and nothing
of its lowering."""

import re
import types
from pathlib import Path

import numpy as np

KINDS = {
    "float32": np.float32, "float16": np.float16, "bfloat16": np.float32, "int64": np.int64,
    "int32": np.int32, "int16": np.int16, "int1": np.bool_,
}  # fmt: skip
PROGRAM = [(0, 0, 0), (1, 1, 1)]  # ids and counts


def rounded(x):
    """float32 rounded to bfloat16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return bits.astype(np.uint32).view(np.float32)


class Tensor:
    def __init__(self, a, kind=None):
        self.a = np.asarray(a)
        self.kind = kind or self.a.dtype.name.replace("bool", "int1")

    type = types.SimpleNamespace(layout=None)

    def to(self, kind, bitcast=False):
        if bitcast and kind == "bfloat16":
            return Tensor((self.a.astype(np.uint16).astype(np.uint32) << 16).view(np.float32), kind)
        if bitcast:
            return Tensor(np.ascontiguousarray(self.a).view(KINDS[kind]), kind)
        if kind == "bfloat16":
            return Tensor(rounded(self.a), kind)
        return Tensor(self.a.astype(KINDS[kind]), kind)

    def __getitem__(self, index):
        return Tensor(self.a[index], self.kind)

    def __int__(self):
        return int(self.a)

    __index__ = __int__

    def __bool__(self):
        return bool(self.a)


def raw(x):
    return x.a if isinstance(x, Tensor) else x


def operator(name, reverse=False):
    def run(self, other):
        a, b = (raw(other), self.a) if reverse else (self.a, raw(other))
        if isinstance(other, Pointer):
            return other + self
        return Tensor(np.asarray(getattr(np, name)(a, b)))

    return run


NAMES = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "mod": "remainder",
    "floordiv": "floor_divide", "and": "bitwise_and", "or": "bitwise_or", "lshift": "left_shift",
    "rshift": "right_shift", "lt": "less", "le": "less_equal", "gt": "greater", "eq": "equal",
    "ge": "greater_equal", "ne": "not_equal",
}  # fmt: skip
for short, name in NAMES.items():
    setattr(Tensor, f"__{short}__", operator(name))
    setattr(Tensor, f"__r{short}__", operator(name, True))


class Pointer:
    """Elements of a flat array from an offset on."""

    def __init__(self, memory, at=0):
        self.memory, self.at = memory, np.asarray(at)

    def __add__(self, other):
        return Pointer(self.memory, self.at + np.asarray(raw(other), np.int64))

    def __getitem__(self, index):
        return Pointer(self.memory, self.at[index])

    def to(self, kind, bitcast):
        return Tensor(self.at)


def load(pointer, mask=None, other=0):
    shown = np.broadcast_to(True if mask is None else raw(mask), pointer.at.shape)
    assert ((pointer.at >= 0) & (pointer.at < len(pointer.memory)))[shown].all()
    found = pointer.memory[np.where(shown, pointer.at, 0)]
    return Tensor(np.where(shown, found, np.asarray(other, found.dtype)))


def store(pointer, value, mask=True):
    at, x, shown = np.broadcast_arrays(pointer.at, raw(value), raw(mask))
    assert ((at >= 0) & (at < len(pointer.memory)))[shown].all()
    pointer.memory[at[shown]] = x[shown]


def half2(x):
    return np.ascontiguousarray(x, np.uint32).view(np.float16).reshape(*np.shape(x), 2)


def word(x):
    return np.ascontiguousarray(x, np.float16).view(np.uint32)[..., 0]


def prmt(a, b, select):
    both = a.astype(np.uint64) | b.astype(np.uint64) << 32
    parts = [(both >> 8 * (select >> 4 * i & 7) & 255) << 8 * i for i in range(4)]
    return sum(parts).astype(np.uint32)


def assembly(text, inputs, outputs):
    """Run the few instructions that these kernels have; operands are arrays of 32-bit words."""
    names = {f"${outputs + i}": np.asarray(x).astype(np.int64).astype(np.uint32)
             for i, x in enumerate(inputs)}  # fmt: skip
    shape = np.broadcast_shapes(*(np.shape(x) for x in inputs))

    def value(token):
        if token in names:
            return names[token]
        return np.full(shape, int(token, 0), np.uint32)

    for line in re.split(r"[;{}\n]", text):
        op, _, rest = line.strip().partition(" ")
        if not op or op.startswith(".reg"):
            continue
        out, *tokens = (token.strip() for token in rest.split(","))
        args = [value(token) for token in tokens]
        if op == "mov.b32":
            result = args[0]
        elif op == "xor.b32":
            result = args[0] ^ args[1]
        elif op == "shr.u32":
            result = args[0] >> args[1]
        elif op == "prmt.b32":
            result = prmt(args[0], args[1], int(tokens[2], 0))
        elif op == "lop3.b32":
            assert tokens[3] == "0xea"
            result = args[0] & args[1] | args[2]
        elif op == "sub.f16x2":
            result = word(half2(args[0]) - half2(args[1]))
        elif op == "fma.rn.f16x2":
            a, b, c = (half2(x).astype(np.float64) for x in args)
            result = word((a * b + c).astype(np.float16))
        else:
            raise AssertionError(op)
        names[out] = result
    return [names[f"${i}"] for i in range(outputs)]


def inline_asm_elementwise(text, places, args, *, dtype, is_pure, pack):
    if not is_pure:  # prefetches and waits
        return Tensor(0)
    count = places.count("=")
    arrays = np.broadcast_arrays(*(raw(x) for x in args))
    inputs = [x[..., i::pack] for x in arrays for i in range(pack)]
    words = assembly(text, inputs, count)
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    results = []
    for i, kind in enumerate(kinds):
        if kind == "float16":
            assert pack == 2 and count == len(kinds)
            result = half2(words[i])
        else:
            result = np.stack([x.view(np.int32) for x in words[i * pack : i * pack + pack]], -1)
        results.append(Tensor(result.reshape(*result.shape[:-2], -1)))
    return tuple(results) if isinstance(dtype, tuple) else results[0]


def mma_v2(a, b, acc):
    with np.errstate(all="ignore"):
        return Tensor(acc.a + a.a.astype(np.float32) @ b.a.astype(np.float32))


class Shared:
    def store(self, x):
        self.x = x

    def load(self, layout):
        return self.x


def _language():
    gl = types.SimpleNamespace()
    for kind in KINDS:
        setattr(gl, kind, kind)
    gl.exp2, gl.log2 = (lambda x: Tensor(np.exp2(x.a))), (lambda x: Tensor(np.log2(x.a)))
    gl.abs = lambda x: Tensor(np.abs(x.a))
    gl.maximum = lambda a, b: Tensor(np.fmax(raw(a), raw(b)))
    gl.minimum = lambda a, b: Tensor(np.fmin(raw(a), raw(b)))
    gl.constexpr = lambda x: x
    gl.program_id = lambda i: Tensor(np.int32(PROGRAM[0][i]))
    gl.num_programs = lambda i: PROGRAM[1][i]
    gl.arange = lambda a, b, layout: Tensor(np.arange(a, b, dtype=np.int32))
    gl.full = lambda shape, x, kind, layout: Tensor(np.full(shape, x, KINDS[kind]))
    gl.where = lambda c, a, b: Tensor(np.where(raw(c), raw(a), raw(b)).astype(
        np.result_type(*(x.a.dtype for x in (a, b) if isinstance(x, Tensor)))))  # fmt: skip
    gl.sum = lambda x, axis: Tensor(x.a.sum(axis, dtype=x.a.dtype))
    gl.max = lambda x, axis: Tensor(np.fmax.reduce(x.a, axis))
    gl.reshape = lambda x, shape: Tensor(x.a.reshape(shape), x.kind)
    gl.permute = lambda x, order: Tensor(x.a.transpose(order), x.kind)
    gl.join = lambda a, b: Tensor(np.stack(np.broadcast_arrays(a.a, b.a), -1), a.kind)
    gl.expand_dims = lambda x, axis: Tensor(np.expand_dims(x.a, axis), x.kind)
    gl.broadcast = lambda a, b: [Tensor(x) for x in np.broadcast_arrays(a.a, b.a)]
    gl.convert_layout = lambda x, layout: x
    gl.static_range = range
    gl.barrier = lambda: None
    gl.allocate_shared_memory = lambda kind, shape, layout: Shared()
    gl.load, gl.store, gl.inline_asm_elementwise = load, store, inline_asm_elementwise
    nothing = lambda *args, **kwargs: None  # noqa: E731
    for name in (
        "NVMMADistributedLayout", "DistributedLinearLayout", "DotOperandLayout", "SliceLayout",
        "BlockedLayout", "SwizzledSharedLayout",
    ):  # fmt: skip
        setattr(gl, name, nothing)
    return gl


def kernel(path, name, **functions):
    """The kernel `name` of a file, as a Python function; `functions` replace what it imports."""
    source = Path(path).read_text()
    source = re.sub(r"^from (triton|attnplug).*$", "", source, flags=re.M)
    jit = types.SimpleNamespace(jit=lambda f: f)
    space = {"gl": _language(), "gluon": jit, "mma_v2": mma_v2, **functions}
    exec(compile(source, str(path), "exec"), space)
    space["range"] = spread
    return space[name]


def spread(*ends):
    """`range` whose numbers are tensors."""
    return [Tensor(np.int32(i)) for i in range(*(int(x) for x in ends))]


def run(function, grid, *args, **kwargs):
    for x in np.ndindex(*grid[::-1]):
        PROGRAM[:] = [tuple(x[::-1]), grid]
        with np.errstate(all="ignore"):
            function(*args, **kwargs)
