"""Crossovers scaled from an H200's to other cards, which stand in by what torch says of them."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import attnplug
from attnplug.bench.quick import Heads
from attnplug.call import StepReads
from attnplug.ops.common import device
from attnplug.ops.common.device import Card
from attnplug.plan import H200, SHAPES
from attnplug.policies import methods, parse
from attnplug.policies.auto import CANDIDATES, MEASURED_TOKENS
from attnplug.policies.crossover import RowCrossover
from attnplug.policies.scaled import BANDWIDTH, PROCESSORS, STEP, scaled

CUDA = torch.device("cuda")
SHAPE = Heads(28, 4, 128).shape("cuda")
TUNE = Path(__file__).parents[2] / "docs/tools/tune.md"

# Capability, multiprocessors, kHz of the memory's clock, bits of its bus.
CARDS = {
    "NVIDIA L4": ((8, 9), 58, 6_251_000, 192),  # 300 GB/s
    "NVIDIA GeForce RTX 4090": ((8, 9), 128, 10_501_000, 384),  # 1,008 GB/s
    "NVIDIA A100-SXM4-80GB": ((8, 0), 108, 1_593_000, 5120),  # 2,039 GB/s
    "NVIDIA H100 80GB HBM3": ((9, 0), 132, 2_619_000, 5120),  # 3,352 GB/s
    "NVIDIA H200": ((9, 0), 132, 3_201_000, 6144),  # 4,917 GB/s
    "NVIDIA B200": ((10, 0), 148, 3_906_250, 8192),  # 8,000 GB/s
}
OWN = {"gather": (14208, 65536), "sketch": (13440, 98304), "gvr": (163840, 163840)}
# (row, alone) of RowCrossover. By the bill of plan.py, with only the bandwidth exchanged, gather
# pays from 7.8K tokens on an L4, 14.1K on a 4090, 22.3K on an A100, and 73.6K on a B200; its own
# crossover is later than an H200's bill of 46.1K in the same way.
SCALED = {
    "NVIDIA L4": {"gather": (6400, 14336), "sketch": (4352, 15616), "gvr": (26112, 26112)},
    "NVIDIA GeForce RTX 4090": {
        "gather": (7168, 18688),
        "sketch": (5376, 22272),
        "gvr": (38144, 38144),
    },
    "NVIDIA A100-SXM4-80GB": {
        "gather": (9984, 36352),
        "sketch": (8448, 51200),
        "gvr": (86784, 86784),
    },
    "NVIDIA H100 80GB HBM3": OWN,
    "NVIDIA H200": OWN,
    "NVIDIA B200": {
        "gather": (19968, 106240),
        "sketch": (20736, 166400),
        "gvr": (271104, 271104),
    },
}
UNSCALED = [
    "momo", "exact", "certified", "certified(tolerance=None, k_min=2, explore=0.0)",
    "gather(kv='host')", "sketch(kv='host')",
]  # fmt: skip


@pytest.fixture
def insert(monkeypatch):
    """Has torch see a GPU: one of CARDS, or with other properties."""

    def see(name, hip=None, **more):
        (major, minor), processors, clock, bits = CARDS[name]
        found = dict(major=major, minor=minor, multi_processor_count=processors)
        found |= dict(memory_clock_rate=clock, memory_bus_width=bits, is_integrated=False)
        found |= dict(shared_memory_per_block=49152, shared_memory_per_block_optin=101376)
        found = {key: value for key, value in (found | more).items() if value is not None}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(**found)
        )
        monkeypatch.setattr(torch.version, "hip", hip)
        device.card.cache_clear()

    yield see
    device.card.cache_clear()


@pytest.mark.parametrize("name", CARDS)
def test_a_card_serves_from_where_its_bandwidth_has_it(name, insert):
    insert(name)
    for method, rule in SCALED[name].items():
        made = methods()[method]().on_this_machine(SHAPE)
        assert made.row_crossover(CUDA) == rule
        note = made.note(SHAPE)
        assert f"dense in caches below {rule[1]:,} tokens" in note
        is_scaled = "scaled from an H200's by bandwidth (`attnplug tune` measures on" in note
        assert is_scaled == (rule != OWN[method])
        assert ("as measured on an H200" in note) == ("H100" in name)


def test_a_step_that_leaves_nothing_out_is_not_scaled():
    card = Card.made("nvidia", (8, 9), 58, 101376, 3e11)
    assert scaled(65536, StepReads, 128, card) is None


@pytest.mark.parametrize("policy", UNSCALED)
def test_what_the_bandwidth_does_not_decide_is_an_h200s(policy, insert):
    for name in CARDS:
        insert(name)
        for method in (getattr(parse(policy), slot) for slot in ("prefill", "decode")):
            if method.name != "dense":
                made = method.on_this_machine(SHAPE)
                assert made is method and "scaled" not in made.note(SHAPE)
                assert ("as measured on an H200" in made.origin(CUDA)) == ("H200" not in name)


@pytest.mark.parametrize(
    "more",
    [
        dict(memory_clock_rate=0),
        dict(memory_clock_rate=None),
        dict(memory_bus_width=None),
        dict(is_integrated=True),
        dict(hip="7.0"),
    ],
    ids=str,
)
def test_without_a_known_bandwidth_the_crossovers_are_an_h200s(more, insert):
    insert("NVIDIA L4", **more)
    made = methods()["gather"]().on_this_machine(SHAPE)
    assert made.row_crossover(CUDA) == OWN["gather"]
    assert "tokens (20,624 at batch 8), as measured on an H200" in made.note(SHAPE)


def test_min_tokens_is_not_scaled(insert):
    insert("NVIDIA L4")
    made = methods()["gather"](min_tokens=5000).on_this_machine(SHAPE)
    assert made.row_crossover(CUDA) == (5000, 5000)
    assert "below 5,000 tokens, as min_tokens asks, and in those" in made.note(SHAPE)


def test_auto_keeps_the_lengths_that_its_tasks_were_measured_at(insert):
    sketch = CANDIDATES["faithful"]["decode"][0].method
    for name, alone in (("NVIDIA L4", MEASURED_TOKENS), ("NVIDIA B200", 166400)):
        insert(name)
        rule = sketch.on_this_machine(SHAPE).row_crossover(CUDA)
        assert rule == RowCrossover(MEASURED_TOKENS, alone)


def test_a_cpu_keeps_its_own():
    gather = methods()["gather"]()
    assert gather.on_this_machine(Heads(28, 4, 128).shape("cpu")) is gather


def test_the_rule_exchanges_the_bandwidth_of_the_bill():
    """A bill of another bandwidth and of the same costs crosses where the rule says that the first
    one's crossing lies on such a card."""
    gather, shape = attnplug.Gather(), SHAPES["qwen2.5-7b"]
    for ratio in (0.0625, 0.25, 2.0):
        other = dataclasses.replace(H200, bandwidth=H200.bandwidth * ratio)
        tokens, wanted = (bill.crossover(shape, 1, gather) for bill in (H200, other))
        card = Card.made("nvidia", (8, 9), PROCESSORS, 101376, BANDWIDTH * ratio)
        found = scaled(tokens, lambda n: gather.step_reads(n, 128), 128, card)
        assert wanted <= found < wanted + 2 * STEP


def test_fewer_multiprocessors_serve_later_and_more_serve_no_sooner():
    def on(processors):
        card = Card.made("nvidia", (8, 9), processors, 101376, BANDWIDTH / 2)
        return scaled(65536, lambda n: StepReads(min(n, 4096)), 128, card)

    assert on(2 * PROCESSORS) == on(PROCESSORS) == 34816
    assert on(PROCESSORS // 2) == 65536


def test_the_docs_have_these_numbers():
    shown = TUNE.read_text().split("<!-- scaled crossovers -->")[1].split("<!-- /scaled -->")[0]
    rows = re.findall(r"^\| (.+?) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", shown, re.MULTILINE)
    told = {card: tuple(int(n.replace(",", "")) for n in counts) for card, *counts in rows}
    for card, name in zip(
        ["L4", "RTX 4090", "A100 80 GB", "H100, H200", "B200"],
        [name for name in CARDS if name != "NVIDIA H200"],
        strict=True,
    ):
        assert told.pop(card) == tuple(SCALED[name][x][1] for x in ("gather", "sketch", "gvr"))
    assert not told
