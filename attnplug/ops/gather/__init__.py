"""Decode over a constant number of key blocks (docs/gather.md)."""
