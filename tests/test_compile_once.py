"""Test processes that share a machine compile a function once."""

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


COMPILE = """
import sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from compile_once import share_references
share_references()
from added import add
compile_now = add._compiler.compile
add._compiler.compile = lambda *of: time.sleep(3) or compile_now(*of)
print("ready", flush=True)
while not Path(sys.argv[2], "go").exists():
    time.sleep(0.05)
assert add(1, 2) == 3
print(sum(add.stats.cache_misses.values()), sum(add.stats.cache_hits.values()), flush=True)
"""


def test_the_second_process_loads_what_the_first_compiles(tmp_path):
    code = "import numba\n\n\n@numba.njit(cache=True)\ndef add(a, b):\n    return a + b\n"
    (tmp_path / "added.py").write_text(code)
    command = [sys.executable, "-c", COMPILE, str(Path(__file__).parent), str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for each in both:
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    assert sorted(each.communicate()[0].split() for each in both) == [["0", "1"], ["1", "0"]]
