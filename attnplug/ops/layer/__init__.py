"""What a decoder layer computes besides attention and matrix products, a kernel each."""

from attnplug.ops.layer.elementwise import gated, rms_norm, rotate

__all__ = ["gated", "rms_norm", "rotate"]
