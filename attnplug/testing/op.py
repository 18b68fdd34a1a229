"""`check_op`: an op against its oracle and against what torch expects of an op."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from attnplug.errors import ArgumentError
from attnplug.testing.inputs import LAYOUTS, AttentionInputs, lay_out, odd_inputs
from attnplug.testing.oracle import largest, oracle_attention, tolerance
from attnplug.testing.report import CheckReport, collect

# The tests of `torch.library.opcheck`: the first compares the arguments before and after the call.
COMPARING = ("test_schema",)
OTHERS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def check_op(
    op: Callable[..., Any],
    reference: Callable[..., Any] = oracle_attention,
    inputs: Iterable[AttentionInputs] | None = None,
    *,
    tensors: str = "qkv",
    options: dict[str, Any] | None = None,
    factor: float = 4.0,
    allowed: Callable[[AttentionInputs], float] | None = None,
    sequence: bool = True,
    surface: bool = True,
    backend: str = "inductor",
    device: str = "cpu",
) -> CheckReport:
    """Hold `op` to `reference` and to what torch expects of an op; raise AssertionError naming
    every failure, else return the report.

    Both are called as `f(q, k, v, scale=, lengths=, start=, key_mask=, **options)`, without options
    that are None. An op without a sequence's tensors says `sequence=False`. `tensors` names those
    of q, k and v that the op takes: "qk" stands for `f(q, k, scale=...)`, and "k" for `f(k, ...)`,
    without `scale`, which is a factor on q.k. Both return a tensor or a tuple, compared member by
    member as far as both go; `reference` is to compute in fp64.

    `inputs` defaults to `odd_inputs`. Checked on each: the error is at most `allowed(inputs)`. Its
    default is attention's `tolerance` with `factor`; an op that does not take q, k and v gives its
    own. On the first input with T > 1 also: the same result from other memory layouts,
    `torch.library.opcheck` of every op it calls, `torch.compile(fullgraph=True)` equal to eager,
    and with `surface` that a NaN stays visible, in its own row and heads only.

    Raises:
        AssertionError: a check failed.
        ArgumentError: `tensors` or `allowed` does not fit.
    """
    _check_tensors(tensors, allowed)
    cases = list(odd_inputs(sequence=sequence) if inputs is None else inputs)
    cases = [case if case.q.device.type == device else case.to(device) for case in cases]
    options = options or {}
    call = functools.partial(_call, op, tensors, options)
    expect = functools.partial(_call, reference, tensors, options)
    limit = allowed or functools.partial(_default_limit, factor)
    compare = functools.partial(_compare, call, expect, limit)
    checks = [collect(f"oracle, {case}", compare, case) for case in cases]
    typical = next((case for case in cases if case.q.shape[2] > 1), cases[0])
    for layout in LAYOUTS[1:]:
        checks.append(collect(f"layout {layout}", compare, _laid_out(typical, layout)))
    checks.append(collect("opcheck", opcheck_calls, functools.partial(call, typical)))
    checks.append(collect("compile", _compiles, call, typical, backend))
    if surface:
        checks += [collect(f"NaN in {w}", _surfaces, call, expect, typical, w) for w in tensors]
    return CheckReport("check_op", tuple(checks)).require()


def _check_tensors(tensors: str, allowed: Callable[[AttentionInputs], float] | None) -> None:
    if tensors not in ("q", "k", "v", "qk", "qv", "kv", "qkv"):
        raise ArgumentError(f"check_op: tensors is {tensors!r}, needs names out of 'qkv', in order")
    if tensors != "qkv" and allowed is None:
        raise ArgumentError(
            f"check_op: allowed is None, but an op of {tensors!r} needs its own: the default is "
            "attention's error"
        )


def _call(
    fn: Callable[..., Any], tensors: str, options: dict[str, Any], inputs: AttentionInputs
) -> tuple[torch.Tensor, ...]:
    own = inputs.options()
    if "q" not in tensors:
        del own["scale"]
    result = fn(*(getattr(inputs, name) for name in tensors), **own, **options)
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def _default_limit(factor: float, inputs: AttentionInputs) -> float:
    return tolerance(inputs.q, inputs.k, inputs.v, factor=factor, **inputs.options())


def _compare(
    call: Callable[..., tuple[torch.Tensor, ...]],
    expect: Callable[..., tuple[torch.Tensor, ...]],
    limit: Callable[[AttentionInputs], float],
    inputs: AttentionInputs,
) -> None:
    allowed = limit(inputs)
    found, wanted = call(inputs), expect(inputs)
    assert found[0].dtype == inputs.q.dtype, f"out is {found[0].dtype}, q is {inputs.q.dtype}"
    for place, (got, want) in enumerate(zip(found, wanted, strict=False)):
        assert got.shape == want.shape, f"output {place}: {got.shape}, not {want.shape}"
        got, want = got.double(), want.double()
        # Only the first output scales with the values; a log-sum-exp is of order of its logits.
        room = allowed if place == 0 else allowed + 1e-3 * float(largest(want) + 1)
        wrong = (got != want) & ~((got - want).abs() <= room) & ~(got.isnan() & want.isnan())
        assert not wrong.any(), (
            f"output {place}: {int(wrong.sum())} of {wrong.numel()} elements are off by more than "
            f"{room:.3g}, first at {wrong.nonzero()[0].tolist()}, worst {largest(got - want):.3g}"
        )


def _laid_out(inputs: AttentionInputs, layout: str) -> AttentionInputs:
    q, k, v = (lay_out(x.contiguous(), layout) for x in (inputs.q, inputs.k, inputs.v))
    return dataclasses.replace(inputs, q=q, k=k, v=v, note=layout)


class _Recorder(TorchDispatchMode):
    """Collects the calls of ops from outside torch's own namespaces."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace not in ("aten", "prim", "prims", "profiler", "_c10d_functional"):
            self.calls.append((func, _cloned(args), _cloned(kwargs)))
        return func(*args, **kwargs)


def _cloned(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.clone, tree)


def opcheck_calls(call: Callable[[], Any]) -> set[str]:
    """Hold every op that `call()` calls to `torch.library.opcheck`; the names of these ops. A call
    with float8 tensors, which torch cannot compare, is not held to what its schema writes."""
    with _Recorder() as recorder:
        call()
    assert recorder.calls, "it calls no registered op: torch.compile would trace into it"
    for func, args, kwargs in recorder.calls:
        tests = COMPARING + OTHERS
        if any("float8" in str(x.dtype) for x in args if isinstance(x, torch.Tensor)):
            tests = OTHERS
        found = torch.library.opcheck(func, args, kwargs, test_utils=tests, raise_exception=False)
        failed = {test: result for test, result in found.items() if result != "SUCCESS"}
        assert not failed, f"{func}: {failed}"
    return {func.name() for func, _, _ in recorder.calls}


def _compiles(
    call: Callable[[AttentionInputs], tuple[torch.Tensor, ...]],
    inputs: AttentionInputs,
    backend: str,
) -> None:
    eager = call(inputs)
    torch._dynamo.reset()  # earlier shapes must not count against the recompilation limit
    names = list(inputs.options())

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, values: list[Any]) -> Any:
        options = dict(zip(names, values, strict=True))
        return call(AttentionInputs(q, k, v, **options))

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    found = compiled(inputs.q, inputs.k, inputs.v, list(inputs.options().values()))
    torch._dynamo.reset()
    torch.testing.assert_close(tuple(found), eager, equal_nan=True)


def _surfaces(
    call: Callable[[AttentionInputs], tuple[torch.Tensor, ...]],
    expect: Callable[[AttentionInputs], tuple[torch.Tensor, ...]],
    inputs: AttentionInputs,
    which: str,
) -> None:
    """A NaN in one q, k or v vector: the op must lose every query that the reference loses, and
    none of another row or KV head."""
    poisoned = getattr(inputs, which).clone()
    token = poisoned.shape[2] // 2
    poisoned[-1, -1, token, 0] = torch.nan
    case = dataclasses.replace(inputs, **{which: poisoned})
    found, clean = (_lost(call(x)[0]) for x in (case, inputs))
    wanted = _lost(expect(case)[0])
    assert wanted.any(), "the reference hides the NaN: nothing to compare with"
    hidden = wanted & ~found
    assert not hidden.any(), f"queries {hidden.nonzero().tolist()} hide it"
    group = found.shape[1] // inputs.k.shape[1]
    own = torch.zeros_like(found)
    own[-1, -group:] = True
    leaked = found & ~clean & ~own
    assert not leaked.any(), f"it reached queries {leaked.nonzero().tolist()} of others"


def _lost(out: torch.Tensor) -> torch.Tensor:
    """Where an output is NaN: of `[B,H,T,D]` which vectors, else which elements."""
    return out.isnan().any(-1) if out.dim() == 4 else out.isnan()
