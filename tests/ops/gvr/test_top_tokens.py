"""top_tokens against torch's stable sort of the scores: by the numba references, and by the
kernels of the two ops that it is made of, whose own tests send rows every way."""

import pytest
import torch
from gvr_cases import dtypes, random
from hypothesis import given
from hypothesis import strategies as st
from topk_cases import KINDS, assert_exact, make

from attnplug.errors import ArgumentError
from attnplug.ops import score_tokens, top_tokens
from attnplug.ops.gvr import score_tokens as scoring
from attnplug.ops.gvr import top_tokens as op
from attnplug.ops.gvr import topk as ranking
from attnplug.ops.gvr.score_tokens import quantize_keys

# The kernels mean to overflow: a range that is infinite is not used.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SINK, WINDOW = 3, 5
NAMES = ("lengths", "start", "key_mask")


def call(device_path, q, codes, steps, k, sink=SINK, window=WINDOW, **options):
    """(indices, values, stats), on the CPU; by the public op, or by the launcher where the op would
    not run it."""
    device, path = device_path
    there = [x.to(device) for x in (q, codes, steps)]
    rows = [options.get(name) for name in NAMES]
    rows = [x if x is None else x.to(device) for x in rows]
    if path == "reference" or device == "cuda":
        kept = {"sink": sink, "window": window, **dict(zip(NAMES, rows, strict=True))}
        found = top_tokens(*there, k, **kept, stats=True)
    else:
        args = *there, k, sink, window, *rows
        found = op._allocate(*args)
        op.launch_top_tokens(*args, *found)
    return tuple(x.cpu() for x in found)


def row_lengths(lengths, heads):
    """The lengths of the rows of scores."""
    return lengths if lengths is None else lengths.repeat_interleave(heads)


def keys_of(wanted, kv_heads=1, group=2):
    """(q, codes, steps) whose scores are `wanted [B * kv_heads, S]`, but for sink and window: the
    query picks the one number of a key, whose code is 1."""
    rows, size = wanted.shape
    q = torch.zeros(rows // kv_heads, kv_heads * group, 1, 64)
    q[..., 0] = 1
    codes = torch.zeros(rows // kv_heads, kv_heads, size, 64, dtype=torch.int8)
    codes[..., 0] = 1
    return q, codes, wanted.view(rows // kv_heads, kv_heads, size)


def seen_scores(wanted, lengths=None, start=None, sink=SINK, window=WINDOW):
    """`wanted` where a token may be chosen, else -inf. NaN, of a bad key, scores highest."""
    rows, size = wanted.shape
    length = torch.full((rows,), size) if lengths is None else lengths.clamp(0, size).expand(rows)
    first = torch.zeros(rows, dtype=torch.int64) if start is None else start.expand(rows)
    at = torch.arange(size)
    seen = (at >= first[:, None] + sink) & (at < length[:, None] - window)
    return torch.where(seen, wanted.nan_to_num(torch.inf, torch.inf, -torch.inf), -torch.inf)


@given(data=st.data())
def test_is_score_tokens_and_topk(device_path, data):
    draw = data.draw
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    size, k = draw(st.sampled_from([1, 31, 64, 200, 256, 301])), draw(st.sampled_from([1, 7, 40]))
    dtype, seed = draw(st.sampled_from(dtypes(device_path))), draw(st.integers(0, 999))
    options = {"sink": draw(st.sampled_from([0, 3])), "window": draw(st.sampled_from([1, 40]))}
    if draw(st.booleans()):
        rows = draw(st.sampled_from([1, batch]))
        lengths = draw(st.lists(st.integers(-2, size + 9), min_size=rows, max_size=rows))
        options["lengths"] = torch.tensor(lengths)
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch))
        options["start"] = torch.tensor(starts, dtype=torch.int32)
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 1, batch, size) > -0.5
    queries = draw(st.sampled_from([1, 3]))
    q = random(seed, batch, queries, heads * 3, 64, dtype=dtype).transpose(1, 2)
    codes, steps = quantize_keys(random(seed + 2, batch, size, heads, 64).transpose(1, 2))
    lengths = row_lengths(options.get("lengths"), heads * queries)
    there = [x.to(device_path[0]) for x in (q, codes, steps)]
    moved = {x: y.to(device_path[0]) if torch.is_tensor(y) else y for x, y in options.items()}
    if device_path == ("cpu", "kernel"):  # its sums differ from the reference's in the last bits
        wanted = by_kernel(q, codes, steps, **options)
    else:
        wanted = score_tokens(*there, **moved).cpu()
    assert_exact(call(device_path, q, codes, steps, k, **options), wanted, k, lengths)


def by_kernel(q, codes, steps, sink, window, **options):
    args = q, codes, steps, sink, window, *(options.get(name) for name in NAMES)
    scores = scoring._allocate(*args)
    scoring.launch_score_tokens(*args, scores)
    return scores


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(device_path, kind):
    rows = make(kind, 333, 33, torch.Generator().manual_seed(3), rows=2)
    assert_exact(call(device_path, *keys_of(rows, 2), 33), seen_scores(rows), 33)


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_about_as_many_real_scores_as_picks(device_path, spare):
    """-inf is picked where real scores run out."""
    generator = torch.Generator().manual_seed(5)
    rows, size, k = 3, 300, 33
    wanted = torch.full((rows, size), -torch.inf)
    for r, value in enumerate((torch.randn(k + spare, generator=generator), 2.0, torch.inf)):
        at = SINK + torch.randperm(size - SINK - WINDOW, generator=generator)[: k + spare]
        wanted[r, at] = value
    assert_exact(call(device_path, *keys_of(wanted), k), wanted, k)


def test_rows_of_their_own_lengths(device_path):
    """Each sequence has its own, and its KV heads share it; start and mask hide tokens of a row."""
    batch, heads, size, k = 4, 2, 300, 40
    rows = make("normal", size, k, torch.Generator().manual_seed(6), rows=batch * heads)
    lengths, start = torch.tensor([300, k, 170, 41]), torch.tensor([0, 0, 100, 9])
    mask = torch.ones(batch, size, dtype=torch.bool)
    mask[0, ::3] = False
    options = {"lengths": lengths, "start": start, "key_mask": mask}
    found = call(device_path, *keys_of(rows, heads), k, **options)
    own = lengths.repeat_interleave(heads)
    wanted = seen_scores(rows, own, start.repeat_interleave(heads))
    wanted = wanted.masked_fill(~mask.repeat_interleave(heads, 0), -torch.inf)
    assert_exact(found, wanted, k, own)


def test_a_row_of_no_more_than_k_tokens(device_path):
    rows = make("normal", 200, 9, torch.Generator().manual_seed(9), rows=2)
    for length in (0, 1, 39, 40):
        lengths = torch.tensor([length])
        found = call(device_path, *keys_of(rows), 40, lengths=lengths)
        assert_exact(found, seen_scores(rows, lengths), 40, lengths)
        assert (found[2][:, 0] == ranking.ALL).all()


def test_signed_zeros_tie(device_path):
    """Of equals the lower index; and the kernels return no -0.0."""
    rows = torch.tensor([[0.0, -0.0, -0.0, 0.0, -1.0]]).repeat(2, 40)
    found = call(device_path, *keys_of(rows), 21)
    wanted = [i for i in range(SINK, 200) if i % 5 < 4][:21]
    assert found[0].sort(1).values.tolist() == [wanted] * 2
    assert (found[1] == 0).all()
    assert device_path[1] == "reference" or not found[1].signbit().any()


def test_what_lies_behind_the_length_is_not_read(device_path):
    rows = make("normal", 500, 20, torch.Generator().manual_seed(10), rows=2)
    lengths = torch.tensor([180])
    for tail in (torch.nan, torch.inf):
        x = rows.clone()
        x[:, 180:] = tail
        found = call(device_path, *keys_of(x), 20, lengths=lengths)
        assert_exact(found, seen_scores(rows, lengths), 20, lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [8200, 2**15, 100003, 2**17, 2**20])
@pytest.mark.parametrize("kind", KINDS)
def test_full_size_of_every_kind(kind, size):
    rows = make(kind, size, 2048, torch.Generator().manual_seed(12), rows=4)
    lengths = torch.tensor([size - 77])
    device_path = "cuda", "kernel"
    found = call(device_path, *keys_of(rows, 4), 2048, lengths=lengths, window=256)
    assert_exact(found, seen_scores(rows, lengths, window=256), 2048, lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2**15, 2**17])
def test_many_replays_of_a_graph(size):
    """Nothing waits for the host, and a replay leaves nothing behind for the next."""
    torch.use_deterministic_algorithms(False)
    q, codes, steps = (x.cuda() for x in keys_of(torch.zeros(4, size), 4))
    lengths = torch.full((1,), size, device="cuda")
    top_tokens(q, codes, steps, 2048, lengths=lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = top_tokens(q, codes, steps, 2048, lengths=lengths, stats=True)
    for step in range(50):
        steps.normal_()
        lengths.fill_(size - 37 * step)
        graph.replay()
        if step % 10 == 0:
            wanted = seen_scores(steps[0].cpu(), lengths.cpu(), sink=0, window=1)
            assert_exact([x.cpu() for x in found], wanted, 2048, lengths.cpu())


# ---- the op -------------------------------------------------------------------------------------


def test_compiles_as_one_graph(device):
    q, codes, steps = (x.to(device) for x in keys_of(random(0, 2, 90), 2))
    compiled = torch.compile(
        lambda q, steps: top_tokens(q, codes, steps, 9), fullgraph=True, backend="aot_eager"
    )
    for mine, wanted in zip(compiled(q, steps), top_tokens(q, codes, steps, 9), strict=True):
        assert torch.equal(mine, wanted)


CODES = torch.zeros(1, 2, 40, 64, dtype=torch.int8)
WRONG = [
    ({"codes": CODES.float()}, "codes is torch.float32"),
    ({"steps": torch.zeros(1, 2, 39)}, r"steps is torch.float32 \(1, 2, 39\), needs"),
    ({"q": torch.zeros(1, 4, 0, 64)}, r"q is \(1, 4, 0, 64\), needs \[B,Hq,T,D\]"),
    ({"q": torch.zeros(1, 4, 17, 64)}, r"q is \(1, 4, 17, 64\), needs \[B,Hq,T,D\] with T from"),
    ({"window": 0}, "window is 0"),
    ({"sink": -1}, "sink is -1"),
    ({"k": 0}, "k is 0, needs 1 to 4096"),
    ({"k": 4097}, "k is 4097"),
]


@pytest.mark.parametrize(
    ("change", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refuses(change, message):
    inputs = {"q": torch.zeros(1, 4, 1, 64), "codes": CODES, "steps": torch.zeros(1, 2, 40), "k": 9}
    with pytest.raises(ArgumentError, match="^top_tokens: .*" + message):
        top_tokens(**(inputs | change))


def test_refuses_more_tokens_than_topk():
    size = ranking.MAX_SCORES + 1
    inputs = [torch.empty(1, *shape, device="meta") for shape in ((1, 1, 64), (1, size, 64))]
    steps = torch.empty(1, 1, size, device="meta")
    with pytest.raises(ArgumentError, match="top_tokens: codes has 4194305 tokens"):
        top_tokens(inputs[0], inputs[1].to(torch.int8), steps, 9)
