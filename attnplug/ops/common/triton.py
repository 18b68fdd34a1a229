"""Triton, where it is installed: every file takes it from here. Its wheels are for Linux; elsewhere
the numba references run, and nothing but a launch needs more than Triton's names."""

import importlib
from typing import TYPE_CHECKING


def _installed() -> bool:
    try:
        importlib.import_module("triton")
    except ModuleNotFoundError as error:
        if error.name != "triton":  # it is here, and lacks what it needs itself
            raise
        return False
    return True


INSTALLED = _installed()

if TYPE_CHECKING or INSTALLED:
    import triton
    import triton.language as tl
    from triton import knobs
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language import _core as gluon_core
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.runtime import driver
    from triton.runtime.errors import OutOfResources
else:
    from attnplug.ops.common.no_triton import ABSENT, language, triton

    tl = gl = language
    gluon = gluon_core = async_copy = mma_v2 = fence_async_shared = mbarrier = tma = ABSENT
    warpgroup_mma = warpgroup_mma_wait = TensorDescriptor = ABSENT
    gdc_launch_dependents = gdc_wait = driver = knobs = ABSENT

    class OutOfResources(Exception):
        """Nothing raises it here."""


__all__ = [
    "INSTALLED",
    "OutOfResources",
    "TensorDescriptor",
    "async_copy",
    "driver",
    "fence_async_shared",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "gluon_core",
    "knobs",
    "mbarrier",
    "mma_v2",
    "tl",
    "tma",
    "triton",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
