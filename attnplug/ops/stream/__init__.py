"""Traces of attention by hierarchical top-k (docs/methods/stream.md)."""
