"""Decode that reads the best tokens exactly and estimates the rest from a sketch of the keys
(docs/log/sketch.md)."""
