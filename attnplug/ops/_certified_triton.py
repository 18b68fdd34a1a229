"""The launcher of `certified_attention`: seven kernels in a row, nothing asked of the host."""

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from attnplug.ops._certified_attend import attend, prepare, promote, recompute
from attnplug.ops._certified_finish import finish, replace
from attnplug.ops._certified_select import select
from attnplug.ops._define import mask_bytes, row_step
from attnplug.ops._splits import LOG2E, machine

INF = float("inf")
PHASES = ("prepare", "attend", "select", "promote", "finish", "recompute", "replace")


def capacity_for(blocks: int, k_max: int, explore: float) -> int:
    """Blocks that one KV head can read exactly in a step, of `blocks` in the cache: what rung 1
    may promote, as many again for their values, and the spot checks with room for chance."""
    return min(blocks, 4 * k_max + 32 + int(1.5 * explore * blocks))


def splits_for(batch: int, kv_heads: int, blocks: int, multiprocessors: int) -> int:
    """Programs a KV head: eight a multiprocessor hide the latency of the codes best; one more reads
    what is not quantized."""
    return 1 + max(1, min(8 * multiprocessors // (batch * kv_heads), blocks))


def _types(q: torch.Tensor) -> tuple[tl.dtype, tl.dtype, int]:
    """(dtype of the products with codes, with values, parts of a float32 factor)."""
    if q.dtype == torch.float32:
        return tl.float32, tl.float32, 1
    # bf16 has the range of the scales; the interpreter cannot multiply it.
    return (tl.bfloat16 if q.is_cuda else tl.float32), tl.float16, 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the kernels cut the work; chosen from static shapes alone."""

    splits: int  # programs of the pass over the blocks, for each KV head
    pieces: int  # programs that read promoted blocks, for each KV head
    warps: int = 4
    stages: int = 3
    checked: bool = True  # compare the check words; off only to time what they cost


class _Step:
    """One call: its inputs, what the kernels share of them, and their scratch memory."""

    def __init__(self, tensors, rows, scale, block, softcap, sinks, telemetry, capacity, plan):
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
        self.kv_heads, self.size, self.blocks = *self.k.shape[1:3], self.check.shape[2]
        self.block, self.group = block, self.heads // self.kv_heads
        self.two, self.cap, self.capped = scale * LOG2E, softcap * LOG2E, softcap > 0
        self.qk, self.pv, self.parts = _types(self.q)
        mask_step = 0 if self.mask is None else self.mask.stride(0)
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
        splits, pieces = self.plan.splits, self.plan.pieces
        self.base, self.delta, self.noise, self.logs = floats(4, heads, max(1, self.blocks))
        self.partial, self.partial_lse = floats(heads, splits, self.width), floats(heads, splits)
        self.changes, self.tops = floats(heads, pieces, self.width), floats(heads, pieces)
        self.extremes, self.slots = floats(heads, splits, 3), floats(heads, 2, self.capacity)
        self.tails = floats(heads, 12)
        self.chosen, self.counts = integers(groups, self.capacity), integers(groups, 2)
        self.flags = torch.zeros((self.batch, 2), dtype=torch.int32, device=self.q.device)

    def prepare(self, multiprocessors: int) -> None:
        tile = 32
        most = 4 * multiprocessors // (self.batch * self.kv_heads)
        programs = max(1, min(triton.cdiv(self.blocks, tile), most))
        prepare[(programs, self.kv_heads, self.batch)](
            self.q, self.meta, self.summary, self.check, self.progress, *self.rows, self.base,
            self.delta, self.noise, self.flags, self.two, self.cap, self.size, self.blocks,
            programs, *self.q_strides, *self.shape, self.block, tile, self.qk, self.parts,
            self.capped, *self.steps, num_warps=4,
        )  # fmt: skip

    def attend(self) -> None:
        plan: Any = self.plan
        attend[(plan.splits, self.kv_heads, self.batch)](
            self.q, self.k, self.v, self.k_codes, self.meta, self.v_codes, self.v_meta, self.check,
            self.progress, *self.rows, self.mask, self.base, self.logs, self.partial,
            self.partial_lse, self.extremes, self.flags, self.two, self.cap, self.size, self.blocks,
            plan.splits, *self.strides, *self.shape, self.block, *self.halves, plan.stages,
            self.qk, self.pv, self.parts, self.capped, plan.checked, *self.steps,
            num_warps=plan.warps,
        )  # fmt: skip

    def select(self, coverage, k_min, k_max, v_tol, value_budget, key_tolerance, explore) -> None:
        tile = max(16, min(triton.next_power_of_2(self.blocks), 1024))
        select[(self.kv_heads, self.batch)](
            self.logs, self.delta, self.noise, self.summary, self.progress, *self.rows,
            self.partial_lse, self.chosen, self.counts, self.tails, coverage, k_min, k_max, v_tol,
            min(value_budget, 1e30), min(key_tolerance, 1e30), explore, self.size, self.blocks,
            self.capacity, self.plan.splits, self.group, triton.next_power_of_2(self.group),
            self.block, tile, triton.next_power_of_2(self.plan.splits), key_tolerance < INF,
            value_budget < INF, *self.steps, num_warps=8,  # pyright: ignore[reportCallIssue]
        )  # fmt: skip

    def promote(self) -> None:
        promote[(self.plan.pieces, self.kv_heads, self.batch)](
            self.q, self.k, self.v, self.k_codes, self.meta, self.v_codes, self.v_meta,
            self.summary, self.mask, *self.rows, self.base, self.delta, self.chosen, self.counts,
            self.slots, self.changes, self.tops, self.flags, self.two, self.cap, self.size,
            self.blocks, self.capacity, self.plan.pieces, *self.strides, *self.shape, self.block,
            *self.halves, self.qk, self.pv, self.parts, self.capped, *self.steps, num_warps=4,
        )  # fmt: skip

    def finish(self, out, lse, bounds, rungs, value_budget, tolerance, ranking) -> None:
        rows = 0 if self.telemetry is None else self.telemetry.shape[2]
        finish[(self.heads, self.batch)](
            out, lse, bounds, rungs, self.telemetry, self.sinks, self.summary, self.progress,
            *self.rows, self.partial, self.partial_lse, self.extremes, self.changes, self.tops,
            self.slots, self.chosen, self.counts, self.tails, self.flags, value_budget, tolerance,
            self.unit_p, self.unit, self.size, self.blocks, self.capacity, self.plan.splits,
            self.plan.pieces, self.kv_heads, rows, self.group, self.width, self.shape[3],
            self.block, triton.next_power_of_2(self.capacity), ranking, *self.steps, num_warps=4,
        )  # fmt: skip

    def recompute(self, rungs) -> None:
        rows = 0 if self.telemetry is None else self.telemetry.shape[2]
        recompute[(self.plan.splits, self.kv_heads, self.batch)](
            self.q, self.k, self.v, *self.rows, self.mask, rungs, self.telemetry, self.partial,
            self.partial_lse, self.extremes, self.two, self.cap, self.size, self.plan.splits, rows,
            *self.strides, *self.shape, 32, *self.halves, self.parts, self.capped, *self.steps,
            num_warps=4,
        )  # fmt: skip

    def replace(self, out, lse, bounds, rungs) -> None:
        splits = self.plan.splits
        replace[(self.heads, self.batch)](
            out, lse, bounds, rungs, self.sinks, *self.rows, self.partial, self.partial_lse,
            self.extremes, self.unit_p, self.unit, self.size, splits, self.width, self.shape[3],
            triton.next_power_of_2(splits), *self.steps, num_warps=4,
        )  # fmt: skip


def launch(
    q, k, v, k_codes, k_meta, v_codes, v_meta, summary, check, progress, scale, block, coverage,
    k_min, k_max, v_tol, value_budget, key_tolerance, tolerance, ranking, explore, lengths, start,
    key_mask, softcap, sinks, telemetry, out, lse, bounds, rungs, plan=None, phases=PHASES,
):  # fmt: skip
    """Run the kernels; tensors as in `certified_attention`, on a GPU or in Triton's interpreter.
    `phases`: only the first so many, to time them."""
    batch, kv_heads, blocks = q.shape[0], k.shape[1], check.shape[2]
    multiprocessors, _ = machine(q.device)
    capacity = max(1, capacity_for(blocks, k_max, explore))
    if plan is None:
        pieces = max(1, min(2 * multiprocessors // (batch * kv_heads), capacity))
        plan = Plan(splits_for(batch, kv_heads, blocks, multiprocessors), pieces)
    tensors = (q, k, v, k_codes, k_meta, v_codes, v_meta, summary, check, progress)
    rows = (lengths, start, key_mask)
    step = _Step(tensors, rows, scale, block, softcap, sinks, telemetry, capacity, plan)
    run = {
        "prepare": (step.prepare, (multiprocessors,)),
        "attend": (step.attend, ()),
        "select": (
            step.select, (coverage, k_min, k_max, v_tol, value_budget, key_tolerance, explore),
        ),
        "promote": (step.promote, ()),
        "finish": (step.finish, (out, lse, bounds, rungs, value_budget, tolerance, ranking)),
        "recompute": (step.recompute, (rungs,)),
        "replace": (step.replace, (out, lse, bounds, rungs)),
    }  # fmt: skip
    for phase in phases:
        function, arguments = run[phase]
        function(*arguments)
