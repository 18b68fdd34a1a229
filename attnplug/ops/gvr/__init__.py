"""Decode over the exact best tokens: scores, top-k, attention (docs/methods/gvr.md and
topk.md)."""
