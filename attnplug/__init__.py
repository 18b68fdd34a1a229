"""attnplug: pluggable attention ops for PyTorch compile."""
