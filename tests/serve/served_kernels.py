"""python served_kernels.py JOB: which kernels requests in vLLM would compile, found without a GPU.

JOB is JSON {"policy", "heads", "kv_heads", "dim", "chunk", "longest", "rows", "prompts"}, and for
pages in fp8 {"fp8": "scaled"} or "plain". A layer is warmed as vLLM's profile run warms it, and
then serves as many prompts as "prompts" says, drawn at random, and all numbers of steps.
Tensors are fakes that say they are on an H200, and a launch ends where Triton would look for its
kernel. Prints one JSON line: how many kernels were warmed, and of each that was not the request
that wants it, and how its arguments differ from the arguments of the warm kernel most like it.
"""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import _ptx_gpu
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.runtime.jit import JITFunction

GPU, PAGE, PAGES = _ptx_gpu.GPU, 16, 4095
Kernel = tuple[str, str]  # its function, and how the launch specialises it
LAUNCHED: dict[Kernel, dict[str, Any]] = {}


def pretend() -> None:
    """Stand in for the GPU in torch and Triton, before the package is imported."""
    _ptx_gpu.pretend_card()
    torch.cuda.is_current_stream_capturing = lambda: False
    JITFunction.run = launch  # pyright: ignore
    # What a build of torch without CUDA has no device guard for; an allocator aligns to 512 bytes.
    FakeTensor.__getitem__ = item_of
    FakeTensor.__setitem__ = lambda self, index, value: None
    FakeTensor.copy_ = lambda self, value: self
    FakeTensor.data_ptr = lambda self: 512 + self.storage_offset() * self.element_size()


def item_of(self: torch.Tensor, index: Any) -> torch.Tensor:
    parts, found, dim = index if isinstance(index, tuple) else (index,), self, 0
    named = sum(part is not None and part is not Ellipsis for part in parts)
    for part in parts:
        if part is None:
            found, dim = found.unsqueeze(dim), dim + 1
        elif part is Ellipsis:
            dim += self.dim() - named
        elif isinstance(part, slice):
            first, last, step = part.indices(found.shape[dim])
            found, dim = torch.ops.aten.slice(found, dim, first, last, step), dim + 1
        elif isinstance(part, int):
            found = found.select(dim, part)
        else:
            found, dim = torch.ops.aten.index(found, [None] * dim + [part]), dim + 1
    return found


def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Note the kernel that Triton would take, which it compiles where it has none."""
    binder = self.device_caches[0][4]
    bound, kinds, _ = binder(*args, **options, debug=False, instrumentation_mode="")
    kinds = dict(zip(bound, kinds, strict=True))
    kinds |= {name: value for name, value in options.items() if name not in bound}
    LAUNCHED.setdefault((f"{self.fn.__module__}.{self.fn.__name__}", str(kinds)), kinds)


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=GPU)


class Server:
    """A served layer, warmed."""

    def __init__(
        self, policy: str, heads: int, kv_heads: int, dim: int, fp8: str = "", **room: int
    ):
        from attnplug.policies import parse
        from attnplug.serve.paged.layer import ServedLayer
        from attnplug.serve.paged.pages import Pages
        from attnplug.serve.paged.phases import Phases

        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.chunk, self.longest, self.rows = room["chunk"], room["longest"], room["rows"]
        asked = parse(policy)
        kept = {
            slot: method
            for slot in ("prefill", "decode", "trace")
            if (method := getattr(asked, slot)) is not None and method.name != "dense"
        }
        self.layer = ServedLayer(
            Phases(**kept), scale=dim**-0.5, softcap=0.0, sinks=None, device=GPU
        )
        shape = dict(heads=heads, kv_heads=kv_heads, head_dim=dim, dtype=torch.bfloat16, device=GPU)
        self.layer.warm_prompts(min(self.chunk, self.longest), self.longest, **shape)
        stored = {"fp8": bool(fp8), "scaled": fp8 == "scaled"}
        self.layer.warm_steps(self.rows, self.longest, page=PAGE, **stored, **shape)
        kept = {"dtype": torch.uint8} if fp8 else {}
        self.pages = Pages(*(new(PAGES, kv_heads, PAGE, dim, **kept) for _ in range(2)))
        if fp8:
            scales = [new(1, dtype=torch.float32) if fp8 == "scaled" else None for _ in "kv"]
            self.pages = self.pages.in_fp8(*scales)
        self.table = new(self.rows, -(-self.longest // PAGE), dtype=torch.int32)

    def prompt(self, draw: random.Random) -> str:
        """Serve a chunk behind a few steps, or in front of none."""
        from attnplug.serve.paged.rows import Row

        beside = draw.choice([0, draw.randrange(self.rows), self.rows - 1])
        whole = self.chunk - beside
        # Two at least: vLLM runs a chunk of one token as a step.
        queries = draw.choice([whole, draw.randint(2, whole), draw.randint(2, 64)])
        queries = min(queries, self.longest)
        near = 2 ** draw.randrange(6, 18) + draw.randint(-200, 200)  # where plans change
        seen = draw.choice([queries, draw.randint(queries, self.longest), self.longest, near])
        seen = min(max(seen, queries), self.longest)
        row, tokens = Row(beside, beside, queries, seen), beside + queries
        q, out = (new(tokens, self.heads, self.dim) for _ in range(2))
        k, v = (new(tokens, self.kv_heads, self.dim) for _ in range(2))
        if self.layer.serves_prompt(row):
            self.layer.attend_prompt(row, q, k, v, self.pages, self.table, out)
        if self.layer.phases.trace is not None:
            traced: Any = SimpleNamespace(recorded=True, row=row, emit=lambda *_: None)
            self.layer.trace_prompt(traced, q, k, v, self.pages, self.table)
        if self.layer.state is not None:
            self.layer.state.update(self.pages[0], new(tokens, dtype=torch.int64))
        return f"{row}"

    def steps(self, count: int, beside_a_prompt: bool) -> str:
        from attnplug.serve.paged.layer import Far

        q, out = (new(count + 100, self.heads, self.dim)[:count] for _ in range(2))
        lengths, near = (new(self.rows, dtype=torch.int32) for _ in range(2))
        far = Far(lengths, new(self.rows, dtype=torch.bool), near).first(count)
        self.layer.rule.divide(lengths[:count])
        more = {} if beside_a_prompt else dict(dense=lambda: None)
        if not beside_a_prompt:
            more["slots"] = new(count, dtype=torch.int64)
        self.layer.attend_steps(q, self.pages, self.table[:count], far, out, **more)
        return f"{count} steps" + (" beside a prompt" if beside_a_prompt else "")


def missing(server: Server, warmed: set[Kernel], prompts: int) -> dict[Kernel, str]:
    """The kernels that were not warmed, by the first request that wants each."""
    found: dict[Kernel, str] = {}

    def note(what: str) -> None:
        for kernel in LAUNCHED.keys() - warmed:
            found.setdefault(kernel, what)

    draw = random.Random(0)
    for _ in range(prompts):
        note(server.prompt(draw))
    if server.layer.phases.decode is not None:
        for count in range(1, server.rows + 1):
            for beside_a_prompt in (False, True):
                note(server.steps(count, beside_a_prompt))
    return found


def difference(kernel: Kernel, warmed: set[Kernel]) -> str:
    """How a kernel's arguments differ from those of the warm one that is most alike."""
    own, found = LAUNCHED[kernel], []
    for other in warmed:
        if other[0] == kernel[0]:
            theirs = LAUNCHED[other]
            found.append(
                [f"{n}: {theirs.get(n)} -> {own[n]}" for n in own if theirs.get(n) != own[n]]
            )
    return "; ".join(min(found, key=len)) if found else "not warmed at all"


def main() -> None:
    pretend()
    with FakeTensorMode():
        job = json.loads(sys.argv[1])
        import attnplug.ops.common.launches as launches

        launches.REPEATING = False  # fakes have no pointers, and every launch counts
        prompts = job.pop("prompts")
        server = Server(**job)
        warmed = set(LAUNCHED)
        wanted = missing(server, warmed, prompts)
    lacking = [f"{k[0]} for {what}: {difference(k, warmed)}" for k, what in wanted.items()]
    print(json.dumps({"warmed": len(warmed), "missing": lacking}))


if __name__ == "__main__":
    main()
