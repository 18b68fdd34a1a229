"""Traces of attention by hierarchical top-k (docs/stream.md)."""
