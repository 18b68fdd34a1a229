"""The launcher of `certified_attention`: a chain of kernels, nothing asked of the host. Most are
launched before the one in front of them has ended (programmatic dependent launch)."""

from typing import Any

import torch

from attnplug.ops.certified import plan as plans
from attnplug.ops.certified.call import (
    Call,
    CertifiedOutput,
    Inputs,
    arithmetic_of,
    memory_of,
    programs_of,
    shape_of,
)
from attnplug.ops.certified.kernels.arguments import (
    Choice,
    Splits,
)
from attnplug.ops.certified.kernels.attend import attend, prepare
from attnplug.ops.certified.kernels.choose import choose_blocks
from attnplug.ops.certified.kernels.exact import attend_rest, recompute
from attnplug.ops.certified.kernels.finish import finish
from attnplug.ops.certified.kernels.hopper import attend_blocks
from attnplug.ops.certified.kernels.promote import promote
from attnplug.ops.certified.kernels.replace import replace
from attnplug.ops.certified.kernels.weigh import merge_heads, weigh_heads
from attnplug.ops.certified.plan import INF, PREPARED, PROMOTING, Plan, capacity_for, plan_for
from attnplug.ops.common.device import card
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.sizes import cdiv, next_power_of_two
from attnplug.ops.common.softmax import LOG2E
from attnplug.ops.common.triton import TensorDescriptor, gl
from attnplug.ops.common.views import steps_of

FIRST = ("prepare", "rest", "attend")  # what reads the tier, and what is not quantized
PHASES = (*FIRST, "merge", "weigh", "choose", "promote", "finish", "recompute", "replace")
EXACT_TILE = 32  # tokens at a time of a recomputation


class _Step:
    """One call: a method for each of its `PHASES`."""

    def __init__(
        self, inputs: Inputs, block: int, scale: float, softcap: float, plan: Plan, readers: int
    ) -> None:
        self.inputs, self.plan = inputs, plan
        q = inputs.q.at
        self.originals = inputs.originals()
        self.card = card(q.device)
        self.pdl = self.card.pdl
        self.early: dict[str, Any] = {"launch_pdl": True} if self.pdl else {}
        self.batch, self.heads, self.kv_heads, self.blocks = inputs.shapes
        self.shape = shape_of(inputs, block)
        self.math = arithmetic_of(q, softcap > 0)
        self.scales = {"scale": scale * LOG2E, "cap": softcap * LOG2E}  # to the base 2
        unit = torch.finfo(q.dtype).eps / 2
        # Unit roundoffs: of probabilities and values in products, and of the output.
        unit_p = unit if q.dtype == torch.float32 else 2.0**-11
        self.units = {"unit_p": unit_p, "unit": unit}
        self.programs = programs_of(inputs, plan, readers)
        self.preparing = 0
        if plan.step == 0:
            most = max(1, 4 * self.card.processors // (self.batch * self.kv_heads))
            self.preparing = min(cdiv(max(1, self.blocks), PREPARED), most)
        self.memory = memory_of(inputs, plan, self.programs, self.preparing)
        steps = steps_of(inputs.rows.lengths, inputs.rows.start)
        self.common = {"STEPS": steps, "PDL": self.pdl}
        self.every_head = next_power_of_two(self.heads)

    def prepare(self) -> None:
        if self.preparing == 0:
            return
        launch_kernel(
            prepare,
            grid=(self.preparing, self.kv_heads, self.batch),
            q=self.inputs.q,
            tier=self.inputs.tier,
            rows=self.inputs.rows,
            scores=self.memory.scores,
            metadata_faults=self.memory.metadata_faults,
            **self.scales,
            N=self.blocks,
            programs=self.preparing,
            SHAPE=self.shape,
            TILE=PREPARED,
            MATH=self.math,
            **self.common,
            num_warps=4,
            **self.early,
        )

    def rest(self) -> None:
        launch_kernel(
            attend_rest,
            grid=(self.kv_heads, self.batch),
            **self.originals,
            progress=self.inputs.tier.progress,
            metadata_faults=self.memory.metadata_faults,
            flags=self.memory.promotion.flags,
            splits=self.memory.splits,
            rest_norms=self.memory.rest_norms,
            **self.scales,
            count=self.plan.splits,
            programs=max(1, self.preparing),
            SHAPE=self.shape,
            TILE=min(self.shape.BLOCK, 64 if self.shape.D <= 128 else 32),
            PROGRAMS=next_power_of_two(max(1, self.preparing)),
            MATH=self.math,
            **self.common,
            num_warps=4,
            num_stages=1,
            **self.early,
        )

    def attend(self) -> None:
        grid = self.plan.splits, self.kv_heads, self.batch
        shared: dict[str, Any] = {
            "q": self.inputs.q,
            "rows": self.inputs.rows,
            "scores": self.memory.scores,
            "splits": self.memory.splits,
            "flags": self.memory.promotion.flags,
            **self.scales,
            "N": self.blocks,
            "count": self.plan.splits,
            "SHAPE": self.shape,
            "CHECKED": self.plan.checked,
            **self.common,
            **self.early,
        }
        if self.plan.step > 0:
            self._attend_on_hopper(grid, shared)
            return
        launch_kernel(
            attend,
            grid=grid,
            tier=self.inputs.tier,
            STAGES=self.plan.stages,
            MATH=self.math,
            num_warps=self.plan.warps,
            **shared,
        )

    def _attend_on_hopper(self, grid: tuple[int, ...], shared: dict[str, Any]) -> None:
        tier, plan = self.inputs.tier, self.plan
        launch_kernel(
            attend_blocks,
            grid=grid,
            k_codes=self._lines(tier.k_codes, 1, 128),
            k_meta=tier.k_meta.view(torch.int32),
            v_codes=self._lines(tier.v_codes, 2, 128),
            v_meta=self._lines(tier.v_meta, 4, 0),
            summary=tier.summary.view(torch.int32),
            check=tier.check,
            progress=tier.progress,
            STEP=plan.step,
            RING=plan.ring,
            CAPPED=self.math.CAPPED,
            num_warps=1,
            **self.card.limit(plan.registers),
            **shared,
        )

    def _lines(self, x: torch.Tensor, tokens: int, swizzle: int) -> TensorDescriptor:
        """Of lines of 128 bytes, so many tokens each; a step's at a time."""
        layout = gl.NVMMASharedLayout(swizzle, 32, 2)
        lines = x.view(torch.int32).view(-1, 32)
        return TensorDescriptor.from_tensor(lines, [self.plan.step // tokens, 32], layout)

    def merge(self, tolerance: float) -> None:
        if tolerance == INF:
            return
        launch_kernel(
            merge_heads,
            grid=(self.heads, self.batch),
            splits=self.memory.splits,
            merged=self.memory.merged,
            head_sums=self.memory.head_sums,
            pieces=self.plan.splits + 1,
            SHAPE=self.shape,
            SPLITS=self.programs.SPLITS,
            PDL=self.pdl,
            num_warps=plans.CHOOSING.warps,
        )

    def weigh(self, choice: Choice, tolerance: float) -> None:
        if tolerance == INF:
            return
        every = max(16, next_power_of_two(self.blocks))
        launch_kernel(
            weigh_heads,
            grid=(self.heads, self.batch),
            q=self.inputs.q,
            tier=self.inputs.tier,
            rows=self.inputs.rows,
            scores=self.memory.scores,
            head_sums=self.memory.head_sums,
            needs=self.memory.needs,
            rest_norms=self.memory.rest_norms,
            **self.scales,
            **self.units,
            tolerance=tolerance,
            most=choice.most,
            N=self.blocks,
            pieces=self.plan.splits + 1,
            kv_heads=self.kv_heads,
            SHAPE=self.shape,
            HEADS=self.every_head,
            TILE=min(every, plans.WEIGHED),
            HELD=plans.held_blocks(every, 1),
            num_warps=plans.CHOOSING.warps,
            **self.common,
            **self.early,
        )

    def choose(self, choice: Choice, one_sweep: bool, ranking: int, tolerance: float) -> None:
        search = plans.search_for(
            self.blocks,
            self.shape.GROUP,
            one_sweep=one_sweep,
            coverage=choice.coverage,
            k_min=choice.least,
            tolerance=tolerance,
            explore=choice.explore,
        )
        finite = choice._replace(v_tol=min(choice.v_tol, 1e30))
        merging = 0 if search.NEEDS else self.shape.GROUP
        programs = self.programs.READERS + self.programs.CHUNKS + merging
        # Behind the pass it is not launched early: that made the whole step slower
        # (docs/log/certified.md).
        early = self.early if search.NEEDS else {}
        launch_kernel(
            choose_blocks,
            grid=(self.kv_heads, programs, self.batch),
            **self._promotion(ranking),
            splits=self.memory.splits,
            merged=self.memory.merged,
            left_sums=self.memory.left_sums,
            head_sums=self.memory.head_sums,
            needs=self.memory.needs,
            choice=finite,
            pieces=self.plan.splits + 1,
            GP=next_power_of_two(self.shape.GROUP),
            SEARCH=search,
            num_warps=plans.CHOOSING.warps,
            **self._limits(plans.CHOOSING.registers),
            **early,
        )

    def promote(self, ranking: int) -> None:
        if self.programs.READERS > 0:
            return
        warps, registers = PROMOTING
        launch_kernel(
            promote,
            grid=(self.plan.list_readers, self.kv_heads, self.batch),
            **self._promotion(ranking),
            PIECES=self.plan.list_readers,
            num_warps=warps,
            **self._limits(registers),
            **self.early,
        )

    def _promotion(self, ranking: int) -> dict[str, Any]:
        """What every kernel is given that reads promoted blocks."""
        scratch = self.inputs.scratch
        return {
            **self.originals,
            "tier": self.inputs.tier,
            "scores": self.memory.scores,
            "promotion": self.memory.promotion,
            "scratch": scratch,
            **self.scales,
            "N": self.blocks,
            "SLOTS": 0 if scratch is None else scratch.owner.shape[2],
            "SHAPE": self.shape,
            "PROGRAMS": self.programs,
            "DEPTH": ranking,
            "MATH": self.math,
            **self.common,
        }

    def _limits(self, registers: int | None) -> dict[str, Any]:
        return {"num_stages": 1, **self.card.limit(registers)}

    def finish(self, found, ranking, capacity) -> None:
        memory = self.memory
        readers = self.programs.READERS
        launch_kernel(
            finish,
            grid=(self.heads, self.batch),
            found=found,
            sinks=self.inputs.sinks,
            progress=self.inputs.tier.progress,
            rows=self.inputs.rows,
            merged=memory.merged,
            rest_norms=memory.rest_norms,
            left_sums=memory.left_sums,
            head_sums=memory.head_sums,
            promotion=memory.promotion,
            head_ends=memory.head_ends,
            raised=memory.raised,
            cap=self.scales["cap"],
            **self.units,
            capacity=capacity,
            splits=self.plan.splits,
            kv_heads=self.kv_heads,
            SHAPE=self.shape,
            CHUNKS=self.programs.CHUNKS,
            PIECES=readers or self.plan.list_readers,
            LISTED=readers == 0,
            KV=next_power_of_two(self.kv_heads),
            DEPTH=ranking,
            **self.common,
            num_warps=4,
            **self.early,
        )

    def recompute(self, rungs: torch.Tensor, tolerance: float) -> None:
        launch_kernel(
            recompute,
            grid=(self.plan.pieces, self.kv_heads, self.batch),
            **self.originals,
            rungs=rungs,
            raised=self.memory.raised,
            head_ends=self.memory.head_ends,
            pieces=Splits(self.memory.promotion.changes, self.memory.exact_lse),
            exact_norms=self.memory.exact_norms,
            **self.scales,
            tolerance=tolerance,
            count=self.plan.pieces,
            SHAPE=self.shape,
            TILE=EXACT_TILE,
            HEADS=self.every_head,
            MATH=self.math,
            **self.common,
            num_warps=4,
            **self.early,
        )

    def replace(self, found, tolerance: float) -> None:
        telemetry = self.inputs.telemetry
        launch_kernel(
            replace,
            grid=(self.heads, self.batch),
            found=found,
            telemetry=telemetry,
            sinks=self.inputs.sinks,
            progress=self.inputs.tier.progress,
            rows=self.inputs.rows,
            promotion=self.memory.promotion,
            head_ends=self.memory.head_ends,
            pieces=Splits(self.memory.promotion.changes, self.memory.exact_lse),
            exact_norms=self.memory.exact_norms,
            tolerance=tolerance,
            **self.units,
            count=self.plan.pieces,
            kv_heads=self.kv_heads,
            telemetry_rows=0 if telemetry is None else telemetry.shape[2],
            SHAPE=self.shape,
            COUNT=next_power_of_two(self.plan.pieces),
            HEADS=self.every_head,
            CHUNKS=self.programs.CHUNKS,
            **self.common,
            num_warps=4,
            **self.early,
        )


def launch(*args, plan=None, phases=PHASES):
    """Run the kernels; arguments and outputs as those of `certified_attention`, on a GPU or in
    Triton's interpreter. `phases`: only the first so many, to time them."""
    call, found = Call(*args[:-5]), CertifiedOutput(*args[-5:])
    inputs, device = Inputs.of(call), card(call.q.device)
    batch, heads, kv_heads, blocks = inputs.shapes
    capacity = max(1, capacity_for(blocks, call.k_max, call.explore))
    if plan is None:
        plan = plan_for(
            batch=batch,
            kv_heads=kv_heads,
            group=heads // kv_heads,
            width=call.q.shape[3],
            blocks=blocks,
            block=call.block,
            capacity=capacity,
            multiprocessors=device.processors,
            hopper=device.tma and call.q.dtype != torch.float32 and call.key_mask is None,
        )
    k_min, tolerance, ranking = call.k_min, call.tolerance, call.ranking
    one_sweep = call.coverage == 0 and k_min <= 4 and blocks <= 8192 and tolerance == INF
    inline = plan.inline_readers > 0 and one_sweep and call.scratch is None and call.explore == 0
    inline = inline and call.v_tol >= 1e30
    readers = max(plan.inline_readers, next_power_of_two(k_min)) if inline else 0
    step = _Step(inputs, call.block, call.scale, call.softcap, plan, readers)
    choice = Choice(call.coverage, k_min, call.k_max, call.v_tol, call.explore)
    arguments = {
        "merge": (tolerance,),
        "weigh": (choice, tolerance),
        "choose": (choice, one_sweep, ranking, tolerance),
        "promote": (ranking,),
        "finish": (found, ranking, capacity),
        "recompute": (found.rungs, tolerance),
        "replace": (found, tolerance),
    }
    for phase in phases:
        getattr(step, phase)(*arguments.get(phase, ()))
