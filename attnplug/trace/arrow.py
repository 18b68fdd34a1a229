"""pyarrow, which reads and writes traces: every file of this folder takes it from here, so that one
place says which extra brings it."""

from attnplug.extras import require

require("trace", "attnplug.trace")

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

__all__ = ["pa", "pq"]
