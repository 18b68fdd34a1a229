"""What the Gluon kernels for Hopper share: copies by the tensor memory accelerator, views of shared
memory as another dtype, shape or layout, and the two instructions of programmatic dependent launch,
which Triton has for its own kernels only."""

from typing import Any

from attnplug.ops.common.triton import gl, gluon, gluon_core, tma

# Triton 3.9 renamed it.
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon_core.builtin
def reinterpret(buffer, dtype, shape, layout, _semantic: Any = None):
    """The shared memory of `buffer` seen with another dtype, shape and layout."""
    value = gluon_core._unwrap_if_constexpr
    shape = [value(n) for n in value(shape)]
    return _semantic.memdesc_reinterpret(buffer, value(dtype), shape, value(layout))


@gluon.jit
def gdc_wait():
    """Wait for the end of the kernel in front."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def gdc_launch_dependents():
    """Let the next kernel start."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
