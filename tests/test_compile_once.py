"""Test processes that share a GPU compile a kernel once."""

import subprocess
import sys
import time
from pathlib import Path

HOLD = """
import sys, time
sys.path.insert(0, sys.argv[1])
from compile_once import only_one
with only_one("a kernel of test_compile_once"):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def test_a_second_process_waits_for_the_first():
    def hold(seconds: float) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLD, str(Path(__file__).parent), str(seconds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with hold(30) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        with hold(0) as second:
            time.sleep(6)
            assert second.poll() is None, "the second did not wait"
            first.kill()  # a lock goes with its process
            assert second.stdout is not None and second.stdout.readline() == "held\n"
