"""attnplug inside vLLM on a CPU with tensor parallelism, as `scripts/vllm_cpu.sh` runs it."""

import os

import pytest
from vllm_engines import (
    FIRST,
    MADE,
    answers,
    equal,
    generated,
    last_of,
    lists_of,
    recorded,
    room_of,
    small_model,
    traced_job,
)

from attnplug import trace

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_two_ranks_answer_as_one_and_trace_their_own_heads(tmp_path):
    """Tensor parallelism, its processes being vLLM's own."""
    model = small_model(tmp_path / "model")
    folder, cores = tmp_path / "traces", sorted(os.sched_getaffinity(0))
    job = traced_job(folder, [dict(prompts=FIRST[:1], tokens=MADE)], tensor_parallel_size=2)
    job["report"] = str(tmp_path / "report")
    cores = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    (outputs,), notes = answers([job], model, tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="1", **cores)
    assert [o["tokens"] for o in outputs] == generated(model[0], FIRST[:1])
    assert sum(note["momo"] for note in notes) > 0 and sum(note["far"] for note in notes) > 0
    assert last_of(tmp_path / "report") == [[("momo", "gather")] * 2]  # the ranks agree
    parts = [trace.read(folder / f"prompt-0001@rank{rank}.parquet") for rank in range(2)]
    same = recorded(model[0], FIRST[0], [0, 512, 1024, 1300], tmp_path / "same")
    wanted = lists_of(same)
    for rank, found in enumerate(parts):
        assert found.meta["heads"] == 2 and found.meta["kv_heads"] == 1
        assert found.meta["steps"] == same.meta["steps"]
        heads = wanted[wanted.index.get_level_values("head") // 2 == rank]
        mine = lists_of(found).rename({head: head + 2 * rank for head in range(2)}, level="head")
        equal(mine, heads, room_of(found))
