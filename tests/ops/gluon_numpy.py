"""Enough of Gluon, in numpy, to run a one-warp kernel's source on a CPU: tensors are arrays,
layouts are None, inline assembly is interpreted. This checks the program, not its lowering."""

import functools
import re
import types
from pathlib import Path

import numpy as np

KINDS = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.float32,
    "int64": np.int64,
    "int32": np.int32,
    "int16": np.int16,
    "int8": np.int8,
    "int1": np.bool_,
}
PROGRAM = [(0, 0, 0), (1, 1, 1)]  # ids and counts
BARRIERS = []  # of the program that runs


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
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
    "mod": "remainder",
    "floordiv": "floor_divide",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "lshift": "left_shift",
    "rshift": "right_shift",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "eq": "equal",
    "ge": "greater_equal",
    "ne": "not_equal",
}
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


def load(pointer, mask=None, other=0):
    shown = np.broadcast_to(True if mask is None else raw(mask), pointer.at.shape)
    assert ((pointer.at >= 0) & (pointer.at < len(pointer.memory)))[shown].all()
    found = pointer.memory[np.where(shown, pointer.at, 0)]
    return Tensor(np.where(shown, found, np.asarray(other, found.dtype)))


def store(pointer, value, mask=True):
    at, x, shown = np.broadcast_arrays(pointer.at, raw(value), raw(mask))
    assert ((at >= 0) & (at < len(pointer.memory)))[shown].all()
    pointer.memory[at[shown]] = x[shown]


def where(condition, a, b):
    dtypes = (x.a.dtype for x in (a, b) if isinstance(x, Tensor))
    return Tensor(np.where(raw(condition), raw(a), raw(b)).astype(np.result_type(*dtypes)))


def half2(x):
    return np.ascontiguousarray(x, np.uint32).view(np.float16).reshape(*np.shape(x), 2)


def word(x):
    return np.ascontiguousarray(x, np.float16).view(np.uint32)[..., 0]


def prmt(a, b, select):
    both = a.astype(np.uint64) | b.astype(np.uint64) << 32
    parts = [(both >> 8 * (select >> 4 * i & 7) & 255) << 8 * i for i in range(4)]
    return sum(parts).astype(np.uint32)


def words_of(x):
    """An operand as 32-bit words."""
    if x.dtype == np.float32:
        return np.ascontiguousarray(x).view(np.uint32)
    return np.asarray(x).astype(np.int64).astype(np.uint32)


def assembly(text, inputs, outputs):
    """Run the few instructions that these kernels have; operands are arrays of 32-bit words."""
    names = {f"${outputs + i}": words_of(x) for i, x in enumerate(inputs)}
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
        elif op == "and.b32":
            result = args[0] & args[1]
        elif op == "or.b32":
            result = args[0] | args[1]
        elif op == "not.b32":
            result = ~args[0]
        elif op == "shl.b32":
            result = args[0] << args[1]
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
    if not is_pure:  # launches of, and waits for, dependent kernels
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
        elif kind == "int8":
            assert pack == 4 and count == len(kinds)
            result = np.ascontiguousarray(words[i]).view(np.int8).reshape(*words[i].shape, 4)
        else:
            result = np.stack([x.view(np.int32) for x in words[i * pack : i * pack + pack]], -1)
        results.append(Tensor(result.reshape(*result.shape[:-2], -1)))
    return tuple(results) if isinstance(dtype, tuple) else results[0]


def mma_v2(a, b, acc):
    if acc.a.dtype == np.int32:
        return Tensor(acc.a + a.a.astype(np.int32) @ b.a.astype(np.int32))
    with np.errstate(all="ignore"):
        return Tensor(acc.a + a.a.astype(np.float32) @ b.a.astype(np.float32))


class Shared:
    """Shared memory, or one of a ring's slots."""

    def __init__(self, shape):
        self.shape = shape
        self.slots = [Shared(shape[1:]) for _ in range(shape[0])] if len(shape) > 1 else []

    def index(self, i):
        return self.slots[int(i)]

    def store(self, x):
        self.x = x

    def load(self, layout):
        self.read = True
        return self.x


class Lines:
    """A tensor descriptor."""

    layout = None

    def __init__(self, words):
        self.words = words.reshape(-1, 32)


class Barrier:
    """What `mbarrier` has of functions: phases must be waited for as they are, once each."""

    MBarrierLayout = staticmethod(lambda: None)

    @staticmethod
    def init(bar, count):
        bar.filled = bar.waited = bar.left = 0
        BARRIERS.append(bar)

    @staticmethod
    def expect(bar, size):
        bar.filled, bar.left = bar.filled + 1, size

    @staticmethod
    def wait(bar, phase):
        assert bar.filled == bar.waited + 1 and bar.left == 0 and int(phase) == bar.waited % 2
        bar.waited += 1


def copy_tile(lines, at, bar, slot):
    assert getattr(slot, "read", True), "a slot is filled before it has been read"
    row, rows = int(at[0]), slot.shape[0]
    assert 0 <= row <= len(lines.words) - rows
    slot.x, slot.read = Tensor(lines.words[row : row + rows].copy()), False
    bar.left -= slot.x.a.nbytes


def _language():
    gl = types.SimpleNamespace()
    for kind in KINDS:
        setattr(gl, kind, kind)
    gl.exp2, gl.log2 = (lambda x: Tensor(np.exp2(x.a))), (lambda x: Tensor(np.log2(x.a)))
    gl.abs = lambda x: Tensor(np.abs(x.a))
    gl.maximum = lambda a, b, propagate_nan=False: Tensor(
        (np.maximum if propagate_nan else np.fmax)(raw(a), raw(b))
    )
    gl.reduce = lambda x, axis, f: functools.reduce(
        f, (Tensor(y) for y in np.moveaxis(x.a, axis, 0))
    )
    gl.split = lambda x: (Tensor(x.a[..., 0]), Tensor(x.a[..., 1]))
    gl.minimum = lambda a, b: Tensor(np.fmin(raw(a), raw(b)))
    gl.constexpr = lambda x: x
    gl.program_id = lambda i: Tensor(np.int32(PROGRAM[0][i]))
    gl.num_programs = lambda i: PROGRAM[1][i]
    gl.arange = lambda a, b, layout: Tensor(np.arange(a, b, dtype=np.int32))
    gl.full = lambda shape, x, kind, layout: Tensor(np.full(shape, x, KINDS[kind]))
    gl.where = where
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
    gl.allocate_shared_memory = lambda kind, shape, layout: Shared(shape)
    gl.load, gl.store, gl.inline_asm_elementwise = load, store, inline_asm_elementwise
    nothing = lambda *args, **kwargs: None  # noqa: E731
    for name in (
        "NVMMADistributedLayout",
        "DistributedLinearLayout",
        "DotOperandLayout",
        "SliceLayout",
        "BlockedLayout",
        "SwizzledSharedLayout",
    ):
        setattr(gl, name, nothing)
    return gl


TL = types.SimpleNamespace(PropagateNan=types.SimpleNamespace(ALL=True))


IMPORT = re.compile(r"^(from|import) (triton|attnplug)[^(\n]*(\([^)]*\))?$", re.M)


def kernel(paths, name, **functions):
    """The kernel `name` of some files, as a Python function; `functions` replace what they import
    from elsewhere."""
    space = {
        "gl": _language(),
        "gluon": types.SimpleNamespace(jit=lambda f: f),
        "triton": types.SimpleNamespace(constexpr_function=lambda f: f),
        "mma_v2": mma_v2,
        "tl": TL,
        "mbarrier": Barrier,
        "copy_tile": copy_tile,
        "fence_async_shared": lambda: None,
        **functions,
    }
    for path in paths:
        exec(compile(IMPORT.sub("", Path(path).read_text()), str(path), "exec"), space)
    space["range"] = spread
    return space[name]


def spread(*ends):
    """`range` whose numbers are tensors."""
    return [Tensor(np.int32(i)) for i in range(*(int(x) for x in ends))]


def run(function, grid, *args, **kwargs):
    for x in np.ndindex(*grid[::-1]):
        PROGRAM[:] = [tuple(x[::-1]), grid]
        BARRIERS.clear()
        with np.errstate(all="ignore"):
            function(*args, **kwargs)
        assert all(bar.filled == bar.waited and bar.left == 0 for bar in BARRIERS), "in flight"
