"""How much of the exact softmax attention a block mask keeps.

For query block n (queries t in [chi n, chi (n+1))) and key block j (keys [beta j, beta (j+1))):

    mass[n, j] = mean over t of sum over l in block j, l <= t of softmax_l(scale q_t . k_l)

A block-sparse mask that lists key blocks, reads `sink` first blocks and the local part (from the
block that holds the key `window` before the query block's first query on up to the diagonal)
captures the sum of `mass` over these blocks, exactly, as all of them are whole key blocks. The
oracle of size K lists the K blocks of largest mass outside sink and local part: no other list of
that size captures more. Source: the captured-mass criterion of "Measure Once, Mask Once"."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockMass:
    """`values` `[B,Hq,N,blocks]`: the mass of every key block in the N measured query blocks
    `query_blocks` `[N]`, and the mask's geometry."""

    values: torch.Tensor
    query_blocks: torch.Tensor
    query_block: int
    block: int
    sink: int
    window: int

    def causal(self) -> torch.Tensor:
        """`[N,blocks]`: key blocks with a key that the query block's last query sees."""
        return self._keys() * self.block < (self.query_blocks[:, None] + 1) * self.query_block

    def fixed(self) -> torch.Tensor:
        """`[N,blocks]`: what every mask reads, the sink and the local part."""
        local = (self.query_blocks[:, None] * self.query_block - self.window).clamp(min=0)
        keys = self._keys()
        return self.causal() & ((keys < self.sink) | (keys >= local // self.block))

    def _keys(self) -> torch.Tensor:
        return torch.arange(self.values.shape[-1], device=self.values.device)


def block_mass(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    scale: float,
    query_block: int = 128,
    block: int = 64,
    sink: int = 1,
    window: int = 0,
    query_blocks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> BlockMass:
    """The exact causal masses of q `[B,Hq,S,D]` against k `[B,Hkv,S,D]` (Hq a multiple of Hkv),
    whole sequences without padding.

    `query_blocks` (int64 `[N]`) samples query blocks; all by default. One query block of one KV
    head's group is in memory at a time: 32K tokens need `Hq/Hkv * query_block * 32K` numbers."""
    batch, heads, tokens, _ = q.shape
    groups = heads // k.shape[1]
    if query_blocks is None:
        query_blocks = torch.arange(-(-tokens // query_block), device="cpu")
    values = torch.zeros(
        batch, heads, len(query_blocks), -(-tokens // block), dtype=dtype, device=q.device
    )
    for b in range(batch):
        for h in range(k.shape[1]):
            keys, group = k[b, h].to(dtype), slice(h * groups, (h + 1) * groups)
            for slot, number in enumerate(query_blocks.tolist()):
                first, last = number * query_block, min((number + 1) * query_block, tokens)
                queries = q[b, group, first:last].to(dtype)
                masses = _one(queries, keys[:last], first, scale, block)
                values[b, group, slot, : masses.shape[-1]] = masses
    return BlockMass(values, query_blocks.to(q.device), query_block, block, sink, window)


def _one(q: torch.Tensor, k: torch.Tensor, first: int, scale: float, block: int) -> torch.Tensor:
    """Masses `[G,blocks]` of one query block q `[G,C,D]` over the keys up to its last query."""
    at = first + torch.arange(q.shape[1], device=q.device)
    future = torch.arange(k.shape[0], device=q.device) > at[:, None]
    weights = ((q @ k.T) * scale).masked_fill(future, float("-inf")).softmax(-1).mean(1)
    weights = torch.nn.functional.pad(weights, (0, -k.shape[0] % block))
    return weights.unflatten(-1, (-1, block)).sum(-1)


def oracle_blocks(mass: BlockMass, top_k: int | torch.Tensor) -> torch.Tensor:
    """The lists of `top_k` key blocks that capture most: int32 `[B,Hq,N,top_k]`, ascending, -1
    last where there are fewer candidates. A tensor `[N]` says it of each query block; the lists
    are as wide as the largest."""
    blocks = mass.values.shape[-1]
    widest = top_k if isinstance(top_k, int) else int(top_k.max())
    offered = mass.values.masked_fill(mass.fixed() | ~mass.causal(), -1.0)
    best, index = offered.topk(min(widest, blocks), dim=-1)
    left_out = best < 0
    if isinstance(top_k, torch.Tensor):
        left_out |= torch.arange(index.shape[-1], device=index.device) >= top_k[:, None]
    index = index.masked_fill(left_out, blocks).sort(-1).values
    index = index.masked_fill(index == blocks, -1).to(torch.int32)
    return torch.nn.functional.pad(index, (0, widest - index.shape[-1]), value=-1)


def visible_blocks(mass: BlockMass, index: torch.Tensor) -> torch.Tensor:
    """Which key blocks `[B,Hq,N,blocks]` (bool) a query block reads, at least in part, when its
    list is `index` `[B,Hq,N,K]` (-1 = no entry)."""
    blocks = mass.values.shape[-1]
    listed = torch.zeros(*index.shape[:-1], blocks + 1, dtype=torch.bool, device=index.device)
    listed.scatter_(-1, index.long().masked_fill(index < 0, blocks), True)
    return (listed[..., :blocks] | mass.fixed()) & mass.causal()


def captured_mass(mass: BlockMass, index: torch.Tensor) -> torch.Tensor:
    """The share of attention `[B,Hq,N]` that the mask of `index` keeps (1 = all). A block that is
    listed twice, or listed and read anyway, counts once."""
    return (mass.values * visible_blocks(mass, index)).sum(-1)


def mask_density(mass: BlockMass, index: torch.Tensor) -> float:
    """The share of causal key blocks that the mask reads, over all measured query blocks."""
    seen = visible_blocks(mass, index)
    return seen.sum().item() / mass.causal().expand_as(seen).sum().item()
