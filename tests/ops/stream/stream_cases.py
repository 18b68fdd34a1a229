"""What stream_mask must give, as the paper's appendices A and B say it plainly, and what its flat
search must; and inputs."""

import math

import torch
from cases import WIDTHS
from hypothesis import strategies as st

from attnplug.ops.stream import stream_mask as op

DEFAULTS = {"query_block": 16, "block": 16, "top_k": 3, "search": "branches"}


def seen_pairs(q, k, b, h, *, query_block, block, lengths=None, start=None, key_mask=None,
               block_mask=None, **_):  # fmt: skip
    """(C `[T, S]`, query block of each query, key block of each key); -1: of none."""
    queries, size = q.shape[2], k.shape[2]
    length = size if lengths is None else int(lengths.expand(q.shape[0])[b])
    low = 0 if start is None else int(start.expand(q.shape[0])[b])
    position = length - queries + torch.arange(queries)
    key = torch.arange(size)
    seen = (key <= position[:, None]) & (key >= low) & (key < length) & (position >= low)[:, None]
    if key_mask is not None:
        seen = seen & key_mask[b]
    first = max(0, low - (length - queries))
    rows = torch.where(position >= low, (torch.arange(queries) - first) // query_block, -1)
    columns = torch.where(key >= low, (key - low) // block, -1)
    if block_mask is not None:
        allowed = block_mask[b % block_mask.shape[0], h % block_mask.shape[1]]
        seen = seen & allowed[rows.clamp(min=0)][:, columns.clamp(min=0)]
    return seen, rows, columns


def block_scores(q, k, b, h, i, **options):
    """{valid key block: fp64 score} of query block i."""
    seen, rows, columns = seen_pairs(q, k, b, h, **options)
    mine = rows == i
    s = q[b, h, mine].double() @ k[b, h // (q.shape[1] // k.shape[1])].double().T
    s = s.nan_to_num(-math.inf, math.inf, -math.inf)
    found = {}
    for r in columns[seen[mine].any(0)].unique().tolist():
        pairs = seen[mine] & (columns == r)
        found[r] = float(s[pairs].max())
    return found


def select(scores, blocks, branches):
    """Appendix A: ([(score, block)] of the final branches, the smallest difference of two scores
    that decided anything)."""
    gap = math.inf
    first, last = (min(scores), max(scores)) if scores else (0, -1)
    size, more = divmod(last - first + 1, branches)
    ends = [first]
    for i in range(branches):
        ends.append(ends[-1] + size + (i < more))
    live = [(a, b, None) for a, b in zip(ends, ends[1:])]  # noqa: B905, RUF007
    for _ in range(max(1, math.ceil(math.log2(max(blocks, 1))))):
        ranked = []
        for branch, (a, b, _) in enumerate(live):
            cut = a + math.ceil((b - a) / 2)
            for bit, (x, y) in enumerate(((a, cut), (cut, b))):
                r = min((r for r in scores if x <= r < y), default=math.inf)
                ranked.append((-scores.get(r, -math.inf), r, branch, bit, x, y))
        ranked.sort(key=lambda c: (c[1] == math.inf, *c[:4]))
        values = [-c[0] for c in ranked if c[1] < math.inf]
        if len(values) > branches:
            gap = min(gap, values[branches - 1] - values[branches])
        live = [(x, y, (-score, r)) for score, r, _, _, x, y in ranked[:branches]]
    kept = [c for _, _, c in live if c[1] < math.inf]
    for (above, _), (below, _) in zip(kept, kept[1:]):  # noqa: B905, RUF007
        gap = min(gap, above - below)
    return kept, gap


def flat(q, k, b, h, i, scores, branches, **options):
    """The flat search: ([(score, block)] of the list, the smallest difference of two bounds or
    scores that decided anything)."""
    seen, rows, columns = seen_pairs(q, k, b, h, **options)
    mine = rows == i
    low = 0 if options.get("start") is None else int(options["start"].expand(q.shape[0])[b])
    length = k.shape[2]
    if options.get("lengths") is not None:
        length = int(options["lengths"].expand(q.shape[0])[b])
    first = length - q.shape[2] + int(mine.nonzero()[0])
    own = (first - low) // options["block"]
    mean = q[b, h, mine].double().nan_to_num(0, 0, 0).sum(0) / options["query_block"]
    bounds = []
    for r in scores:
        if r < own:
            keys = k[b, h // (q.shape[1] // k.shape[1]), seen[mine][0] & (columns == r)].double()
            bound = torch.maximum(mean * keys.amax(0), mean * keys.amin(0)).sum()
            bounds.append((math.inf if not keys.isfinite().all() else float(bound), r))
    bounds.sort(key=lambda x: (-x[0], x[1]))
    cut = 4 * branches
    gap = bounds[cut - 1][0] - bounds[cut][0] if len(bounds) > cut else math.inf
    looked = {r for _, r in bounds[:cut]} | {r for r in scores if r >= own}
    ranked = sorted(((scores[r], r) for r in looked), key=lambda x: (-x[0], x[1]))
    for (above, _), (below, _) in zip(ranked[:branches], ranked[1:]):  # noqa: B905, RUF007
        gap = min(gap, above - below)
    return ranked[:branches], gap


def near(q, k, b, h, i, kept, gap, **options):
    """(those of the list `kept` of which some query has a score at most `gap` below its best one,
    the smallest distance of a score from where that ends)."""
    seen, rows, columns = seen_pairs(q, k, b, h, **options)
    mine = rows == i
    s = q[b, h, mine].double() @ k[b, h // (q.shape[1] // k.shape[1])].double().T
    s = s.nan_to_num(-math.inf, math.inf, -math.inf)
    of = [s.masked_fill(~(seen[mine] & (columns == r)), -math.inf).amax(1) for _, r in kept]
    table = torch.stack(of)  # [list, queries]
    limit = table.amax(0) - gap
    away = (table - limit).abs()[table.isfinite() & limit.isfinite()]
    stays = ((table > -math.inf) & (table >= limit)).any(1).tolist()
    close = float(away.min()) if away.numel() else math.inf
    return [entry for entry, stay in zip(kept, stays, strict=True) if stay], close


def specified(q, k, **options):
    """(index, score) of the whole call, and the gaps `[B, Hq, NQ]`."""
    options = DEFAULTS | options
    batch, heads, queries = q.shape[:3]
    slots = math.ceil(queries / options["query_block"])
    index = torch.full((batch, heads, slots, options["top_k"]), -1, dtype=torch.int32)
    score = torch.full(index.shape, -math.inf)
    gaps = torch.full(index.shape[:3], math.inf)
    for b in range(batch):
        for h in range(heads):
            _, _, columns = seen_pairs(q, k, b, h, **options)
            for i in range(slots):
                budget = options.get("budget")
                branches = options["top_k"]
                if budget is not None:
                    mine = budget[b % budget.shape[0], h % budget.shape[1], i]
                    branches = max(0, min(branches, int(mine)))
                if branches == 0:
                    continue
                found = block_scores(q, k, b, h, i, **options)
                if options["search"] == "bounds" and found:
                    kept, gaps[b, h, i] = flat(q, k, b, h, i, found, branches, **options)
                else:
                    kept, gaps[b, h, i] = select(found, int(columns.max()) + 1, branches)
                if options.get("gap") is not None and kept:
                    kept, close = near(q, k, b, h, i, kept, **options)
                    gaps[b, h, i] = min(float(gaps[b, h, i]), close)
                for j, (value, r) in enumerate(kept):
                    index[b, h, i, j], score[b, h, i, j] = r, value
    return index, score, gaps


def same(found, wanted):
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def random(seed, *shape, dtype=torch.float32, whole=False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return (x * 1.5).round().clamp(-3, 3).to(dtype) if whole else x.to(dtype)


def pair(seed, batch, heads, kv_heads, queries, size, width=64, dtype=torch.float32, whole=True):
    """q and k, strided as transformers hands them on."""
    q = random(seed, batch, queries, heads, width, dtype=dtype, whole=whole).transpose(1, 2)
    k = random(seed + 1, batch, size, kv_heads, width, dtype=dtype, whole=whole).transpose(1, 2)
    return q, k


def dtypes(device_path):
    """Those that the path can multiply: Triton's interpreter cannot multiply bfloat16."""
    exact = [torch.float32, torch.float16]
    return exact if device_path == ("cpu", "kernel") else [*exact, torch.bfloat16]


NAMES = (
    "query_block", "block", "top_k", "budget", "lengths", "start", "key_mask", "block_mask",
    "search", "gap",
)  # fmt: skip


def trace(device_path, q, k, plan=None, **options):
    """(index, score) on the CPU, of the public op, or of the launcher where the op would not run
    it."""
    device, path = device_path
    args = [(DEFAULTS | options).get(name) for name in NAMES]
    args = [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]
    q, k = q.to(device), k.to(device)
    if plan is None and (path == "reference" or device == "cuda"):
        out = op.stream_mask(q, k, **dict(zip(NAMES, args, strict=True)))
    else:
        out = op._allocate(q, k, *args)
        op.launch_stream_mask(q, k, *args, *out, plan=plan)
    return tuple(x.cpu() for x in out)


@st.composite
def calls(draw, device_path, whole):
    exact = dtypes(device_path)
    slow = device_path == ("cpu", "kernel")  # 0.1 s a query block and head
    batch, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3]))
    queries = draw(st.sampled_from([1, 2, 15, 17, 40] if slow else [1, 2, 15, 16, 17, 40, 66]))
    size = queries + draw(st.sampled_from([0, 0, 1, 15, 64, 130]))
    dtype, seed = draw(st.sampled_from(exact)), draw(st.integers(0, 999))
    width = draw(st.sampled_from(WIDTHS))
    options: dict = {
        "query_block": draw(st.sampled_from([16, 16, 32, 64])),
        "block": draw(st.sampled_from([16, 16, 32, 64])),
        "top_k": draw(st.sampled_from([1, 2, 3, 5, 8])),
    }
    slots = math.ceil(queries / options["query_block"])
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(queries, size), min_size=batch, max_size=batch))
        options["lengths"] = torch.tensor(lengths)
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch))
        options["start"] = torch.tensor(starts, dtype=torch.int32)
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 2, batch, size) > draw(st.sampled_from([-0.5, 1.8]))
    ends = draw(st.sampled_from([(1, 1), (batch, 1), (batch, heads)]))
    if draw(st.booleans()):
        blocks = math.ceil(size / options["block"])
        mask = random(seed + 3, *ends, blocks, slots) > draw(st.sampled_from([-1.0, 0.5]))
        options["block_mask"] = mask.mT
    if draw(st.booleans()):
        options["budget"] = torch.randint(
            -1, options["top_k"] + 2, (*ends, slots), generator=torch.Generator().manual_seed(seed)
        )
    options["gap"] = draw(st.sampled_from([None, None, 0.0, 4.0, 40.0]))
    q, k = pair(seed, batch, heads, kv_heads, queries, size, width, dtype, whole)
    if "lengths" in options:
        for b, length in enumerate(options["lengths"].tolist()):
            k[b, :, length:] = torch.nan  # what a cache has not written yet
    return q, k, options
