"""What every test needs before anything is imported: Triton's interpreter where there is no GPU,
NaN-filled `torch.empty`, and the device and path parametrisations."""

import gc
import importlib.util
import os

# The threads of torch and numba sleep while they wait: spinning (the default) takes the core from
# the other worker, and tests of a model then take four times as long. Before torch loads OpenMP.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

# Workers spread over the GPUs named, such as "0,1"; before CUDA looks for them.
if "ATTNPLUG_TEST_GPUS" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    gpus = os.environ["ATTNPLUG_TEST_GPUS"].split(",")
    worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)]
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["ATTNPLUG_CROSSOVERS"] = "/none"  # a developer may have tuned, and defaults are tested
# cuBLAS is deterministic only with a fixed workspace, and the tests ask for determinism.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Workers share the cores: each takes its part, or their thread pools wait for one another.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    torch.set_num_threads(share)
    os.environ.setdefault("NUMBA_NUM_THREADS", str(max(2, share)))

import hypothesis
import pytest
from measured_seconds import quick_and_slow

# scripts/without_triton hides it, and macOS and Windows have none: the numba references remain.
TRITON = importlib.util.find_spec("triton") is not None

if "PYTEST_XDIST_WORKER" in os.environ:
    from compile_once import share_kernels, share_references

    share_references()
    if torch.cuda.is_available():
        share_kernels()

if TRITON and os.environ.get("TRITON_INTERPRET") == "1":
    from interpreter import multiply_in_double, speed_up, wrap_sums

    speed_up()
    multiply_in_double()
    wrap_sums()

# `device` and `device_path` are the same for every example of a test.
CHECKS = [hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile(
    "ci", max_examples=15, deadline=None, derandomize=True, suppress_health_check=CHECKS
)
hypothesis.settings.register_profile(
    "long", max_examples=300, deadline=None, suppress_health_check=CHECKS
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser):
    parser.addoption(
        "--cases",
        choices=["quick", "all"],
        help="quick leaves out what measured_seconds.py calls slow, which is the default of a run"
        " that names no file; all is that of others",
    )


def pytest_configure(config):
    if config.option.cases is None:  # workers are told what is settled here
        everything = config.args_source == pytest.Config.ArgsSource.TESTPATHS
        config.option.cases = "quick" if everything else "all"


def pytest_collection_modifyitems(config, items):
    if config.option.cases == "quick":
        items[:], slow = quick_and_slow(items, config.rootpath)
        config.hook.pytest_deselected(items=slow)


def pytest_collection_finish():
    """What was imported stays, and Python need not look through it for garbage again and again: a
    tenth of the time that Dynamo takes."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def pytest_unconfigure():
    gc.unfreeze()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# On a CPU an op has two implementations to hold: the numba reference that runs, and the Triton
# kernel in the interpreter. On a GPU the op is the compiled kernel.
DEVICE_PATHS = [
    ("cpu", "reference"),
    pytest.param(
        ("cpu", "kernel"),
        marks=pytest.mark.skipif(not TRITON, reason="the interpreter is part of Triton"),
    ),
    pytest.param(("cuda", "kernel"), marks=pytest.mark.gpu),
]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=DEVICE_PATHS, ids=["cpu-reference", "cpu-kernel", "cuda-kernel"])
def device_path(request):
    """(device, path): path "reference" is the op on CPU, "kernel" the Triton launcher."""
    return request.param


@pytest.fixture(autouse=True)
def nan_filled_empty():
    """`torch.empty` is NaN-filled, so that an output element nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def fresh_dynamo(request):
    """Each test of whole models compiles for itself: torch counts recompilations of a model's code
    over all models of a process, whichever test came before, and stops at eight."""
    whole = request.path.parent.name in ("contract", "hostile", "models", "policies")
    if whole:
        torch._dynamo.reset()
    yield
    if whole:
        torch._dynamo.reset()
