"""`bench/ptx.py fits` fails on what a compiler prints, and on what does not fit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
CASES = """
import _ptx_fits, _ptx_gpu, sys, triton, triton.language as tl
from _ptx_inputs import FP32, new
from _ptx_models import Case

@triton.jit
def power(x, N: tl.constexpr):
    at = x + tl.arange(0, N)
    y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [tl.load(at)],
                                  dtype=tl.float32, is_pure=True, pack=1)
    tl.store(at, y)

@triton.jit
def product(x, N: tl.constexpr):
    n = tl.arange(0, N)
    at = x + n[:, None] * N + n[None, :]
    y = tl.load(at)
    tl.store(at, tl.dot(y, y, input_precision="ieee"))

def run(kernel, size):
    return lambda: kernel.run(new(size * size, dtype=FP32), size, grid=(1,), warmup=False)

def refuse():
    raise ValueError("an error of a launcher")

cases = {"power": run(power, 64), "product": run(product, 32), "raises": refuse,
         "nothing": lambda: None}
name, target, shared = sys.argv[1:]
_ptx_fits.TARGETS = {target: _ptx_gpu.TARGETS[target]._replace(shared=int(shared))}
_ptx_fits.model_cases = lambda quick, only: [Case(name, cases[name])]
_ptx_gpu.pretend()
sys.exit(_ptx_fits.fits([target], False, None))
"""


@pytest.mark.parametrize(
    ("name", "target", "shared", "said"),
    [
        ("product", "sm_89", 65536, ""),
        ("product", "gfx942", 65536, ""),
        ("power", "sm_89", 65536, ""),
        # AMD's assembler says so, and leaves the instruction out.
        ("power", "gfx942", 65536, "error: "),
        ("product", "sm_89", 1000, "of 1000 bytes of shared memory"),
        ("raises", "sm_89", 65536, "ended with 1: ValueError: an error of a launcher"),
        ("nothing", "sm_89", 65536, "launched nothing"),
    ],
)
def test_a_fault_is_named_and_ends_with_1(name, target, shared, said, tmp_path):
    script = tmp_path / "cases.py"
    script.write_text(CASES)
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": f"{BENCH.parent}:{BENCH}", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    found = subprocess.run(
        [sys.executable, script, name, target, str(shared)], env=env, capture_output=True, text=True
    )
    assert found.returncode == (said != ""), found
    assert said in found.stdout and name in found.stdout, found
