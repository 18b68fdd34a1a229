"""A GPU that is not there, for bench/ptx.py: tensors without memory that say they are on it, and
what torch and Triton ask of it. Launches compile for `target`, one of `TARGETS`."""

import contextlib
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from _ptx_inputs import GPU
from triton.backends.compiler import GPUTarget

IMPLEMENTED: dict[str, Callable[..., Any]] = {}  # by the op's name, for CUDA
CALLED: set[str] = set()


class Target(NamedTuple):
    """A card by what its makers' tables say of it."""

    name: str
    arch: int | str  # as Triton takes it
    capability: tuple[int, int]  # as torch would give it
    processors: int
    shared: int  # bytes that a program may have

    @property
    def hip(self) -> bool:
        return isinstance(self.arch, str)

    @property
    def fp8(self) -> bool:
        """Whether it converts float8_e4m3fn."""
        return not self.hip and self.capability >= (8, 9)


TARGETS = {
    "sm_80": Target("NVIDIA A100", 80, (8, 0), 108, 166912),
    "sm_86": Target("NVIDIA GeForce RTX 3090", 86, (8, 6), 82, 101376),
    "sm_89": Target("NVIDIA GeForce RTX 4090", 89, (8, 9), 128, 101376),
    "sm_90": Target("NVIDIA H200", 90, (9, 0), 132, 232448),
    "sm_100": Target("NVIDIA B200", 100, (10, 0), 148, 232448),
    "sm_120": Target("NVIDIA GeForce RTX 5090", 120, (12, 0), 170, 101376),
    "gfx942": Target("AMD Instinct MI300X", "gfx942", (9, 4), 304, 65536),
}
target = TARGETS["sm_90"]


def aim(at: Target) -> None:
    """Have everything from here on see this target."""
    global target
    target = at
    torch.version.hip = "7.0" if target.hip else None  # pyright: ignore


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

    utils = SimpleNamespace(
        get_device_properties=lambda device: {
            "max_shared_mem": target.shared,
            "multiprocessor_count": target.processors,
        }
    )

    def launcher_cls(self, *args: Any) -> None:
        """No launcher: nothing is loaded, let alone launched."""

    def get_current_target(self) -> GPUTarget:
        if target.hip:
            return GPUTarget("hip", target.arch, 64)
        return GPUTarget("cuda", target.arch, 32)

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
    pretend_card()


def properties(device: Any = None) -> SimpleNamespace:
    """What torch says of the card."""
    major, minor = target.capability
    found = SimpleNamespace(
        multi_processor_count=target.processors, major=major, minor=minor, name=target.name,
        shared_memory_per_block=target.shared if target.hip else 49152, L2_cache_size=60 << 20,
    )  # fmt: skip
    if not target.hip:
        found.shared_memory_per_block_optin = target.shared
    return found


def pretend_card() -> None:
    """Have torch and Triton see the target, and the package's ops run there."""
    torch.cuda.device = lambda device: contextlib.nullcontext()  # pyright: ignore
    torch.cuda.get_device_properties = properties  # pyright: ignore
    torch.cuda.get_device_capability = lambda device=None: target.capability
    torch.cuda.get_device_name = lambda device=None: target.name  # pyright: ignore
    triton.runtime.driver.set_active(Driver())  # pyright: ignore
    hook_ops()


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
