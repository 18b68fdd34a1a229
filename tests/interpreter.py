"""What Triton's interpreter does otherwise in the tests.

It spends its time beside the arithmetic: it looks for what it must replace in each call of a device
function, makes the type of each value anew, and computes a check of overflow that it then drops.
Most of the suite's time is in it, so that here it does these once or not. It has BLAS multiply
tiles, which on some CPUs rounds a row by its place in the tile, as no GPU does. And before Triton
3.9 it refuses a sum of integers that wraps, which no GPU does."""

import dataclasses
import functools
import inspect
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def speed_up() -> None:
    """Have the interpreter compute the same values in less than half of the time."""
    replace_once_a_launch()
    remember_types()
    skip_equal_shapes()
    drop_unread_checks()


def replace_once_a_launch() -> None:
    """Have the calls of device functions keep what their launch has replaced. The interpreter looks
    through the whole of `triton.language` in each. What the launch has replaced stays so until it
    ends; once is enough."""
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[ModuleType] = set()
    running: list[interpreter.GridExecutor] = []

    @functools.wraps(replace)
    def replace_new(fn):
        modules = languages(fn)
        if running and modules <= replaced:
            return None  # which only a launch would use, to undo it
        scope = replace(fn)
        if running:
            replaced.update(modules)
        return scope

    @functools.wraps(launch)
    def launch_and_forget(self, *args, **options):
        running.append(self)
        try:
            return launch(self, *args, **options)
        finally:
            running.pop()
            replaced.clear()

    interpreter._patch_lang = replace_new
    interpreter.GridExecutor.__call__ = launch_and_forget


@functools.cache
def languages(fn) -> frozenset[ModuleType]:
    """The modules that a function's file knows Triton's language by."""
    known = interpreter.tl, interpreter.tl.core
    return frozenset(x for x in fn.__globals__.values() if inspect.ismodule(x) and x in known)


def remember_types() -> None:
    """Make the type of a block once for each element and shape, and of what a tensor takes from its
    type once for each type. Neither changes after it was made."""
    make_block, make_tensor = tl.core.block_type.__init__, tl.core.tensor.__init__
    equal, numpy_type = tl.core.dtype.__eq__, interpreter._get_np_dtype
    blocks: dict[Any, tl.block_type] = {}
    arrays: dict[str, Any] = {}

    def known_block(cls, element_ty, shape, *more):
        if cls is not tl.block_type:  # Gluon's, which have layouts
            return object.__new__(cls)
        sizes = tuple([x.value if isinstance(x, tl.constexpr) else x for x in shape])
        if any(type(size) is not int for size in sizes):  # refused, and 4.0 would find 4
            make_block(object.__new__(cls), element_ty, shape)
        key = element_ty.name, getattr(element_ty, "address_space", None), sizes
        found = blocks.get(key)
        if found is None:
            found = object.__new__(cls)
            make_block(found, element_ty, shape)
            blocks[key] = found
        return found

    def make_other_block(self, element_ty, shape):
        if type(self) is not tl.block_type:
            make_block(self, element_ty, shape)

    @functools.wraps(make_tensor)
    def remembered_tensor(self, handle, type):
        known = vars(type).get("of_tensors")
        if known is None:
            make_tensor(self, handle, type)
            vars(type)["of_tensors"] = {k: v for k, v in vars(self).items() if k != "handle"}
        else:
            vars(self).update(known, handle=handle)

    @functools.wraps(numpy_type)
    def remembered_array(type):
        scalar = type.element_ty if isinstance(type, tl.block_type) else type
        if scalar.name not in arrays:
            arrays[scalar.name] = numpy_type(type)
        return arrays[scalar.name]

    @functools.wraps(equal)
    def same_or_equal(self, other):
        return self is other or equal(self, other)

    tl.core.block_type.__new__ = known_block
    tl.core.block_type.__init__ = make_other_block
    tl.core.tensor.__init__ = remembered_tensor
    tl.core.dtype.__eq__ = same_or_equal
    interpreter._get_np_dtype = remembered_array


def skip_equal_shapes() -> None:
    """Leave alone what has one shape: most values that meet need no broadcast."""
    broadcast = TritonSemantic.broadcast_impl_value

    @functools.wraps(broadcast)
    def broadcast_others(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        if a is b or (a.is_block() and b.is_block() and a.shape.values == b.shape.values):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_others


def drop_unread_checks() -> None:
    """Leave out the check of overflow after each sum and product of integers: it ends in an assert
    of the device, which the interpreter leaves out where `debug` is not set."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def multiply_in_double() -> None:
    """Round a product of tiles once, at its end: a row's bits are then the same wherever in a tile
    it stands. Products of integers stay as they are."""
    multiply = interpreter.InterpreterBuilder.create_dot

    @functools.wraps(multiply)
    def multiply_and_round(self, a, b, d, input_precision, max_num_imprecise_acc):
        if not all(x.data.dtype in (np.float16, np.float32) for x in (a, b, d)):
            return multiply(self, a, b, d, input_precision, max_num_imprecise_acc)
        with np.errstate(over="ignore"):
            product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = multiply_and_round


def wrap_sums() -> None:
    """Have the sum of a whole block of integers wrap. NumPy adds 32-bit integers up in 64 bits. The
    interpreter narrows a result that has a shape. From a single number that does not fit, NumPy 2
    makes no array. Triton 3.9 narrows both."""
    make_tensor = interpreter.ReduceScanOpInterface.to_tensor

    @functools.wraps(make_tensor)
    def narrow_first(self, result, dtype):
        if isinstance(result, np.generic):
            result = result.astype(interpreter._get_np_dtype(dtype))
        return make_tensor(self, result, dtype)

    interpreter.ReduceScanOpInterface.to_tensor = narrow_first
