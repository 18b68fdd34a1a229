"""auto: what it takes for a layer, a device and the memory there is, and what it says of it."""

import dataclasses
import json
import pickle
import re
from pathlib import Path
from statistics import NormalDist

import pytest
import torch

import attnplug
from attnplug import Auto, Dense, Gather, Momo, Policy, PolicyError, Sketch
from attnplug.binding import LayerMaker
from attnplug.eval.tasks import TASKS
from attnplug.models.hf import Binding
from attnplug.models.layers import find_attention_layers
from attnplug.policies import AttentionCall, LayerShape, auto, parse
from attnplug.policies._sketch_layer import SketchLayer
from attnplug.testing import make_inputs, tiny_model

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SHAPE = LayerShape(28, 4, 128, 0.0, False, CUDA)
ROWS = Path(__file__).parents[2] / "bench" / "results"
IDS = torch.randint(2, 90, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def free(monkeypatch):
    """Sets how much memory every device has free; 1 TiB to begin with."""

    def set_free(count: int) -> None:
        monkeypatch.setattr(auto, "free_memory", lambda device: count)

    set_free(1 << 40)
    return set_free


@pytest.fixture
def candidates(monkeypatch):
    """Replaces the candidates for decode by some that a CPU may run."""

    def set_candidates(*methods) -> None:
        chosen = tuple(auto.Candidate(method, "for a test") for method in methods)
        table = {"faithful": {"prefill": (), "decode": chosen}}
        monkeypatch.setattr(auto, "CANDIDATES", table)

    return set_candidates


def chosen(quality: str, shape: LayerShape, layers: int = 28) -> Policy:
    return Policy(Auto(quality), Auto(quality)).resolve(shape, layers)[0]


@pytest.mark.parametrize(
    "quality, device, gib, names",
    [
        ("faithful", CUDA, 1024, "momo+sketch"),
        ("faithful", CPU, 1024, "momo"),
        ("faithful", CUDA, 1, "momo"),
        ("fast", CUDA, 1024, "momo+gather"),
        ("fast", CPU, 1024, "momo"),
        ("fast", CUDA, 1, "momo"),
    ],
)
def test_the_choice_follows_device_room_and_quality(quality, device, gib, names, free):
    free(gib << 30)
    assert str(chosen(quality, dataclasses.replace(SHAPE, device=device))) == names


def test_a_refusal_leaves_the_layer_to_the_next_candidate(candidates, free):
    candidates(Sketch(bytes=32), Gather())
    narrow = dataclasses.replace(SHAPE, head_dim=80)
    method, reason = Auto().resolve("decode", narrow, 1)
    assert (method, reason) == (Gather(), "auto: decode by gather, for a test")
    candidates(Sketch(bytes=32))
    method, reason = Auto().resolve("decode", narrow, 1)
    assert method == Dense() and "32 bytes are 96 coordinates, the head 80" in reason
    assert Auto().resolve("decode", SHAPE, 1)[0] == Sketch(bytes=32)


def test_room_is_asked_for_all_layers_of_the_device_at_the_crossover(free):
    """Keys and values of 16 bits, 24 bytes a token and 512 queries a head are the least of it."""
    tokens, layers = Sketch().crossover(CUDA), 40  # a tenth of a GiB lies in the 1% above the least
    least = layers * (4 * tokens * (2 * 2 * 128 + 24) + 28 * 512 * 128 * 2)
    free(least)
    assert str(chosen("faithful", SHAPE, layers)) == "momo"  # the basis, too
    assert str(chosen("faithful", SHAPE, layers - 1)) == "momo+sketch"
    free(int(least * 1.01))
    assert str(chosen("faithful", SHAPE, layers)) == "momo+sketch"
    free(least)
    reason = Auto().resolve("decode", SHAPE, layers)[1]
    told = re.search(r"from 98,304 tokens on its caches take (.*) GiB in 40 layers, and", reason)
    assert told is not None and 0.99 * least < float(told[1]) * 2**30 < 1.01 * least
    assert f"and {least / 2**30:.1f} GiB are free" in reason


def test_the_size_that_is_asked_for_is_that_of_the_cache(candidates):
    candidates(auto.RoomySketch(min_tokens=0))
    with attnplug.applied(tiny_model(), "auto") as model, torch.no_grad():
        cache = attnplug.make_cache(model, 300)
        model(IDS, past_key_values=cache)
    layer = cache.layers[0]
    taken = sum(tensor.nbytes for tensor in layer.tensors())
    like = SketchLayer(300, 24, Sketch(min_tokens=0).serves)
    like.query_heads = layer.query_heads
    assert auto.cache_bytes(like, layer.keys) == taken > layer.keys.nbytes * 2


@torch.no_grad()
def decode(model, cache, steps: int = 12) -> torch.Tensor:
    """The logits of greedy steps after a prefill."""
    out = [model(IDS, past_key_values=cache).logits[:, -1:]]
    for _ in range(steps):
        out.append(model(out[-1].argmax(-1), past_key_values=cache).logits)
    return torch.cat(out, 1)


def memory_of(total: int, cache):
    """`free_memory` of a machine with `total` bytes that holds a cache alone."""

    def free_memory(device: torch.device) -> int:
        made = [layer for layer in cache.layers if layer.is_initialized]
        return total - sum(tensor.nbytes for layer in made for tensor in layer.tensors())

    return free_memory


@pytest.mark.parametrize("fit", [0, 1, 2, 3])
def test_as_many_layers_have_codes_as_there_is_room_for(fit, candidates, monkeypatch, recwarn):
    candidates(auto.RoomySketch(min_tokens=0))
    model = tiny_model(num_hidden_layers=3)
    with attnplug.applied(model, "dense"):
        plain = attnplug.make_cache(model, 300)
        wanted = decode(model, plain)
    with attnplug.applied(model, "auto"):
        cache = attnplug.make_cache(model, 300)
        keys = plain.layers[0].keys
        like = SketchLayer(300, 24, Sketch(min_tokens=0).serves)
        like.query_heads = 4
        codes = auto.cache_bytes(like, keys) - 2 * keys.nbytes
        total = 3 * 2 * keys.nbytes + fit * codes + codes // 2
        monkeypatch.setattr(auto, "free_memory", memory_of(total, cache))
        found = decode(model, cache)
    assert [layer.codes is not None for layer in cache.layers] == [False] * (3 - fit) + [True] * fit
    assert 0 <= auto.free_memory(CPU) <= codes // 2  # what audits count takes a little
    told = [str(each.message) for each in recwarn if each.category is RuntimeWarning]
    assert len(told) == (fit < 3) and all("300 tokens find no room on cpu" in x for x in told)
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.filterwarnings("ignore:auto. some layers decode by dense:RuntimeWarning")
def test_a_cache_without_room_is_dense_where_a_budget_would_be_felt(candidates, monkeypatch):
    """Through a reset to another batch, a crop and a reorder too."""
    candidates(auto.RoomySketch(k=8, min_tokens=0))
    model = tiny_model(max_position_embeddings=2048)
    ids = torch.randint(2, 90, (2, 1000), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def run(cache) -> torch.Tensor:
        model(ids[:1, :900], past_key_values=cache)
        cache.reset()
        model(ids, past_key_values=cache)
        cache.crop(-20)
        for layer in cache.layers:
            layer.reorder_cache(torch.tensor([1, 0]))
        return model(ids[:, :1], past_key_values=cache).logits

    with attnplug.applied(model, "dense"):
        wanted = run(attnplug.make_cache(model, 1100))
    with attnplug.applied(model, "auto"):
        felt = run(attnplug.make_cache(model, 1100))
        cache = attnplug.make_cache(model, 1100)
        room = iter([None, None, *[0] * 9])  # for the first batch, of one row
        monkeypatch.setattr(auto, "free_memory", lambda device: next(room))
        found = run(cache)
    assert torch.equal(found, wanted) and not torch.equal(felt, wanted)
    assert all(layer.codes is layer.basis is layer.recent is None for layer in cache.layers)


def test_layers_that_come_after_are_those_of_the_same_device_and_kind():
    found = find_attention_layers(tiny_model(num_hidden_layers=5))
    elsewhere = dataclasses.replace(found[2].shape, device=CUDA)
    found[2] = dataclasses.replace(found[2], shape=elsewhere)
    found[3] = dataclasses.replace(found[3], kind="sliding")
    make = LayerMaker([(layer, Binding(parse("gather"), "", "sdpa")) for layer in found])
    assert [make(index, 64).layers_behind for index in (0, 1, 2, 4)] == [2, 1, 0, 0]


def test_below_the_crossover_the_tokens_are_those_of_the_stock_model(candidates):
    model = tiny_model()
    options = {"max_new_tokens": 12, "do_sample": False, "disable_compile": True}
    wanted = model.generate(IDS, **options)
    candidates(auto.RoomySketch(k=1, min_tokens=64), Gather())
    with attnplug.applied(model, "auto"):
        assert "decode sketch(k=1, min_tokens=64); " in str(attnplug.report(model))
        assert torch.equal(model.generate(IDS, **options), wanted)


def test_chosen_sketch_runs_in_generate_and_compiled_steps(candidates):
    """One graph, and the tokens of dense from a budget that covers the text."""
    candidates(auto.RoomySketch(min_tokens=0))
    model = tiny_model()
    options = {"max_new_tokens": 12, "do_sample": False, "disable_compile": True}
    wanted = model.generate(IDS, **options)
    torch._dynamo.reset()
    with attnplug.applied(model, "auto"), torch.no_grad():
        out = model.generate(IDS, return_dict_in_generate=True, **options)
        assert torch.equal(out.sequences, wanted)
        assert all(layer.is_fitted for layer in out.past_key_values.layers)
        step = torch.compile(model, backend="eager", fullgraph=True)
        cache, again = (attnplug.make_cache(model, 80) for _ in range(2))
        for each in (cache, again):
            model(IDS, past_key_values=each)
        for token in range(4):
            ids = torch.full((2, 1), token + 3)
            found = step(ids, past_key_values=cache).logits
            eager = model(ids, past_key_values=again).logits
            assert (found - eager).abs().max() < 1e-4 * eager.abs().max()
    torch._dynamo.reset()


def test_a_cache_made_in_compiled_code_does_not_look_at_memory(candidates, free):
    candidates(auto.RoomySketch(min_tokens=0))
    model = tiny_model()
    torch._dynamo.reset()
    with attnplug.applied(model, "auto"), torch.no_grad():
        cache = attnplug.make_cache(model, 80)
        free(0)
        step = torch.compile(model, backend="eager", fullgraph=True)
        wanted = model(IDS).logits
        found = step(IDS, past_key_values=cache).logits
    torch._dynamo.reset()
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert all(layer.codes is not None for layer in cache.layers)


def test_report_says_what_was_chosen_and_why():
    model = tiny_model(max_position_embeddings=131072)
    with attnplug.applied(model, "auto"):
        assert str(attnplug.report(model)) == (
            "policy auto\nlayers 0-1 (full): prefill momo, decode dense; momo: dense in prefills "
            "below 65,536 tokens; density 6.7% at 131,072; auto: prefill by momo, faster on long "
            "prompts, and our tasks at 32K were answered as by dense; auto: decode by dense, not "
            "sketch (slower than dense on a CPU at every length that was tried)\n"
            "continuous batching: momo serves prompts that come whole, dense serves pieces"
        )
    with attnplug.applied(tiny_model(), "auto(quality='fast')") as model:
        line = str(attnplug.report(model)).splitlines()[1]
    assert "prefill momo, decode dense; momo: dense in prefills below 65,536 tokens" in line
    assert "auto: decode by dense, not gather (its pages of 16 were not timed on a CPU)" in line


def test_layers_of_a_mapping_choose_for_themselves():
    policies = {0: "auto", "1": "momo+auto(quality='fast')"}
    with attnplug.applied(tiny_model(num_hidden_layers=3), policies) as model:
        report = attnplug.report(model)
    assert report.policy == "{0: auto, 1: prefill=momo, decode=auto(quality='fast')}"
    assert [layer.prefill for layer in report.layers] == ["momo", "momo", "sdpa (dense)"]
    assert "not sketch" in report.layers[0].reason and "not gather" in report.layers[1].reason
    assert "auto" not in report.layers[2].reason


@pytest.mark.parametrize("text", ["auto", "auto(quality='fast')", "auto+stream"])
def test_a_policy_is_its_text(text):
    policy = parse(text)
    assert str(policy) == text and parse(str(policy)) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_a_model_that_was_saved_whole_keeps_what_was_chosen(candidates):
    candidates(auto.RoomySketch(min_tokens=0))
    with attnplug.applied(tiny_model(), "auto") as model:
        again = pickle.loads(pickle.dumps(model))
        assert str(attnplug.report(again)) == str(attnplug.report(model))
        layer = attnplug.make_cache(again, 64).layers[0]
    assert type(layer) is auto.RoomySketchLayer


@pytest.mark.parametrize("quality", ["best", None, 3, ["fast"]])
def test_an_unknown_quality_is_refused(quality):
    with pytest.raises(PolicyError, match=r"auto: quality=.*, needs 'faithful' or 'fast'"):
        Auto(quality)


def test_an_unknown_option_is_refused():
    with pytest.raises(PolicyError, match="auto has no option 'k'; it has quality"):
        parse("auto(k=3)")


@pytest.mark.parametrize("queries", [1, 40])
def test_attend_without_a_layer_is_that_of_the_chosen_method(queries):
    x = make_inputs(batch=2, heads_q=4, heads_kv=2, queries=queries, keys=40)
    call = AttentionCall(x.q, x.k, x.v, scale=x.scale)
    assert torch.equal(Auto().attend(call), Dense().attend(call))


def rows_of(policy: Policy) -> list[dict]:
    """Committed rows of quality that a policy has, its crossover aside: one of each question, that
    of the table of all defaults where it is there."""
    found = {}
    for path in sorted(ROWS.glob("eval*.json")):
        for row in json.loads(path.read_text())["rows"]:
            named = row["policy"].replace("(min_tokens=0)", "").replace(", min_tokens=0", "")
            if named == str(policy) and row.get("diff_low") is not None:
                question = row["model"], row["task"], row["n"]
                if question not in found or "study" not in row:
                    found[question] = row
    return list(found.values())


def outside(row: dict, rows: int) -> bool:
    """Whether a row's paired difference from dense is a loss, by its interval as wide as that of
    the first of so many rows must be (Bonferroni): one in forty intervals of 0.95 is below none by
    chance, and there are dozens."""
    wider = NormalDist().inv_cdf(1 - 0.025 / rows) / NormalDist().inv_cdf(0.975)
    if "perplexity" in row["task"]:
        return row["diff"] - wider * (row["diff"] - row["diff_low"]) > 0
    return row["diff"] + wider * (row["diff_high"] - row["diff"]) < 0


def test_faithful_takes_what_no_committed_row_puts_outside_dense_and_leaves_out_the_rest():
    def losses(policy: Policy) -> list[dict]:
        rows = rows_of(policy)
        assert len(rows) > 4
        return [row for row in rows if outside(row, len(rows))]

    assert losses(Policy(prefill=Momo(top_k=128, delta=0.5, tail=0)))
    assert losses(Policy(decode=Gather(scoring="bounds")))
    assert not losses(Policy(decode=Gather()))
    assert not losses(Policy(decode=Sketch()))
    assert set(TASKS) <= {row["task"] for row in rows_of(Policy(decode=Sketch()))}
    of_momo = losses(Policy(prefill=Momo()))
    assert any(row["n"] < auto.MEASURED_TOKENS for row in of_momo)  # where auto's momo is dense
    assert all(row["n"] < auto.MEASURED_TOKENS for row in of_momo)
    served = [r for r in rows_of(Policy(prefill=Momo())) if r["n"] >= auto.MEASURED_TOKENS]
    assert set(TASKS) <= {row["task"] for row in served}


def test_faithful_reads_no_part_of_a_prompt_shorter_than_those_that_were_measured():
    (faithful,), (fast,) = (auto.CANDIDATES[name]["prefill"] for name in ("faithful", "fast"))
    kinds = ("cuda", "cpu")
    assert [faithful.method.measured_crossover(kind) for kind in kinds] == [32768, 65536]
    assert [fast.method.measured_crossover(kind) for kind in kinds] == [16384, 65536]
    assert str(faithful.method) == str(fast.method) == "momo"


@pytest.mark.gpu
def test_free_memory_counts_what_torch_keeps(monkeypatch):
    device = torch.device("cuda")
    block = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    told = torch.cuda.mem_get_info(device)  # other processes of the suite take some, too
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: told)
    before = auto.free_memory(device)
    del block
    after = auto.free_memory(device)
    total = torch.cuda.mem_get_info(device)[1]
    assert before is not None and after is not None
    assert before + (1 << 28) <= after <= total
