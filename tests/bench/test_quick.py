"""`attnplug bench --quick`, at tiny sizes on the CPU: what it runs, writes and says."""

import functools
import json
import weakref

import pytest
import torch
from typer.testing import CliRunner

from attnplug.bench import command, quick, timing
from attnplug.bench.provenance import KEYS
from attnplug.bench.rows import make_row
from attnplug.bench.timing import quantiles, time_on_cpu
from attnplug.cli import app
from attnplug.models.cache import PlugLayer
from attnplug.policies import AttentionCall, Dense, methods, tuned
from attnplug.policies.crossover import NEVER

runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
HEADS = quick.Heads(4, 2, 64)
TINY = quick.Plan("cpu", (192,), (256,), 2, torch.float32)


def test_the_command_writes_rows_a_plot_and_a_table(tmp_path, monkeypatch):
    monkeypatch.setitem(quick.PLANS, "cpu", TINY)
    monkeypatch.setattr(command, "heads_of", lambda model: HEADS)
    result = runner.invoke(app, ["bench", "--quick", "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "CPU, the ops' references, no GPU kernel" in result.output
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (tmp_path / "speed.png").stat().st_size > 5000
    decodes = ["dense", *(f"{name}(min_tokens=0)" for name in ("gather", "gvr", "sketch"))]
    wanted = [*decodes, "certified(min_tokens=0)", "momo(min_tokens=0)"]
    assert [row["policy"] for row in rows] == wanted
    for row in rows:
        assert list(row) == [*KEYS, "policy"]
        assert row["ratio"] == pytest.approx(row["peer_p50_us"] / row["p50_us"])
        assert row["p50_us"] > 0 and row["policy"] in result.output
        assert (row["gpu"], row["peer"], row["ceiling_fraction"]) in {
            (rows[0]["gpu"], "sdpa", None)
        }
        assert row["options"].endswith("cpu")


def test_the_command_tells_from_where_on_methods_serve(tmp_path, monkeypatch):
    monkeypatch.setitem(quick.PLANS, "cpu", TINY)
    monkeypatch.setattr(command, "heads_of", lambda model: HEADS)
    monkeypatch.setattr(command, "measure", lambda *_: iter([]))
    monkeypatch.setattr(command, "draw", lambda *_: None)
    monkeypatch.setenv(tuned.PATH, str(tmp_path / "crossovers.json"))
    kept = {"gather": {"row": 300, "alone": 700}, "sketch": {"row": NEVER, "alone": NEVER}}
    tuned.keep(torch.device("cpu"), "4/2x64", "2026-01-02", kept)
    result = runner.invoke(app, ["bench", "--quick", "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    day = "as measured on this machine on 2026-01-02"
    assert f"gather serves from 700 tokens on, {day}\n" in result.output
    assert f"sketch serves at no length, {day}\n" in result.output
    assert "gvr serves from 524,288 tokens on, by default\n" in result.output
    assert "certified serves at no length, by default\n" in result.output
    assert "momo serves from 65,536 tokens on, by default\n" in result.output


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", quick.DECODES)
def test_a_step_runs_the_method_and_sees_the_tokens(name, batch, monkeypatch):
    """Not the dense attention that methods fall back to; its cache holds every token."""
    method = methods()[name](**({} if name == "dense" else {"min_tokens": 0}))
    call, k, v = quick.decode_call(HEADS, TINY, 192, method, 0, batch)
    assert len(call.q) == len(k) == batch
    assert call.lengths is not None and call.lengths.item() == call.k.shape[2] == 192
    wanted = quick.attend_by_torch("sdpa", call.q, k, v, call.scale, False)
    if name == "sketch":  # its basis is made of a prompt's queries
        assert call.state.is_fitted and call.state.recent is not None
    if name != "dense":
        monkeypatch.setattr(Dense, "attend", lambda self, call: pytest.fail("dense ran"))
    # The budgets hold this many tokens, or estimate them; INT8 and INT4 make the rest.
    torch.testing.assert_close(method.attend(call), wanted, atol=0.05, rtol=0)


@pytest.mark.parametrize("name", ["dense", "gather", "sketch"])
def test_steps_go_through_caches_by_what_a_step_reads(name, monkeypatch):
    """A few MB of 268 at 128K: one such cache would stay in the L2 from step to step."""
    method = methods()[name](**({} if name == "dense" else {"min_tokens": 0}))
    keys = torch.empty(1, 4, 131072, 128, dtype=torch.bfloat16, device="meta")
    layer = method.cache_layer(131072) or PlugLayer(max_cache_len=131072)
    layer.lazy_initialization(keys[:, :, :0], keys[:, :, :0])
    call = AttentionCall(keys[:, :, :1], layer.keys, layer.values, 0.1, state=layer)
    kv_bytes = 2 * keys.nbytes
    monkeypatch.setattr(quick, "decode_call", lambda *_: (call, keys, keys))

    def sets_within(free: int) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, free))
        made = quick.rotated_calls(quick.Heads(), quick.PLANS["cuda"], 131072, method)
        return len(list(made))

    read = quick.read_bytes(method, call, kv_bytes)
    beside = sum(t.nbytes for t in layer.tensors()) - kv_bytes
    if name == "dense":
        assert read == kv_bytes and sets_within(64 << 30) == 1
    else:
        assert 0 < beside < read < kv_bytes / 10
        assert read - beside == 2048 * method.kept  # keys and values of four heads
        assert sets_within(64 << 30) * read >= 180 << 20
    assert sets_within(0) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --quick"),
        (("--quick", "--device", "abacus"), "device is 'abacus', needs cuda or cpu"),
        (("--quick", "--device", "cuda"), "torch sees no GPU here; --device cpu times"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_code_2(arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = runner.invoke(app, ["bench", *arguments])
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_a_models_heads_are_its_configs(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=3).save_pretrained(
        tmp_path
    )
    assert command.heads_of(str(tmp_path)) == quick.Heads(6, 3, 16)
    assert command.heads_of(None) == quick.Heads(28, 4, 128)
    result = runner.invoke(
        app, ["bench", "--quick", "--device", "cpu", "--model", str(tmp_path / "none")]
    )
    assert result.exit_code == 1 and "has no config" in result.stderr


def test_the_peers_times_are_called_in_turn():
    heard = []
    sides = [[lambda: heard.append("a")] * 2, [lambda: heard.append("b")]]
    samples = time_on_cpu(sides, rounds=3)
    assert "".join(heard) == "aab" * 4 and [len(found) for found in samples] == [3, 3]
    assert quantiles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (2.0, 3.5, 5.0)


def test_a_row_has_a_peer_and_its_times_or_neither():
    shape = dict(op="x", case="op", n=1, batch=1, heads_q=1, heads_kv=1, head_dim=1, dtype="float")
    with pytest.raises(ValueError, match="come together"):
        make_row(**shape, times_us=[1.0], bytes=1, flops=1, peer="sdpa")


def test_what_a_graph_reads_and_writes_lives_as_long_as_it(monkeypatch):
    """Else it writes where other tensors are by then."""
    monkeypatch.setattr(timing, "capture", lambda run, on: lambda: None)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    x = torch.zeros(4)
    replay, alive = timing.runner([functools.partial(x.add_, 1)]), weakref.ref(x)
    del x
    assert alive() is not None
    del replay
    assert alive() is None
