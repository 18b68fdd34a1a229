"""The launcher of `certified_attention`: a chain of kernels, nothing asked of the host. Most are
launched before the one in front of them has ended (programmatic dependent launch)."""

import dataclasses
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnplug.ops.certified.kernels.attend import attend, prepare
from attnplug.ops.certified.kernels.choose import choose_blocks
from attnplug.ops.certified.kernels.exact import attend_rest, recompute
from attnplug.ops.certified.kernels.finish import finish, replace
from attnplug.ops.certified.kernels.hopper import attend_blocks
from attnplug.ops.certified.kernels.hopper_tiles import layouts
from attnplug.ops.certified.kernels.promote import promote
from attnplug.ops.certified.scratch import SETS, Scratch
from attnplug.ops.common.device import machine
from attnplug.ops.common.rows import mask_bytes, row_step
from attnplug.ops.common.softmax import LOG2E

INF = float("inf")
PHASES = ("prepare", "rest", "attend", "choose", "promote", "finish", "recompute", "replace")


def capacity_for(blocks: int, k_max: int, explore: float) -> int:
    """Blocks that one KV head can read exactly in a step, of `blocks` in the cache: what rung 1
    may promote, as many again for their values, and the spot checks with room for chance."""
    return min(blocks, 4 * k_max + 32 + int(1.5 * explore * blocks))


def _types(q: torch.Tensor) -> tuple[tl.dtype, tl.dtype, int]:
    """(dtype of the products with codes, with values, parts of a float32 factor)."""
    if q.dtype == torch.float32:
        return tl.float32, tl.float32, 1
    # bf16 has the range of the scales; the interpreter cannot multiply it.
    return (tl.bfloat16 if q.is_cuda else tl.float32), tl.float16, 2


class Hopper(NamedTuple):
    """Of the Hopper kernel: see `Plan`, and its programs a multiprocessor."""

    step: int
    registers: int
    programs: int
    ring: int


CHOOSING = (512, 8, None)  # blocks a tile, warps, and registers of a thread at most
# Masses and scores that a program that chooses holds in registers: 80 a thread, as `_above` cuts
# them, which is for 8 warps. Half as many where it searches more than once.
HELD = 20480
PROMOTING = (4, 255)  # warps, and registers of a thread at most
TAKERS = 2  # programs a multiprocessor that read a list
HOPPER = Hopper(step=32, registers=255, programs=8, ring=1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the kernels cut the work; chosen from static shapes alone."""

    splits: int  # programs of the pass over the blocks, for each KV head
    pieces: int  # programs that recompute, for each KV head
    chunks: int = 2  # programs that choose and list, for each KV head: a power of two, SETS at most
    takers: int = 4  # programs that read a list of promoted blocks: a power of two
    sums: int = 2  # where few blocks are promoted, programs that choose and sum up: as chunks
    readers: int = 2  # and that choose and read, or more: a power of two; 0: always a list
    step: int = 0  # tokens at a time of the Hopper kernel; 0: the kernels for all cases
    registers: int | None = None  # of a thread of the Hopper kernel at most
    ring: int = 2  # steps that it has copied to shared memory at a time
    warps: int = 4  # of the kernel for all cases
    stages: int = 3
    checked: bool = True  # compare the check words; off only to time what they cost


def plan_for(
    batch: int, kv_heads: int, group: int, width: int, blocks: int, block: int, capacity: int,
    multiprocessors: int, hopper: bool,
) -> Plan:  # fmt: skip
    """The pre-tuned plan of a shape. `hopper`: such a GPU, 16-bit queries and no key mask."""
    share = max(1, batch * kv_heads)
    pieces = max(1, min(2 * multiprocessors // share, capacity))
    # One runs on a multiprocessor, and those that merge want room beside the others. A program's
    # own blocks must not be so many that it has no registers for them.
    room = multiprocessors // share - group
    least = min(SETS, triton.next_power_of_2(triton.cdiv(blocks, 1024)))
    chunks = max(least, _power_of_two(max(4, min(room, SETS))))
    takers = _power_of_two(max(4, min(TAKERS * multiprocessors // share, 64)))
    readers = 4 if room >= 12 else 2
    sums = max(least, _power_of_two(max(2, min(room - readers, SETS))))
    # Its lines are of 128 channels, and a tensor descriptor has a line at least.
    if hopper and width == 128 and group <= 7 and blocks > 0:
        splits = max(1, min(HOPPER.programs * multiprocessors // share, blocks))
        step, registers = min(HOPPER.step, block), HOPPER.registers
        return Plan(
            splits, pieces, chunks, takers, sums, readers, step, registers, HOPPER.ring
        )  # fmt: skip
    return Plan(
        max(1, min(4 * multiprocessors // share, blocks)), pieces, chunks, takers, sums, readers
    )


def _power_of_two(n: int) -> int:
    """The largest that is at most n."""
    return 1 << n.bit_length() - 1


def held_blocks(blocks: int, heads: int, again: bool) -> int:
    """How large a tile holds the masses of so many blocks (a power of two) and heads in a program's
    registers, with their scores; 0: none does. `again`: it is not the only search."""
    tile = max(1024, blocks)
    return tile if tile * (heads + 1) <= (HELD // 2 if again else HELD) else 0


PREPARED = 32  # blocks that a program prepares at a time


class _Step:
    """One call: its inputs, what the kernels share of them, and their scratch memory."""

    def __init__(
        self, tensors, rows, scale, block, softcap, sinks, telemetry, scratch, capacity, plan, few,
        readers,
    ):  # fmt: skip
        self.q, self.k, self.v = (x if x.stride(3) == 1 else x.contiguous() for x in tensors[:3])
        self.k_codes, k_meta, self.v_codes, self.v_meta, self.summary, self.check, self.progress = (
            tensors[3:]
        )
        self.meta = k_meta.view(torch.int16)
        lengths, start, key_mask = rows
        self.rows, self.mask = (lengths, start), mask_bytes(key_mask)
        self.steps = row_step(lengths), row_step(start)
        self.sinks, self.telemetry, self.plan, self.capacity = sinks, telemetry, plan, capacity
        self.batch, self.heads, _, self.width = self.q.shape
        self.multiprocessors, self.pdl = machine(self.q.device)
        self.early: dict[str, Any] = {"launch_pdl": True} if self.pdl else {}
        self.kv_heads, self.size, self.blocks = *self.k.shape[1:3], self.check.shape[2]
        self.block, self.group = block, self.heads // self.kv_heads
        self.two, self.cap, self.capped = scale * LOG2E, softcap * LOG2E, softcap > 0
        self.qk, self.pv, self.parts = _types(self.q)
        mask_step = 0 if self.mask is None else self.mask.stride(0)
        self.scratch = scratch
        self.slots = 0 if scratch is None else scratch.owner.shape[2]
        self.few, self.readers = few, readers
        self.takers = self.readers or plan.takers
        self.chunks = plan.sums if readers > 0 else plan.chunks
        self.own = max(16, triton.next_power_of_2(triton.cdiv(self.blocks, self.chunks)))
        self.q_strides = self.q.stride()[:2]
        self.strides = (
            *self.q_strides, *self.k.stride()[:3], *self.v.stride()[:3], mask_step,
        )  # fmt: skip
        half = self.v_codes.shape[4] // 16
        self.halves = half, triton.next_power_of_2(half)
        group_rows = max(16, triton.next_power_of_2(self.group + 1))  # a spare row sums the codes
        padded = triton.next_power_of_2(self.width)
        self.shape = self.group, group_rows, self.width, padded
        self.unit = torch.finfo(self.q.dtype).eps / 2
        self.unit_p = self.unit if self.q.dtype == torch.float32 else 2.0**-11
        self._allocate()

    def _allocate(self) -> None:
        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=self.q.device)

        def integers(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=self.q.device)

        heads, groups = self.batch * self.heads, self.batch * self.kv_heads
        splits, pieces, blocks = self.plan.splits, self.plan.pieces, max(1, self.blocks)
        self.base, self.delta, self.noise, self.logs = floats(4, heads, blocks)
        self.partial = floats(heads, splits + 1, self.width)
        self.partial_lse, self.merged = floats(heads, splits + 1), floats(heads, self.width)
        self.found, self.norms = floats(heads, 10, self.chunks), floats(heads, 2)
        self.gained = floats(heads, 20, self.takers)
        self.listed = integers(1 if self.readers > 0 else groups * self.chunks * self.own * 3)
        self.extremes, self.counts = floats(heads, 3), integers(groups, 5, self.chunks)
        self.named = integers(groups)
        # Recomputation takes the place of what promotion has changed.
        self.changes = floats(heads, max(self.takers, pieces), self.width)
        self.exact_lse, self.exact_extremes = floats(heads, pieces), floats(heads, pieces, 2)
        self.flags, self.odd, self.programs = integers(groups, 2), None, 1
        if self.plan.step == 0:
            most = max(1, 4 * self.multiprocessors // groups)
            self.programs = min(triton.cdiv(blocks, PREPARED), most)
            self.odd = integers(groups, self.programs)

    def prepare(self) -> None:
        if self.plan.step > 0:
            return
        prepare[(self.programs, self.kv_heads, self.batch)](
            self.q, self.meta, self.summary, self.check, self.progress, *self.rows, self.base,
            self.delta, self.noise, self.odd, self.two, self.cap, self.size, self.blocks,
            self.programs, *self.q_strides, *self.shape, self.block, PREPARED,
            self.qk, self.parts, self.capped, *self.steps, self.pdl, num_warps=4, **self.early,
        )  # fmt: skip

    def rest(self) -> None:
        attend_rest[(self.kv_heads, self.batch)](
            self.q, self.k, self.v, self.progress, *self.rows, self.mask, self.odd, self.flags,
            self.partial, self.partial_lse, self.extremes, self.two, self.cap, self.size,
            self.plan.splits, self.programs, *self.strides, *self.shape, self.block,
            min(self.block, 64 if self.width <= 128 else 32), *self.halves,
            triton.next_power_of_2(self.programs), self.parts, self.capped, *self.steps, self.pdl,
            num_warps=4, num_stages=1, **self.early,
        )  # fmt: skip

    def attend(self) -> None:
        plan: Any = self.plan
        grid = plan.splits, self.kv_heads, self.batch
        if plan.step > 0:
            meta, summary = (x.view(torch.int32) for x in (self.meta, self.summary))
            keys, values = self._lines(self.k_codes, 1, 128), self._lines(self.v_codes, 2, 128)
            more = {} if plan.registers is None else {"maxnreg": plan.registers}
            attend_blocks[grid](
                self.q, keys, meta, values, self._lines(self.v_meta, 4, 0), summary, self.check,
                self.progress, *self.rows, self.base, self.delta, self.noise, self.logs,
                self.partial, self.partial_lse, self.flags, self.two, self.cap, self.size,
                self.blocks, plan.splits, *self.q_strides, self.group, self.width, self.block,
                plan.step, *layouts(plan.step), plan.ring, self.capped, plan.checked,
                *self.steps, self.pdl, num_warps=1, **more, **self.early,
            )  # fmt: skip
            return
        attend[grid](
            self.q, self.k_codes, self.meta, self.v_codes, self.v_meta, self.check, self.progress,
            *self.rows, self.mask, self.base, self.logs, self.partial, self.partial_lse,
            self.flags, self.two, self.cap, self.size, self.blocks, plan.splits, *self.q_strides,
            self.strides[-1], *self.shape, self.block, *self.halves, plan.stages, self.qk, self.pv,
            self.parts, self.capped, plan.checked, *self.steps, self.pdl, num_warps=plan.warps,
            **self.early,
        )  # fmt: skip

    def _lines(self, x: torch.Tensor, tokens: int, swizzle: int) -> TensorDescriptor:
        """Of lines of 128 bytes, so many tokens each; a step's at a time."""
        layout = gl.NVMMASharedLayout(swizzle, 32, 2)
        lines = x.view(torch.int32).view(-1, 32)
        return TensorDescriptor.from_tensor(lines, [self.plan.step // tokens, 32], layout)

    def choose(  # launched late: early the whole step is slower (docs/log.md)
        self, coverage, k_min, k_max, v_tol, value_budget, key_tolerance, explore, ranking
    ) -> None:
        tile, warps, registers = CHOOSING
        _, owner, used, _, counters = self.scratch or (None,) * 5
        every = max(16, triton.next_power_of_2(self.blocks))
        heads = triton.next_power_of_2(self.group)
        again = min(value_budget, key_tolerance) < INF
        held = 0 if self.few else held_blocks(every, heads, again)
        tile = every if self.few else min(every, tile)
        ways = triton.next_power_of_2(max(1, self.slots // self.chunks))
        programs = self.readers + self.chunks + self.group
        choose_blocks[(self.kv_heads, programs, self.batch)](
            self.q, self.k, self.v, self.k_codes, self.meta, self.v_codes, self.v_meta,
            self.summary, self.progress, *self.rows, self.mask, self.base, self.delta, self.noise,
            self.logs, self.partial, self.partial_lse, self.merged, self.found, self.counts,
            self.norms, self.listed, self.gained, self.changes, self.flags, self.named, owner, used,
            counters,
            coverage, k_min, k_max, v_tol, min(value_budget, 1e30),
            min(key_tolerance, 1e30), explore, self.two, self.cap, self.size, self.blocks,
            self.plan.splits + 1, self.slots, *self.strides, *self.shape, self.block, *self.halves,
            heads, tile, triton.next_power_of_2(self.plan.splits + 1),
            self.chunks, self.readers, self.own, ways, SETS, ranking, explore > 0, held,
            self.few, coverage > 0, key_tolerance < INF, value_budget < INF, self.qk, self.pv,
            self.parts, self.capped, *self.steps, self.pdl, num_warps=warps,
            **self._limits(registers),
        )  # fmt: skip

    def promote(self, ranking) -> None:
        if self.readers > 0:
            return
        warps, registers = PROMOTING
        slots, owner, _, seals, _ = self.scratch or (None,) * 5
        promote[(self.takers, self.kv_heads, self.batch)](
            self.q, self.k, self.v, self.k_codes, self.meta, self.v_codes, self.v_meta,
            self.summary, self.progress, *self.rows, self.mask, self.base, self.delta, self.counts,
            self.listed, self.gained, self.changes, self.flags, slots, owner, seals, self.two,
            self.cap, self.size, self.blocks, self.slots, *self.strides, *self.shape, self.block,
            *self.halves, self.chunks, self.own, self.takers, ranking,
            self.qk, self.pv, self.parts, self.capped, *self.steps, self.pdl, num_warps=warps,
            **self._limits(registers), **self.early,
        )  # fmt: skip

    def _limits(self, registers: int | None) -> dict[str, Any]:
        bound = {"maxnreg": registers} if registers is not None and self.pdl else {}
        return {"num_stages": 1, **bound}

    def finish(self, out, lse, bounds, rungs, value_budget, tolerance, ranking) -> None:
        rows = 0 if self.telemetry is None else self.telemetry.shape[2]
        finish[(self.heads, self.batch)](
            out, lse, bounds, rungs, self.telemetry, self.sinks, self.progress, *self.rows,
            self.merged, self.extremes, self.found, self.counts, self.norms, self.gained,
            self.changes, self.flags, self.named, value_budget, tolerance, self.unit_p, self.unit,
            self.size, self.capacity, self.plan.splits, self.kv_heads, rows, self.group, self.width,
            self.shape[3], self.block, self.chunks, self.takers, self.readers == 0,
            triton.next_power_of_2(self.kv_heads), ranking, *self.steps, self.pdl, num_warps=4,
            **self.early,
        )  # fmt: skip

    def recompute(self, rungs) -> None:
        rows = 0 if self.telemetry is None else self.telemetry.shape[2]
        pieces = self.plan.pieces
        recompute[(pieces, self.kv_heads, self.batch)](
            self.q, self.k, self.v, *self.rows, self.mask, rungs, self.telemetry, self.changes,
            self.exact_lse, self.exact_extremes, self.two, self.cap, self.size, pieces, rows,
            *self.strides, *self.shape, 32, *self.halves, self.parts, self.capped, *self.steps,
            self.pdl, num_warps=4, **self.early,
        )  # fmt: skip

    def replace(self, out, lse, bounds, rungs) -> None:
        pieces = self.plan.pieces
        replace[(self.heads, self.batch)](
            out, lse, bounds, rungs, self.sinks, *self.rows, self.changes, self.exact_lse,
            self.exact_extremes, self.unit_p, self.unit, self.size, pieces, self.width,
            self.shape[3], triton.next_power_of_2(pieces), *self.steps, self.pdl, num_warps=4,
            **self.early,
        )  # fmt: skip


def launch(
    q, k, v, k_codes, k_meta, v_codes, v_meta, summary, check, progress, scale, block, coverage,
    k_min, k_max, v_tol, value_budget, key_tolerance, tolerance, ranking, explore, lengths, start,
    key_mask, softcap, sinks, telemetry, slots, owner, used, seals, counters, out, lse, bounds,
    rungs, plan=None, phases=PHASES,
):  # fmt: skip
    """Run the kernels; tensors as in `certified_attention`, on a GPU or in Triton's interpreter.
    `phases`: only the first so many, to time them."""
    batch, kv_heads, blocks = q.shape[0], k.shape[1], check.shape[2]
    multiprocessors, hopper = machine(q.device)
    capacity = max(1, capacity_for(blocks, k_max, explore))
    if plan is None:
        plan = plan_for(
            batch, kv_heads, q.shape[1] // kv_heads, q.shape[3], blocks, block, capacity,
            multiprocessors, hopper and q.dtype != torch.float32 and key_mask is None,
        )  # fmt: skip
    tensors = (q, k, v, k_codes, k_meta, v_codes, v_meta, summary, check, progress)
    rows = (lengths, start, key_mask)
    scratch = None if owner is None else Scratch(slots, owner, used, seals, counters)
    few = coverage == 0 and k_min <= 4 and blocks <= 8192  # found in one sweep
    few = few and value_budget == key_tolerance == INF
    inline = plan.readers > 0 and few and scratch is None and explore == 0 and v_tol >= 1e30
    readers = max(plan.readers, triton.next_power_of_2(k_min)) if inline else 0
    step = _Step(
        tensors, rows, scale, block, softcap, sinks, telemetry, scratch, capacity, plan, few,
        readers,
    )  # fmt: skip
    run = {
        "prepare": (step.prepare, ()),
        "rest": (step.rest, ()),
        "attend": (step.attend, ()),
        "choose": (
            step.choose,
            (coverage, k_min, k_max, v_tol, value_budget, key_tolerance, explore, ranking),
        ),
        "promote": (step.promote, (ranking,)),
        "finish": (step.finish, (out, lse, bounds, rungs, value_budget, tolerance, ranking)),
        "recompute": (step.recompute, (rungs,)),
        "replace": (step.replace, (out, lse, bounds, rungs)),
    }  # fmt: skip
    for phase in phases:
        function, arguments = run[phase]
        function(*arguments)
