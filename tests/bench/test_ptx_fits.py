"""`bench/ptx.py fits` fails on what a compiler prints, and on what does not fit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SCRIPT = """
import _ptx_fits, _ptx_gpu, json, sys, triton, triton.language as tl
from _ptx_inputs import FP32, new
from _ptx_models import Case
from attnplug.ops.common.views import chosen_between

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

@triton.jit
def choice(few, many, N: tl.constexpr):
    n = tl.arange(0, N)
    at = tl.where(n == 3, few, many + n.to(tl.int64) * N)
    x = tl.load(at[:, None] + n[None, :])
    tl.store(few + n[:, None] * N + n[None, :], x)

def choose():
    sizes = 64 * 64, 1 << 30  # in float32, 16 KiB and 4 GiB
    choices = chosen_between(_ptx_gpu.GPU, *(new(size, dtype=FP32) for size in sizes))
    choice.run(*choices, 64, grid=(1,), warmup=False)

def run(kernel, size):
    return lambda: kernel.run(new(size * size, dtype=FP32), size, grid=(1,), warmup=False)

def refuse():
    raise ValueError("an error of a launcher")

CASES = {"power": run(power, 64), "product": run(product, 32), "raises": refuse,
         "choice": choose,
         "nothing": lambda: None}
def fits(name, target, shared):
    _ptx_fits.TARGETS = {target: _ptx_gpu.TARGETS[target]._replace(shared=shared)}
    _ptx_fits.model_cases = lambda quick, only: [Case(name, CASES[name])]
    return _ptx_fits.fits([target], False, None)

_ptx_gpu.pretend()
for each in json.loads(sys.argv[1]):
    print("ended with", int(fits(*each)))
    print("--")
"""
FITS = [
    ("product", "sm_89", 65536, ""),
    ("product", "gfx942", 65536, ""),
    ("power", "sm_89", 65536, ""),
    # AMD's assembler says so, and leaves the instruction out.
    ("power", "gfx942", 65536, "error: "),
    # Its compiler would fail if it knew that only the first tensor is smaller than 2 GiB.
    ("choice", "gfx942", 65536, ""),
    ("product", "sm_89", 1000, "of 1000 bytes of shared memory"),
    ("raises", "sm_89", 65536, "ended with 1: ValueError: an error of a launcher"),
    ("nothing", "sm_89", 65536, "launched nothing"),
]


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> list[str]:
    """What each of FITS prints, in one process that compiles each in a child of its own."""
    folder = tmp_path_factory.mktemp("fits")
    (folder / "cases.py").write_text(SCRIPT)
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": f"{BENCH.parent}:{BENCH}", "TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, folder / "cases.py", json.dumps([each[:3] for each in FITS])]
    found = subprocess.run(command, env=env, capture_output=True, text=True)
    assert found.returncode == 0, found
    return found.stdout.split("--\n")[:-1]


@pytest.mark.parametrize("place", range(len(FITS)), ids=lambda place: " ".join(FITS[place][:2]))
def test_a_fault_is_named_and_ends_with_1(place, printed):
    name, _, _, said = FITS[place]
    assert len(printed) == len(FITS)
    assert f"ended with {int(said != '')}\n" in printed[place], printed
    assert said in printed[place] and name in printed[place], printed
