"""What a model attends to, in one file: `record` while it runs, `read` afterwards.

    attnplug.apply(model, "momo+gather+stream(top_k=32)")
    with attnplug.trace.record(model, "run.parquet", tokenizer=tokenizer):
        model.generate(ids, max_new_tokens=20)
    trace = attnplug.trace.read("run.parquet")
    trace.to_pandas(layer=12, head=3)

## The file

One Parquet file. Its table has one row an *edge*: a query block attends to a key block.

| column | type | |
| --- | --- | --- |
| `sequence` | int16 | row of the batch, from 0 |
| `layer` | int16 | layer index of the model |
| `head` | int16 | query head |
| `q_block` | int32 | query block, counted over the whole recording (below) |
| `k_block` | int32 | key block r: tokens `block * r` to `block * (r + 1) - 1` |
| `weight` | float32 | what the edge weighs; its meaning is `meta["weights"]` |

Tokens of a sequence count from its first real one (left padding is no token). A *step* is one
forward pass: a prefill, a chunk of one, a decode step. A step of T queries adds
ceil(T / query_block) query blocks, numbered on from the step before, so a decode step is one query
block of one token. `meta["steps"]` has, for each step, `blocks` (how many query blocks it added),
and for each sequence `first` (the token of its first query) and `queries` (how many of the queries
are real). `Trace.query_blocks()` makes tokens of it.

Rows stand in the order (step, layer, sequence, head, q_block, place in the list), the best edge of
a list first. Row groups hold about a million rows and never part of a (step, layer, sequence,
head) unless that alone has more; their statistics of `layer` and `head` say which to read.

The footer's key-value metadata holds

- `attnplug.trace`: JSON with sorted keys, `Trace.meta`: `format` (1), `model`, `tokenizer`,
  `policy`, `method` and its `options`, `weights`, `query_block`, `block`, `layers`, `heads`,
  `kv_heads`, `sequences`, `tokens` and `prompt_sha256` (of each sequence), `steps`, `edges` (their
  number), `captured` (share of dense attention on the named blocks, by layer and head, where it
  was measured), `versions`, and `checksum`.
- `attnplug.tokens`: for each sequence base64 of zlib of its token ids, little-endian int32, as a
  JSON list; `null` where the recording was told none.
- `attnplug.vocabulary`: JSON, token id -> base64 of the token's bytes, for the ids that occur. The
  text of a run of tokens is their bytes joined, decoded as UTF-8.

`checksum` is sha256 over the digests of the six columns (each sha256 of its little-endian values in
row order), then over both other entries and this one without its checksum: it says the same of two
files whatever their compression. The same input gives the same bytes with the same pyarrow: no
dates, no random names, one writing order. Every page carries a CRC besides.

Between the last page and the footer lies a seal, sha256 of the footer and of each row group's
bytes (`attnplug.trace.seal`), where Parquet readers do not look. `read` compares it before Arrow
sees those bytes, which may end the process on damaged ones; whatever is wrong with a file is a
`TraceFileError`. A file appears under its name when it is complete: until then it is NAME.part.
"""

from attnplug.trace.layout import Layout
from attnplug.trace.reader import Trace, read
from attnplug.trace.record import Recording, record
from attnplug.trace.synthetic import synthesize
from attnplug.trace.writer import Writer

__all__ = ["Layout", "Recording", "Trace", "Writer", "read", "record", "synthesize"]
