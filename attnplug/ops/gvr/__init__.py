"""Decode over the exact best tokens: scores, top-k, attention (docs/gvr.md, docs/topk.md)."""
