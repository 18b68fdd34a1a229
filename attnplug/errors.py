"""Every exception that a user of attnplug can meet. Each message says what came, what is needed,
and what to do about it."""


class AttnplugError(Exception):
    """Base of all errors raised by attnplug."""


class ArgumentError(AttnplugError, ValueError):
    """An op got a tensor or an option that it cannot take (shape, dtype, device, range)."""


class GradientError(AttnplugError, RuntimeError):
    """An op was called where autograd would need its gradient; attnplug is inference only."""


class PolicyError(AttnplugError, ValueError):
    """A policy string, object or mapping could not be understood."""


class UnsupportedModelError(AttnplugError, ValueError):
    """The model does not go through transformers' attention interface, or uses it in a way that
    attnplug cannot serve correctly."""


class UnsupportedCallError(AttnplugError, RuntimeError):
    """A supported model was called in a way that attnplug cannot serve correctly."""


class AlreadyAppliedError(AttnplugError, RuntimeError):
    """`attnplug.apply` was called on a model that has a policy already."""


class NotAppliedError(AttnplugError, RuntimeError):
    """`attnplug.remove` or `attnplug.report` was called on a model without a policy."""


class RankError(AttnplugError, RuntimeError):
    """Ranks that were to compute together could not: one was called with something else, refused
    the call, or has ended."""


class FileError(ArgumentError, OSError):
    """A file or folder cannot be read or written: a disk is full, bytes are damaged or of another
    program, or the user may not. What was there before a write is there after it."""


class WeightsUnavailableError(FileError):
    """The weights of a named model are neither in the cache nor to be fetched."""


class MissingPackageError(AttnplugError, ImportError):
    """A command or a module needs a package that comes with an extra of attnplug, such as
    `attnplug[trace]`, and that is not installed."""


class CardError(AttnplugError, RuntimeError):
    """A kernel wants more of a GPU than it has, such as shared memory."""


class HostMemoryError(AttnplugError, MemoryError):
    """A cache that keeps its originals in host memory could not be given any."""


class ServeError(AttnplugError, ValueError):
    """A serving engine was asked for something that attnplug cannot do inside it."""


class TraceFileError(FileError):
    """A trace file is damaged, is no trace, or cannot be written where it should be."""


def first_line(error: BaseException) -> str:
    """The first line of what any error says."""
    said = str(error).strip()
    if not said or isinstance(error, TypeError | KeyError | ZeroDivisionError):
        said = f"{type(error).__name__} {said}".strip()  # of Python's own, which names no file
    return said.splitlines()[0].rstrip(".")
