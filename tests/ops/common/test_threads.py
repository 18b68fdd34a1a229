"""An op on the CPU leaves torch its number of threads, in a process of its own: numba starts its
threads once."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
torch.set_num_threads(int(sys.argv[1]))
from attnplug.ops import dense_decode
q, k = torch.randn(2, 4, 1, 64), torch.randn(2, 2, 300, 64)
step = torch.compile(lambda q: dense_decode(q, k, k, scale=0.1)[0], backend="eager")
with torch._dynamo.config.patch(error_on_recompile=True):
    first, second = step(q), step(q)
assert torch.equal(first, second)
import numba
print(torch.get_num_threads(), numba.get_num_threads())
"""


@pytest.mark.parametrize("threads", [1, 3])
def test_torch_keeps_its_threads(threads):
    environment = os.environ | {"NUMBA_NUM_THREADS": "2"}
    command = [sys.executable, "-c", PROGRAM, str(threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(threads), "2"]
