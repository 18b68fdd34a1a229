"""gather with keys and values in host memory: what a cache on the GPU gives, from fewer of its
bytes."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnplug
from attnplug import Dense, Gather, HostMemoryError, telemetry
from attnplug.models import host_memory
from attnplug.policies import AttentionCall, LayerShape, residency
from attnplug.policies._gather_layers import GatherLayer, HostGatherLayer
from attnplug.testing import tiny_model

SIZE, HEADS, KV_HEADS, DIM = 240, 4, 2, 64
GPU = Gather(k=2, block=16, sink=1, local=2, min_tokens=0)
HOST = dataclasses.replace(GPU, kv="host", resident=5)


def random(seed: int, *shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def pair(kv: torch.Tensor, host: Gather = HOST) -> list[tuple[Gather, GatherLayer]]:
    """The policy and its layer with these keys and values `[2,B,Hkv,n,D]`, on the GPU and not."""
    both = []
    for policy in (dataclasses.replace(host, kv="gpu", resident=None), host):
        layer = policy.cache_layer(SIZE)
        layer.update(kv[0], kv[1])
        both.append((policy, layer))
    return both


@pytest.mark.parametrize("order", [(4, 1), (1, 4)])
def test_a_cache_that_is_reset_may_be_another_batchs(order, monkeypatch):
    """Four rows are served from host memory, and one is not."""
    monkeypatch.setattr(Gather, "measured_crossover", lambda *_: 400)
    monkeypatch.setattr(Gather, "measured_row_crossover", lambda *_: 110)
    model = attnplug.apply(tiny_model(), dataclasses.replace(HOST, min_tokens=None))
    cache, asked = attnplug.make_cache(model, 200), dict(max_new_tokens=6, do_sample=False)
    asked |= dict(eos_token_id=None, pad_token_id=0)
    for rows in order:
        ids = torch.randint(2, 97, (rows, 150), generator=torch.Generator().manual_seed(rows))
        found = model.generate(ids, past_key_values=cache, **asked)
        assert cache.layers[0].on_host == (rows == 4)
        fresh = attnplug.make_cache(model, 200)
        assert torch.equal(found, model.generate(ids, past_key_values=fresh, **asked))
        cache.reset()


def attend(policy: Gather, layer: GatherLayer, q: torch.Tensor, mask=None, **options):
    keys, values = layer._buffers()
    lengths = layer.cumulative_length.reshape(1)
    call = AttentionCall(
        q, keys, values, DIM**-0.5, lengths=lengths, key_mask=mask, state=layer, **options
    )
    return policy.attend(call)


def same(both, seed: int, batch: int, mask=None, **options) -> None:
    device = both[0][1].keys.device
    q = random(seed, batch, HEADS, 1, DIM).to(device)
    ours, wanted = (attend(*each, q, mask, **options) for each in reversed(both))
    if device.type == "cpu":
        assert torch.equal(ours, wanted)
    else:
        assert (ours - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("scoring", ["bounds", "band"])
@pytest.mark.parametrize("deferred", [False, True])
def test_steps_are_those_of_a_cache_on_the_gpu(scoring, deferred, device):
    """To the bit on a CPU, over more blocks than there are slots, and as the sequence grows."""
    both = pair(
        random(0, 2, 2, KV_HEADS, 150, DIM, device=device),
        dataclasses.replace(HOST, scoring=scoring),
    )
    for seed in range(80):
        new = random(seed, 2, 2, KV_HEADS, 1, DIM, device=device)
        for _, layer in both:
            layer.defer_next = deferred
            layer.update(new[0], new[1])
            assert (layer.pending is not None) == deferred
        same(both, seed, 2, softcap=5.0 * (seed % 2), sinks=random(9, HEADS, device=device))
    (_, near), (_, far) = both
    assert torch.equal(near.keys, far.keys) and torch.equal(near.values, far.values)
    assert torch.equal(near.cumulative_length, far.cumulative_length)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 48, 49, 64, 239, 240])
@pytest.mark.parametrize(("k", "sink"), [(2, 1), (0, 1), (0, 0), (3, 0), (2, 3)])
def test_any_length_and_budget(length, k, sink, device):
    policy = dataclasses.replace(HOST, k=k, sink=sink)
    both = pair(random(length, 2, 1, KV_HEADS, length, DIM, device=device), policy)
    for seed in range(3):
        same(both, seed, 1)


def test_padding_and_holes(device):
    kv = random(0, 2, 3, KV_HEADS, 190, DIM, device=device)
    kv[:, 0, :, 100] = torch.nan  # hidden below
    both = pair(kv)
    starts = torch.tensor([0, 37, 150], device=device)
    mask = torch.arange(SIZE, device=device) >= starts[:, None]
    mask[0, 100] = mask[1, 64:90] = False
    for seed in range(12):
        same(both, seed, 3, mask)


def test_what_a_mask_hides_is_in_the_slots_all_the_same(device):
    """A block that was read behind a mask and is then asked for without it."""
    both = pair(random(0, 2, 1, KV_HEADS, 190, DIM, device=device))
    mask = torch.ones(1, SIZE, dtype=torch.bool, device=device)
    mask[0, 5:120:2] = False
    for each in (mask, None, mask, None):
        same(both, 3, 1, each)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 60)),
        st.tuples(st.just("step"), st.integers(1, 20)),
        st.tuples(st.just("crop"), st.integers(0, 90)),
        st.tuples(st.just("reorder"), st.integers(0, 8)),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
        st.tuples(st.just("select"), st.integers(0, 3)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    min_size=3,
    max_size=10,
)


@settings(max_examples=40)
@given(actions=ACTIONS, padded=st.booleans())
def test_slots_and_ring_follow_whatever_happens_to_the_cache(actions, padded):
    """Nothing that a step reads on the GPU may be older than what the host has."""
    both, batch, length, seed = pair(random(0, 2, 2, KV_HEADS, 100, DIM)), 2, 100, 1
    for action, number in actions:
        seed += 1
        if action in ("append", "step"):
            for span in [number] if action == "append" else [1] * number:
                if length + span > SIZE:
                    break
                seed, length = seed + 1, length + span
                new = random(seed, 2, batch, KV_HEADS, span, DIM)
                for _, layer in both:
                    layer.defer_next = span == 1 and seed % 2 == 0
                    layer.update(new[0], new[1])
                if action == "step":
                    same(both, seed, batch, visible(batch) if padded else None)
        elif action == "crop":
            length -= min(number, length - 6)
            for _, layer in both:
                layer.crop(length - int(layer.cumulative_length))
        elif action == "reorder":
            order = torch.tensor([number * (row + 1) // 3 % batch for row in range(batch)])
            for _, layer in both:
                layer.reorder_cache(order)
        elif action == "repeat" and batch < 5:
            batch *= number
            for _, layer in both:
                layer.batch_repeat_interleave(number)
        elif action == "select":
            rows = torch.arange(batch)[: number + 1].flip(0)
            batch = len(rows)
            for _, layer in both:
                layer.batch_select_indices(rows)
        elif action == "reset":
            length = 70
            new = random(seed, 2, batch, KV_HEADS, length, DIM)
            for _, layer in both:
                layer.reset()
                layer.update(new[0], new[1])
        same(both, seed, batch, visible(batch) if padded else None)


def visible(batch: int) -> torch.Tensor:
    return torch.arange(SIZE) >= 3 * torch.arange(batch)[:, None]


def test_a_block_that_is_wanted_again_is_found(device):
    """The hit rate, counted by hand: the same query again finds all that it brought."""
    (_, _), (policy, layer) = pair(random(0, 2, 1, KV_HEADS, 200, DIM, device=device))
    q = random(1, 1, HEADS, 1, DIM, device=device)
    for step in range(4):
        attend(policy, layer, q)
        counted = layer.near.counters[0, :, :2].tolist()
        assert counted == [[3 * (step + 1), 3 * step]] * KV_HEADS
    layer.crop(-180)
    attend(policy, layer, q)  # 20 tokens: the ring has them all
    assert layer.near.counters[0, :, :2].tolist() == counted


def test_blocks_that_are_wanted_often_stay():
    """Of three slots that of a block which each second step wants is never given to the others."""
    (_, _), (policy, layer) = pair(
        random(0, 2, 1, 1, 240, DIM), dataclasses.replace(HOST, k=1, sink=0, resident=3)
    )
    keys = layer.keys
    found = []
    for step in range(24):
        favourite = 20 if step % 2 else 32 + 16 * (step // 2 % 6)
        attend(policy, layer, (10 * keys[:, :, favourite : favourite + 1]).repeat(1, 4, 1, 1))
        found.append(int(layer.near.counters[0, 0, 1]))
    hits = [b - a for a, b in zip([0, *found], found, strict=False)]
    assert hits[3::2] == [1] * 11  # the favourite, once it has been there
    assert sum(hits[0::2]) < 6  # others take turns in what is left


def test_the_memory_is_where_it_should_be():
    layer = HOST.cache_layer(SIZE)
    layer.update(*random(0, 2, 1, KV_HEADS, 3, DIM).bfloat16())
    assert layer.near.ring.shape == (1, KV_HEADS, 2, 32, DIM)
    assert layer.near.slots.shape == (1, KV_HEADS, 5, 2, 16, DIM)
    assert layer.near.slots.dtype == torch.bfloat16
    many = dataclasses.replace(HOST, resident=900).cache_layer(SIZE)
    many.update(*random(0, 2, 1, KV_HEADS, 3, DIM))
    assert many.near.slots.shape[2] == 15  # all there are
    assert Gather(kv="host")._slots == 32768 // 16
    assert Gather(kv="host", block=128)._slots == 264  # what a step wants is more than 32,768 keys
    assert Gather(kv="host", k=32, block=128)._slots == 256


def test_a_small_cache_is_on_the_gpu():
    """Dense reads it whole."""
    layer = dataclasses.replace(HOST, min_tokens=SIZE + 1).cache_layer(SIZE)
    layer.update(*random(0, 2, 1, KV_HEADS, 190, DIM))
    assert layer.near is None
    q = random(1, 1, HEADS, 1, DIM)
    assert torch.equal(attend(HOST, layer, q), attend(GPU, layer, q))


@pytest.mark.parametrize("change", [{"local": 3}, {"k": 9, "resident": 10}])
def test_a_layer_made_for_other_options_is_read_whole(change):
    _, (_, layer) = pair(random(0, 2, 1, KV_HEADS, 190, DIM))
    q = random(1, 1, HEADS, 1, DIM)
    found = attend(dataclasses.replace(HOST, **change), layer, q)
    keys, values = layer._buffers()
    lengths = layer.cumulative_length.reshape(1)
    assert torch.equal(
        found, Dense().attend(AttentionCall(q, keys, values, DIM**-0.5, lengths=lengths))
    )


def test_no_host_memory_is_an_error_that_says_what_to_do(monkeypatch):
    layer = HOST.cache_layer(1 << 20)
    monkeypatch.setattr(host_memory, "_available", lambda: 3 << 28)
    monkeypatch.setattr(host_memory.torch.cuda, "device", lambda device: monkeypatch.context())
    wanted = r"1\.00 GiB of host memory.*\(0\.75 GiB are free\).*: kv='gpu'"
    with pytest.raises(HostMemoryError, match=wanted):
        layer._host([(1, 8, 1 << 20, 32)] * 2, torch.bfloat16, torch.device("cuda"))


def test_memory_that_the_driver_does_not_give_is_an_error(monkeypatch):
    class Driver:
        def cuMemAllocManaged(self, place, size, flags):
            return 2

    monkeypatch.setattr(host_memory, "_driver", Driver)
    monkeypatch.setattr(host_memory.torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(host_memory.torch.cuda, "device", lambda device: monkeypatch.context())
    with pytest.raises(HostMemoryError, match=r"0\.06 GiB.*\(cuMemAllocManaged: 2\)"):
        host_memory.host_zeros((1 << 24,), torch.float32, "cuda")


def test_free_memory_is_the_least_of_what_limits_it(tmp_path, monkeypatch):
    assert 0 < host_memory._available() < 1 << 62
    files = {
        "/proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 64 kB",
        "/sys/fs/cgroup/memory.max": "40960",
        "/sys/fs/cgroup/memory.current": "1024",
    }
    for name, text in files.items():
        (tmp_path / name[1:]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name[1:]).write_text(text)
    monkeypatch.setattr(host_memory, "Path", lambda name: tmp_path / name[1:])
    assert host_memory._available() == 39936
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert host_memory._available() == 65536


class Bytes:
    """Memory of the CPU in the place of the host's."""

    def __init__(self, count):
        self.all = torch.zeros(count, dtype=torch.uint8)

    def since(self, offset):
        return self.all[offset:]


@pytest.mark.parametrize(("widths", "row"), [((64, 64), 128), ((20, 12), 24 + 16)])
def test_rows_lie_next_to_one_another(widths, row, monkeypatch):
    taken = []

    def take(count, device, instead):
        taken.append(Bytes(count))
        return taken[-1]

    monkeypatch.setattr(host_memory, "_take", take)
    shapes = [(2, 3, 5, width) for width in widths]
    found = host_memory.host_rows(shapes, torch.bfloat16, "cuda", instead="")
    assert [x.shape for x in found] == shapes
    assert {x.stride() for x in found} == {(15 * row, 5 * row, row, 1)}
    assert len(taken) == 1 and taken[0].all.nbytes == 2 * 30 * row
    first, second = (x.data_ptr() - taken[0].all.data_ptr() for x in found)
    assert first == 0 and second % 16 == 0 and 2 * widths[0] <= second <= 2 * (row - widths[1])
    for value, x in enumerate(found, 1):
        x.fill_(value)
    assert all(bool((x == value).all()) for value, x in enumerate(found, 1))


@pytest.mark.gpu
def test_rows_of_one_memory_are_tensors_of_their_own():
    """To torch's compiler, which joins those that share a storage; the memory is there as long as
    one of them."""
    shapes = [(1, 2, 1 << 16, 64)] * 2
    keys, values = host_memory.host_rows(shapes, torch.bfloat16, "cuda", instead="")
    assert values.data_ptr() == keys.data_ptr() + 128
    assert keys.untyped_storage()._cdata != values.untyped_storage()._cdata
    keys.fill_(1)
    values.fill_(2)
    del keys
    assert float(values.sum()) == 2 * values.numel()


@pytest.mark.gpu
def test_memory_is_given_back(monkeypatch):
    freed = []

    def call(name, *arguments, own=host_memory._call):
        own(name, *arguments)
        if name == "cuMemFree_v2":
            freed.append(arguments[0].value)

    monkeypatch.setattr(host_memory, "_call", call)
    x = host_memory.host_zeros((1 << 29,), torch.bfloat16, "cuda")
    place = x.data_ptr()
    assert bool((x[:: 1 << 20] == 0).all()) and place not in freed
    del x
    assert place in freed


@pytest.mark.parametrize("prefill", ["", "momo(gamma=8, block=16, top_k=2, exact_k=1)+"])
def test_generate_gives_the_tokens_of_a_cache_on_the_gpu(prefill, device, monkeypatch):
    """Whole and chunked prefill, beams, prompt lookup, whose several queries are dense over a cache
    in host memory."""
    monkeypatch.setattr(attnplug.Gather, "serves_few", attnplug.Dense.serves_few)
    model = tiny_model(device=device)
    ids = torch.randint(2, 90, (2, 150), generator=torch.Generator().manual_seed(0)).to(device)
    kept = "k=1, sink=1, local=1, min_tokens=0"
    found = []
    for where in ("", ", kv='host', resident=3"):
        with attnplug.applied(model, f"{prefill}gather({kept}{where})"):
            for rows, options in (
                (ids, {}),
                (ids, {"prefill_chunk_size": 40}),
                (ids, {"num_beams": 3}),
                (ids[:1], {"prompt_lookup_num_tokens": 3}),
            ):
                found.append(
                    model.generate(
                        rows,
                        attention_mask=torch.ones_like(rows),
                        max_new_tokens=20,
                        do_sample=False,
                        **options,
                    )
                )
    for near, far in zip(found[:4], found[4:], strict=True):
        assert torch.equal(near, far)


def test_its_telemetry_is_reported(device):
    model = tiny_model(device=device)
    ids = torch.randint(2, 90, (1, 150), generator=torch.Generator().manual_seed(0)).to(device)
    with attnplug.applied(model, HOST), torch.no_grad():
        cache = attnplug.make_cache(model, 200)
        model(ids, past_key_values=cache)
        assert [row.wanted for row in residency(cache)] == [0, 0]
        for _ in range(6):
            model(ids[:, :1], past_key_values=cache)
        rows = residency(cache)
        assert "host memory, 5 blocks" in str(attnplug.report(model))
    assert [row.layer for row in rows] == [0, 1]
    for row in rows:
        assert row.wanted == 6 * 2 * 3 and 0 < row.found < row.wanted
        assert row.hit_rate == row.found / row.wanted
        assert row.link_bytes == (row.wanted - row.found) * 2 * 16 * 64 * 4
        assert row.host_bytes == 2 * 2 * 200 * 64 * 4
        near = cache.layers[row.layer].near
        assert (
            row.device_bytes == sum(x.nbytes for x in near) + cache.layers[row.layer].bounds.nbytes
        )
    with attnplug.applied(model, GPU):
        assert residency(attnplug.make_cache(model, 200)) == []


def test_the_report_decodes_and_shows_the_hit_rate(byte_tokenizer):
    """What `attnplug report MODEL --policy "gather(kv='host')" --steps 4` prints."""

    with attnplug.applied(tiny_model(), HOST) as model:
        [shown] = telemetry.run(model, byte_tokenizer, 120, 4).tables()
    cells = {column.header: list(column.cells) for column in shown.columns}
    assert cells["layer"] == ["0", "1"] and cells["wanted"] == ["24", "24"]
    assert cells["hit rate"] == [f"{int(found) / 24:.3f}" for found in cells["found"]]
    assert cells["host MiB"] == ["0.12", "0.12"]


def test_note_says_where_the_cache_is():
    shape = LayerShape(4, 2, 64, 0.0, False, torch.device("cuda"))
    note = Gather(kv="host").note(shape)
    assert "from host memory, 2048 blocks a KV head cached on the device" in note
    large = Gather(kv="host", block=128, sink=1).note(shape)  # sink + k are more
    assert "from host memory, 257 blocks a KV head cached on the device" in large
    assert str(Gather(kv="host", resident=640)) == "gather(kv='host', resident=640)"
    assert attnplug.policies.parse("momo+gather(kv='host')").decode == Gather(kv="host")


@pytest.mark.gpu
def test_a_prefill_in_chunks_reads_back_and_the_cache_is_not_on_the_gpu():
    model = tiny_model(device="cuda", max_position_embeddings=1 << 17)
    ids = torch.randint(2, 90, (1, 3000), generator=torch.Generator().manual_seed(0)).cuda()
    with attnplug.applied(model, GPU), torch.no_grad():
        wanted = model(ids, past_key_values=attnplug.make_cache(model, 1 << 16)).logits[:, -1]
    before = torch.cuda.memory_allocated()  # with cuBLAS's own
    with attnplug.applied(model, HOST), torch.no_grad():
        cache = attnplug.make_cache(model, 1 << 16)
        for chunk in ids.split(1024, 1):
            logits = model(chunk, past_key_values=cache).logits[:, -1]
        assert isinstance(cache.layers[0], HostGatherLayer) and cache.layers[0].exposes_buffers
        used = torch.cuda.memory_allocated() - before
    assert (logits - wanted).abs().max() < 1e-2 * wanted.abs().max()
    assert used < cache.layers[0].keys.nbytes
