"""What stands for Triton's names where it is not installed. A file of kernels names data types,
layouts and constants when it is imported. Only the constants are read, by the numba references."""

from typing import Any, NoReturn

from attnplug.errors import UnsupportedCallError


def refuse(*args: Any, **options: Any) -> NoReturn:
    raise UnsupportedCallError(
        "Triton is not installed, and attnplug's kernels need it: `pip install triton` on Linux. "
        "Tensors on the CPU need no Triton."
    )


class Absent:
    """Any function, decorator, type or module of Triton, and any kernel. Only a launch raises."""

    run = staticmethod(refuse)

    def __call__(self, *args: Any, **options: Any) -> "Absent":
        return self

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, grid: Any) -> NoReturn:
        refuse()


class Constexpr:
    """`tl.constexpr`: a constant and its value."""

    def __init__(self, value: Any) -> None:
        self.value = value.value if isinstance(value, Constexpr) else value

    def __eq__(self, other: object) -> bool:
        return self.value == (other.value if isinstance(other, Constexpr) else other)

    def __hash__(self) -> int:
        return hash(self.value)


class Language(Absent):
    """`triton.language`, and Gluon's."""

    constexpr = Constexpr


class Triton(Absent):
    """`triton`; rows and traces record its version."""

    __version__ = "none"


ABSENT, language, triton = Absent(), Language(), Triton()
