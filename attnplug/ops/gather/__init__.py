"""Decode over a constant number of key blocks (docs/methods/gather.md)."""
