"""Sizes that launchers compute from sizes. Triton's own functions of these names take ten
microseconds a call on the host (Triton 3.6), several times in each launch."""


def cdiv(n: int, d: int) -> int:
    """n / d, rounded up."""
    return -(-n // d)


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n; 1 for none."""
    return 1 << max(0, n - 1).bit_length()


def padded_width(width: int) -> int:
    """How many channels a kernel's tiles have for a head dimension: a power of two, and 32 at
    least, because NVIDIA's tensor cores multiply 8-bit rows of 32."""
    return max(32, next_power_of_two(width))
