"""Block-sparse prefill: measure, choose, attend, correct (docs/momo.md)."""
