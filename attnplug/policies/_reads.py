"""The key blocks that a block-sparse method reads, list, sink and local part together, for a trace
of its choices."""

import torch

from attnplug.call import AttentionCall, Reads


def query_positions(call: AttentionCall, query_block: int) -> torch.Tensor:
    """`[1 or B,NQ]`: the position of each query block's first query, from the row's first valid
    key on; query blocks count from the row's first query."""
    queries = call.q.shape[2]
    place = torch.arange(0, queries, query_block, device=call.q.device)[None]
    length = call.k.shape[2] if call.lengths is None else call.lengths[:, None]
    position = length - queries + place
    start = call.first_key
    if start is not None:
        skipped = start[:, None] - (length - queries)
        position = position + skipped.clamp(min=0) - start[:, None]
    return position


def union_of(picks: torch.Tensor) -> torch.Tensor:
    """What any query has picked, int32 `[B,Hkv,1,T*K]`, ascending, from picks `[B,Hkv,T,K]`; what
    an entry before says already is -1, as is none."""
    union = picks.flatten(2).sort(-1).values
    again = torch.nn.functional.pad(union[..., 1:] == union[..., :-1], (1, 0))
    return union.masked_fill(again, -1).unsqueeze(2)


def read_blocks(
    call: AttentionCall,
    index: torch.Tensor,
    local: torch.Tensor,
    *,
    query_block: int,
    block: int,
    sink: int,
    most: int,
) -> Reads:
    """The lists `index` (`[B,Hq or Hkv,NQ,K]`, -1 = none), the first `sink` blocks, and the local
    part: from block `local` (`[1 or B,NQ]`, at most `most` blocks) to the query block's end."""
    batch, heads = call.q.shape[:2]
    device = index.device
    length = call.k.shape[2] if call.lengths is None else call.lengths[:, None]
    start = call.first_key
    end = length - 1 if start is None else length - 1 - start[:, None]
    position = query_positions(call, query_block)
    real = position <= end
    last = ((position + query_block - 1).clamp(max=end) // block)[..., None]
    local = local[..., None].long()
    first = torch.arange(sink, device=device).expand(*local.shape[:2], sink)
    first = torch.where((first < local) & (first <= last), first, -1)
    rest = local + torch.arange(most, device=device)
    rest = torch.where(rest <= last, rest, -1)
    fixed = torch.where(real[..., None], torch.cat([first, rest], -1), -1)
    listed = index.repeat_interleave(heads // index.shape[1], 1)
    kept = (listed >= sink) & (listed < local[:, None]) & real[:, None, :, None]
    listed = torch.where(kept, listed, -1)
    fixed = fixed[:, None].expand(batch, heads, -1, -1)
    return Reads(torch.cat([fixed, listed], -1).to(torch.int32), query_block, block)


def stack_reads(rows: list[Reads | None], query_blocks: int) -> Reads:
    """Rows that were read alone as a batch's; None is one that read nothing."""
    read = [row for row in rows if row is not None]
    one = read[0].index
    shape = (len(rows), one.shape[1], query_blocks, max(row.index.shape[-1] for row in read))
    index = one.new_full(shape, -1)
    for place, row in zip(index, rows, strict=True):
        if row is not None:
            place[:, : row.index.shape[2], : row.index.shape[3]] = row.index[0]
    return Reads(index, read[0].query_block, read[0].block)


def read_all(call: AttentionCall, reads: Reads, queries: int) -> Reads:
    """With the query blocks that hold any of the last `queries` reading every block they see."""
    if queries == 0:
        return reads
    block, query_block = reads.block, reads.query_block
    first = (call.q.shape[2] - queries) // query_block
    length = call.k.shape[2] if call.lengths is None else call.lengths[:, None]
    end = length - 1 if call.first_key is None else length - 1 - call.first_key[:, None]
    position = query_positions(call, query_block)[:, first:]
    last = ((position + query_block - 1).clamp(max=end) // block)[..., None]
    every = torch.arange(-(-call.k.shape[2] // block), device=reads.index.device)
    every = torch.where((every <= last) & (position <= end)[..., None], every, -1)
    batch, heads, rows, width = reads.index.shape
    index = reads.index.new_full((batch, heads, rows, max(width, every.shape[-1])), -1)
    index[..., :width] = reads.index
    index[:, :, first:] = -1
    index[:, :, first:, : every.shape[-1]] = every[:, None].to(index.dtype)
    return Reads(index, query_block, block)
