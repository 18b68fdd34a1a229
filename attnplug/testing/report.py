"""The result of a check: a list of what was asked, whether it held, and why not."""

import dataclasses
from collections.abc import Callable
from typing import Any

from attnplug.errors import AttnplugError

# What a check may meet while it runs somebody else's op or policy. Anything else (an interrupt, an
# error in the check itself) is passed on.
FAILURES = (
    AssertionError,
    AttnplugError,
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
)


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing asked. `passed` is None where it was not asked, and `why` says the reason, or what
    failed. `promise` is its number in the contract, 0 outside of it."""

    name: str
    passed: bool | None
    why: str = ""
    promise: int = 0

    def __str__(self) -> str:
        verdict = {True: "ok", False: "FAILED", None: "not asked"}[self.passed]
        number = f"{self.promise}. " if self.promise else ""
        return f"{number}{self.name}: {verdict}" + (f" ({self.why})" if self.why else "")


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """All checks of one subject."""

    subject: str
    checks: tuple[Check, ...]

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.passed is False]

    def require(self) -> "CheckReport":
        """This report, or AssertionError with every failure in it."""
        if self.failures:
            lines = "\n".join(f"  {check}" for check in self.failures)
            raise AssertionError(
                f"{self.subject}: {len(self.failures)} of {len(self.checks)} checks failed\n{lines}"
            )
        return self

    def __str__(self) -> str:
        return "\n".join([self.subject, *(f"  {check}" for check in self.checks)])


def collect(name: str, check: Callable[..., object], *args: Any, promise: int = 0) -> Check:
    """Run `check(*args)`: what it raises is why it failed."""
    try:
        check(*args)
    except FAILURES as error:
        text = str(error).strip() or "no message"
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return Check(name, False, kind + text, promise)
    return Check(name, True, "", promise)
