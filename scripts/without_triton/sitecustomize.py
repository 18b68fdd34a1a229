"""Has Python find no Triton, as on macOS and Windows: put this folder on PYTHONPATH."""

import sys

sys.modules["triton"] = None  # pyright: ignore[reportArgumentType] - what makes imports of it fail
