"""How an op of attnplug reaches torch: `define_op` registers schema, fake, CPU and CUDA
implementations with one call.

`Library.define` + `impl` costs 2 us a call where `torch.library.custom_op` costs 9 (and
`triton_op` ignores its CPU kernel under compile), which is why the ops are registered this way.
"""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo

from attnplug.errors import ArgumentError, CardError, GradientError
from attnplug.ops.common.first_call import announced
from attnplug.ops.common.launches import repeated
from attnplug.ops.common.no_triton import refuse
from attnplug.ops.common.threads import with_threads
from attnplug.ops.common.triton import INSTALLED, OutOfResources

LIBRARY = torch.library.Library("attnplug", "FRAGMENT")
# torch forgets the ops when their Library is collected, and this module may be imported again, by a
# notebook that reloads what was edited or after an import that failed half-way.
KEPT: list[torch.library.Library] = vars(torch.ops.attnplug).setdefault("_libraries", [])
KEPT.append(LIBRARY)


def define_op(
    schema: str,
    *,
    allocate: Callable[..., Any],
    cpu: Callable[..., None],
    cuda: Callable[..., None],
    repeats: bool = False,
) -> torch._ops.OpOverload:
    """Register one op and return its overload.

    `schema` is a torch schema without default values (the dispatcher drops trailing arguments that
    equal their default). `allocate(*args)` checks the arguments and returns the empty outputs, a
    tensor, a tuple of tensors, or None for an op that only mutates; traced, it is the fake, and it
    is the first step of every real call. `cpu(*args, *outputs)` and `cuda(*args, *outputs)` fill
    the outputs. `repeats`: a decode step's op, whose calls on a GPU follow from the form of their
    arguments alone and may be made again without either (`attnplug.ops.common.launches`).
    """
    name = schema.partition("(")[0]
    launch = announced(cuda, name, "Triton") if INSTALLED else refuse
    kernels = {
        "CPU": _run(allocate, announced(with_threads(cpu), name, "numba")),
        "CUDA": _run_on_device(name, _run(allocate, launch), repeats),
    }
    return _register(schema, allocate, kernels)


def arguments_of(schema: str) -> Any:
    """A NamedTuple of the arguments that an op's schema lists. Functions that `define_op` is given
    and that need most of them make one of their `*args`, so that the list stands once."""
    listed = torch._C.parse_schema(schema).arguments
    return namedtuple("Call", [x.name for x in listed])


def define_composite(
    schema: str, *, allocate: Callable[..., torch.Tensor], run: Callable[..., torch.Tensor]
) -> torch._ops.OpOverload:
    """Register an op that calls others and returns what they return; its overload. Compiled code
    does not look into it: what depends on sizes there is decided at run time, in one graph.
    `allocate(*args)` is the fake."""
    return _register(schema, allocate, {"CompositeExplicitAutograd": run})


def _register(
    schema: str, fake: Callable[..., Any], kernels: dict[str, Callable[..., Any]]
) -> torch._ops.OpOverload:
    """Define an op, or give one that an earlier import has defined what this one has for it."""
    name = schema.partition("(")[0]
    again = hasattr(torch.ops.attnplug, name)
    if not again:
        LIBRARY.define(schema)
    for key, kernel in kernels.items():
        # Where compiled code has a part that dynamo cannot trace, dynamo looks at all that runs
        # within that part, an op's kernel too, and warns of what it finds, or traces it wrongly.
        LIBRARY.impl(name, _disable_dynamo(kernel), key, allow_override=again)
    torch.library.register_fake(f"attnplug::{name}", fake, lib=LIBRARY, allow_override=again)
    return getattr(torch.ops.attnplug, name).default


def _outputs(allocated: Any) -> tuple[torch.Tensor, ...]:
    if allocated is None:
        return ()
    return (allocated,) if isinstance(allocated, torch.Tensor) else tuple(allocated)


def _run(allocate: Callable[..., Any], fill: Callable[..., None]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        allocated = allocate(*args)
        fill(*args, *_outputs(allocated))
        return allocated

    return run


def _run_on_device(name: str, run: Callable[..., Any], repeats: bool) -> Callable[..., Any]:
    if repeats:
        run = repeated(run)

    def run_on_device(*args: Any) -> Any:
        # Triton launches on the current device, which need not be the tensors' one.
        with torch.cuda.device(args[0].device):
            try:
                return run(*args)
            except OutOfResources as error:
                raise _card_error(name, args[0].device, error) from error

    return run_on_device


def _card_error(name: str, device: torch.device, error: Any) -> CardError:
    what = f"bytes of {error.name}" if error.name == "shared memory" else error.name
    card = torch.cuda.get_device_name(device)
    return CardError(
        f"{name}: a kernel wants {error.required:,} {what}, and {card} allows {error.limit:,}. "
        "Smaller heads or blocks want less, and so do 16-bit inputs; `attnplug doctor` says what "
        "this card lacks."
    )


def refuse_gradients(name: str, *tensors: torch.Tensor | None) -> None:
    """Raise GradientError where autograd would record the call: the ops have no backward."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise GradientError(
            f"{name}: an input requires grad, and attnplug's ops are inference only. Call the "
            "model under torch.no_grad() or torch.inference_mode()."
        )


def require(condition: bool, name: str, message: str) -> None:
    """Raise ArgumentError `name: message` unless the condition holds."""
    if not condition:
        raise ArgumentError(f"{name}: {message}")
