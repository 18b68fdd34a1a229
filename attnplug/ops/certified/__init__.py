"""Decode from a quantized cache with a proved bound (docs/methods/certified.md)."""
