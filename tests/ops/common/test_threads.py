"""An op on the CPU leaves torch its number of threads, in a process of its own: numba starts its
threads once."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
torch.set_num_threads(3)
from attnplug.ops import dense_decode
q, k = torch.randn(2, 4, 1, 64), torch.randn(2, 2, 300, 64)
step = torch.compile(lambda q: dense_decode(q, k, k, scale=0.1)[0], backend="eager")
with torch._dynamo.config.patch(error_on_recompile=True):
    first, second = step(q), step(q)
assert torch.equal(first, second)
import numba
print(torch.get_num_threads(), numba.get_num_threads())
torch.set_num_threads(1)
assert torch.equal(step(q), first)
print(torch.get_num_threads(), numba.get_num_threads())
"""


def test_torch_keeps_its_threads():
    environment = os.environ | {"NUMBA_NUM_THREADS": "2"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "2", "1", "2"]


USED = """
import os, threading
import torch
import attnplug
from attnplug.ops import dense_decode
torch.set_num_threads(1)
q, k = torch.randn(2, 4, 1, 64), torch.randn(2, 2, 300, 64)
def step():
    return dense_decode(q, k, k, scale=0.1)[0]
def status_of_child(wanted):
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if torch.equal(step(), wanted) else 3)
        except attnplug.AttnplugError as error:
            os._exit(1 if "spawn" in str(error) else 4)
    return os.waitpid(pid, 0)[1]
"""
FORKED_FIRST = """
import multiprocessing
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(int(pool.apply(step).isfinite().all()), 0)
"""
THREADS = """
wanted, wrong = step(), []
def work():
    for _ in range(200):
        if not torch.equal(step(), wanted):
            wrong.append(1)
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
status = status_of_child(wanted)
print(len(wrong), status >> 8, status & 0xFF)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP's refusal")
@pytest.mark.parametrize(
    ("layer", "code", "words"),
    [
        ("omp", FORKED_FIRST, ["1", "0"]),
        ("omp", THREADS, ["0", "1", "0"]),  # of the child an AttnplugError, no signal
        ("workqueue", THREADS, ["0", "0", "0"]),  # the same bits
    ],
)
def test_forks_and_threads_end_no_process(layer, code, words):
    environment = os.environ | {"NUMBA_NUM_THREADS": "2", "NUMBA_THREADING_LAYER": layer}
    command = [sys.executable, "-c", USED + code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == words
