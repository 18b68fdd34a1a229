"""Compile-time constants of kernels that cost a launch nothing.

At every launch Triton compares each global that a kernel uses with what it was when the kernel was
compiled, and `tl.constexpr` makes two objects of itself for each comparison: 0.2 us a constant.
"""

from collections import namedtuple
from typing import Any

from attnplug.ops.common.triton import tl


class Constant(tl.constexpr):
    """A `tl.constexpr` that is its own copy and that `!=` compares without making another.

    One that holds a NamedTuple of constants lends its fields: kernels write `TABLE.FIELD`, and a
    launch compares the table as one.
    """

    # A bool where the base makes a constant, which is what costs the time.
    def __ne__(self, other: object) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.value != (other.value if isinstance(other, tl.constexpr) else other)

    __eq__ = tl.constexpr.__eq__
    __hash__ = tl.constexpr.__hash__

    def __deepcopy__(self, memo: object) -> "Constant":
        return self  # it never changes; the identical fields of a table are compared at once

    def __getattr__(self, name: str) -> Any:
        if name in ("value", "type") or name not in getattr(self.value, "_fields", ()):
            raise AttributeError(name)
        return getattr(self.value, name)


def table_of(names: dict[str, Any]) -> Any:
    """All `Constant`s among a module's `names`, as one table."""
    fields = {name: value for name, value in names.items() if type(value) is Constant}
    return Constant(namedtuple("Table", fields)(**fields))
