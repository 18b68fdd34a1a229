"""What stands beside every measured number, as the package defines it."""

from attnplug.bench.provenance import KEYS, ceiling_fraction, ceilings, commit, provenance

__all__ = ["KEYS", "ceiling_fraction", "ceilings", "commit", "provenance"]
