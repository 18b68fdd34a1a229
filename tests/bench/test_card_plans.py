"""Plans by the card: an H200's are what they were when its rows were measured, and no launch asks
for more shared memory than a program has. Cases are those of bench/ptx.py; nothing is compiled."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Digests of what today's H200 launches, by case. A change that means to cut work there anew writes
# its own: {case: digest(launches)} of `bench/ptx.py plans`, with rows from a GPU beside them.
BEFORE = json.loads(Path(__file__).with_name("h200_plans.json").read_text())
# In float32, heads of 256 dimensions: these asked for more than an H200 has.
MENDED = {"Gemma-3-4B, gvr 32K float32", "top_tokens | fp32 D=256"}
PROCESSORS = (28, 46, 58, 82, 108, 132, 170, 188, 304)
# 64 keys, which momo's blocks have, are all of 64 KiB by themselves: of 256 float32 dimensions, or
# of 512 in 16 bits.
BLOCKS_OF_64_KIB = {f"Gemma-3-4B, momo {n}K float32" for n in (16, 32, 128)}
BLOCKS_OF_64_KIB |= {"heads of 512, momo 32K"}
SHARED = {"gfx942": 65536, "sm_89": 101376, "sm_80": 166912, "sm_90": 232448}


def plans(folder, targets, processors=()):
    """{(target, multiprocessors, case): launches}."""
    path = folder / "plans.json"
    named = ",".join(targets), ",".join(map(str, processors))
    command = [sys.executable, ROOT / "bench/ptx.py", "plans", path, "--root", ROOT]
    command += ["--target", named[0], "--processors", named[1]]
    # The kernels are the compiler's here, whatever the other tests of this process run.
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=600)
    found = json.loads(path.read_text())
    return {tuple(key.split(" | ", 2)): launches for key, launches in found.items()}


def digest(launches):
    return hashlib.sha256(json.dumps(launches, sort_keys=True).encode()).hexdigest()[:12]


def test_an_h200_cuts_its_work_as_it_did(tmp_path):
    now = {case: digest(found) for (_, _, case), found in plans(tmp_path, ["sm_90"]).items()}
    assert BEFORE.keys() | MENDED == {case for case in now if not case.startswith("heads of ")}
    assert [case for case, was in BEFORE.items() if now[case] != was] == []


def padded(width):
    return 1 << (width - 1).bit_length()


def loop_bytes(rows, keys, width, itemsize, stages):
    """A pipeline's copies of keys and values, the queries, and the weights of a tile."""
    copies = 2 * max(stages - 1, 0.5) * keys * padded(width) * itemsize
    return copies + rows * (padded(width) + keys) * itemsize


def bytes_of(launch):
    """Shared memory of a launch, from the tiles that it names; None of a kernel without a loop over
    keys. PTX's compiler gave these sums for the launches that were over a limit."""
    kernel, size = launch["kernel"], (launch.get("width"), launch.get("itemsize"))
    if kernel in ("_attend", "attend_kept"):
        found = loop_bytes(launch["ROWS"], launch["TILE"], *size, launch["STAGES"])
        cleared = launch["key_mask"] * launch["TILE"] * padded(size[0]) * size[1]
        return found + cleared
    if kernel == "attend_rows":
        near = launch["WHOLE_TILE"], *size, launch["WHOLE_STAGES"]
        far = launch["TILE"], *size, launch["STAGES"]
        return max(loop_bytes(launch["ROWS"], *x) for x in (near, far))
    if kernel in ("_kernel", "_attend_kernel"):
        stages = launch["num_stages"]
        kept = kernel == "_kernel" and size[1] == 4 and stages > 1  # the tiles of all stages
        return loop_bytes(launch["M"], launch["N"], *size, stages + kept)
    if kernel == "attend" and "TILES" in launch:
        return loop_bytes(launch["ROWS"], launch["TILE"], *size, 2)
    return None


@pytest.fixture(scope="module")
def of_all_cards(tmp_path_factory):
    return plans(tmp_path_factory.mktemp("plans"), list(SHARED), PROCESSORS)


@pytest.mark.parametrize("target", SHARED)
def test_no_launch_wants_more_shared_memory_than_a_card_has(target, of_all_cards):
    counted, over = set(), {}
    for key, launches in of_all_cards.items():
        for launch in launches if key[0] == target else ():
            found = bytes_of(launch)
            if found is not None:
                counted.add(launch["kernel"])
                if found > SHARED[target]:
                    over[key] = launch["kernel"], found
    kernels = {"_attend", "attend_kept", "attend_rows", "_kernel", "_attend_kernel", "attend"}
    assert counted == kernels
    unserved = BLOCKS_OF_64_KIB if target == "gfx942" else set()
    assert {case for _, _, case in over} == unserved, over
