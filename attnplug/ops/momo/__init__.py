"""Block-sparse prefill: measure, choose, attend, correct (docs/methods/momo.md)."""
