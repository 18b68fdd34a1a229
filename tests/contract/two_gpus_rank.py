"""One rank of test_tensor_parallel.py's test on GPUs: `FOLDER` holds a model. What the rank finds
goes to `found-RANK.json`: tokens by policy, and the kernels that summed over the ranks."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from tensor_parallel_rank import load, tokens_of

import attnplug

RANK = int(os.environ["RANK"])


def sums_of(model, policy: str) -> list[str]:
    """The kernels that sum over the ranks in a compiled call of generate."""
    ids = torch.arange(2, 42, device=model.device)[None]
    options = dict(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    with attnplug.applied(model, policy):
        attnplug.warm(model, [ids.shape[1]], **options)  # else a few tokens are not compiled
        model.generate(ids, **options)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
            model.generate(ids, **options)
        found = attnplug.report(model)
        assert found.loop == "" and found.fused.startswith("decode has one product"), found
    names = {event.name for event in recorded.events()}
    return sorted(
        kind for kind in ("one_shot_all_reduce", "ncclDevKernel_AllReduce")
        if any(kind in name for name in names)
    )  # fmt: skip


def main(folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl", device_id=torch.device("cuda", RANK))
    model, asked = load(folder / "tiny"), json.loads((folder / "asked.json").read_text())
    found = {
        "tokens": {policy: tokens_of(model, policy) for policy in asked},
        "sums": {policy: sums_of(model, policy) for policy in asked if policy},
    }
    (folder / f"found-{RANK}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # torch waits long for a communicator that a captured graph holds


if __name__ == "__main__":
    main(Path(sys.argv[1]))
