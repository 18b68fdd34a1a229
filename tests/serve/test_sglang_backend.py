"""The backend that SGLang sees, over stand-ins: batches as its scheduler makes them, eagerly and by
CUDA graphs, give what fp64 attention of each row gives, and what attnplug gives in transformers."""

import random

import pytest
import sglang_stand_in as stand_in
import torch
from sglang_cases import FP8, HEADS, KV_HEADS, LONGEST, WIDTH, Graph, Server

import attnplug
from attnplug import Gather, Momo
from attnplug.errors import ServeError
from attnplug.ops.gather.page_bounds import page_summaries
from attnplug.policies._gather_layers import GatherLayer
from attnplug.serve.sglang.backend import attention_layers
from attnplug.testing import tiny_model

COVERING = "momo(min_tokens=64, top_k=512)+gather(min_tokens=100)"
SMALL = "gather(k=1, sink=1, local=1, min_tokens=100)"
CLOSE = 2e-6  # float32's own error on these sums is 1e-6


def stale(server: Server) -> int:
    """How many of the whole blocks that requests have keys in are summarised as other keys are."""
    found = 0
    for layer in server.attentions:
        served = server.backend.layers[layer.layer_id]
        phase, k = served.phases.decode, server.backend._pages(layer)[0]
        slots = torch.cat(
            [
                server.requests.req_to_token[r + 1, : n - n % phase.block]
                for r, n in enumerate(server.seen)
            ]
        )
        fresh = phase.page_state(k)
        phase.note_pages(k, fresh, slots)
        blocks = (slots[:: phase.block] // phase.block).long()
        kept, made = (page_summaries(x, k, phase.block) for x in (served.state.of(k), fresh))
        for now, want in zip(kept, made, strict=True):
            now, want = (x.movedim(2, 1).flatten(0, 1)[blocks] for x in (now, want))
            found += int((now != want).flatten(1).any(1).sum())
    return found


def draw_schedule(server: Server, draw: random.Random, rounds: int) -> torch.Tensor:
    """Batches of every kind: prefix hits, chunks, mixed chunks, steps of uneven lengths by graphs
    and without, and requests that end and give their pages to others. Returns the largest error."""
    goals, worst = {}, torch.tensor(0.0)
    graph = None
    for _ in range(rounds):
        idle = [r for r in range(len(server.seen)) if r not in goals]
        if idle and (not goals or draw.random() < 0.4):
            request = draw.choice(idle)
            others = [r for r, n in enumerate(server.seen) if n > server.page and r != request]
            if others and draw.random() < 0.6:
                other = draw.choice(others)
                server.share(request, other, draw.randint(1, server.seen[other]))
            goals[request] = min(LONGEST - 40, server.seen[request] + draw.randint(1, 220))
        prompts = [(r, goals[r] - server.seen[r]) for r in goals if server.seen[r] < goals[r]]
        steps = [r for r in goals if server.seen[r] >= goals[r]]
        if prompts:
            parts = [(r, min(n, draw.choice([1, 30, 64, 96]))) for r, n in prompts]
            mixed = [(r, 1) for r in steps] if draw.random() < 0.7 else []
            error = server.error([*parts, *mixed], "MIXED" if mixed else "EXTEND")
        elif draw.random() < 0.5 and len(steps) <= 4:
            if graph is None:
                server.backend.init_cuda_graph_state(4, 4)
                graph = Graph(server, 4)
            error = graph.replay(steps)
        else:
            error = server.error([(r, 1) for r in steps])
        worst = torch.maximum(worst, error.max())
        for request in steps:
            if server.seen[request] > goals[request] + 12 or draw.random() < 0.1:
                server.leave(request)
                del goals[request]
    return worst


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("policy", [COVERING, "gather(min_tokens=100)"])
def test_batches_of_every_kind_give_attention(policy, page_size):
    for seed in range(3):
        server = Server(policy, page_size)
        assert draw_schedule(server, random.Random(seed), 40) < CLOSE
        assert stale(server) == 0


@pytest.mark.parametrize("policy", [COVERING, "dense"])
def test_an_fp8_cache_is_read_with_each_layers_scales(policy):
    """The first layer has scales, the second none. SGLang divides keys by them in place, so that a
    prompt's own are no longer what they were."""
    server = Server(policy, 64, cache=FP8)
    assert server.backend._pages(server.attentions[0]).fp8
    assert draw_schedule(server, random.Random(1), 40) < CLOSE
    assert policy == "dense" or stale(server) == 0
    server.backend.warm()


def test_scales_that_are_numbers_on_the_host_are_refused():
    """What `--quantization-param-path` makes of them."""
    with pytest.raises(ServeError, match="drop it, as a checkpoint's own are read"):
        Server("momo", 64, layer={"k_scale": 0.5, "v_scale": 0.5})


@pytest.mark.parametrize("policy", ["momo(min_tokens=64, top_k=512)", "dense"])
def test_prompts_alone_need_no_pages_of_a_certain_size(policy):
    server = Server(policy, page_size=1)
    assert draw_schedule(server, random.Random(0), 40) < CLOSE


def test_each_row_is_served_by_what_should_serve_it():
    server = Server(COVERING, layers=1)
    base = server.backend.served

    def calls(parts, mode=""):
        base.clear()
        assert server.error(parts, mode).max() < CLOSE
        return list(base)

    assert calls([(0, 200)]) == []  # momo's
    assert calls([(1, 40)]) == ["extend 40"]
    assert calls([(0, 64), (2, 30), (3, 20)]) == ["extend 50"]  # a chunk beside short prompts
    assert calls([(2, 8), (3, 9)]) == ["extend 17"]
    assert calls([(0, 1), (1, 1)]) == []  # a far row, and a near one that gather reads whole
    assert calls([(1, 1), (2, 1)]) == []  # the rule decides on the device
    assert calls([(2, 40), (0, 1), (1, 1)], "MIXED") == ["extend 40"]  # steps are gather's
    assert calls([(3, 30), (1, 1)], "MIXED") == ["extend 31"]  # no row is far
    assert calls([(0, 64), (1, 1)], "MIXED") == ["extend 1"]


def test_small_budgets_leave_keys_out_of_far_rows_alone():
    server = Server(SMALL)
    server.backend.init_cuda_graph_state(4, 4)
    graph = Graph(server, 4)
    server.error([(0, 300)])
    server.error([(1, 60)])
    for step in (
        lambda: server.error([(0, 1), (1, 1)]),
        lambda: graph.replay([0, 1]),
        lambda: server.error([(2, 50), (0, 1), (1, 1)], "MIXED")[:, 1:],
    ):
        far, near = step().unbind(1)
        assert (far > 1e-2).all() and (near < CLOSE).all()
    assert stale(server) == 0


def test_a_graph_of_few_rows_that_cannot_be_far_is_flash_attentions(monkeypatch):
    """Alone no row is far before the longest request's end. Of two rows each can."""
    monkeypatch.setattr(Gather, "measured_crossover", lambda *_: 600)
    monkeypatch.setattr(Gather, "measured_row_crossover", lambda *_: 100)
    server = Server("gather(k=1, sink=1, local=1)", layers=1)
    server.backend.init_cuda_graph_state(2, 2)
    server.error([(0, 400)])
    server.error([(1, 390)])
    graphs, base = [Graph(server, 1), Graph(server, 2)], server.backend.served
    base.clear()
    assert graphs[0].replay([0]).max() < CLOSE and base == ["decode 1"]
    base.clear()
    assert graphs[1].replay([0, 1]).min() > 1e-2 and base == []
    assert graphs[1].replay([1]).max() < CLOSE and base == []  # the other row pads the graph
    assert stale(server) == 0


def test_a_layer_that_cannot_be_served_is_left_dense():
    server = Server(COVERING, layer={"sliding_window_size": 40})
    for parts in ([(0, 200)], [(0, 1)], [(1, 30), (0, 1)]):
        assert server.error(parts, "EXTEND" if len(parts) > 1 else "").max() < CLOSE
    kinds = server.backend.layers
    assert not kinds[0].phases.sparse and "a sliding window" in kinds[0].why
    assert kinds[1].phases.sparse and not kinds[1].why


@pytest.mark.parametrize(
    "change, why",
    [
        ({"attn_type": stand_in.AttentionType.ENCODER_ONLY}, "no decoder self-attention"),
        ({"attn_type": stand_in.AttentionType.DECODER_BIDIRECTIONAL}, "no decoder self-attention"),
        ({"is_cross_attention": True}, "another sequence's keys"),
        ({"v_head_dim": 32}, "values of another width"),
        ({"xai_temperature_len": 1024}, "a temperature by position"),
        ({"pos_encoding_mode": "ALIBI"}, "positions inside"),
        ({"logit_cap": 30.0, "logit_capping_method": "other"}, "a softcap other than"),
        ({"head_dim": 72, "v_head_dim": 72}, "head dimension 72"),
    ],
)
def test_why_a_layer_is_left_dense(change, why):
    kinds = Server("momo(min_tokens=64)", layer=change).backend.layers
    assert not kinds[0].phases.sparse and why in kinds[0].why
    assert kinds[1].phases.sparse


def test_spans_of_layers_have_their_own_policy():
    server = Server({"policy": COVERING, "layers": {"0": "dense"}})
    assert server.error([(0, 200)]).max() < CLOSE
    assert server.error([(0, 1)]).max() < CLOSE
    assert server.backend.served == ["extend 200", "decode 1"]  # layer 0's


@pytest.mark.parametrize("page_size, asked", [(1, 64), (8, 64), (48, 128)])
def test_pages_that_hold_no_whole_blocks_are_refused_with_the_option(page_size, asked):
    policy = f"gather(block={128 if asked == 128 else 16}, min_tokens=100)"
    with pytest.raises(ServeError, match=f"a page has {page_size}; add --page-size {asked}"):
        Server(policy, page_size)


def test_a_policy_that_no_request_is_long_enough_for_needs_no_pages(caplog):
    with caplog.at_level("INFO", logger="sglang.attnplug"):
        server = Server("gather(min_tokens=4096)", page_size=1)
    assert "2 layers: prefill dense, decode dense (gather serves from 4,096 tokens" in caplog.text
    assert server.error([(0, 80)]).max() < CLOSE and server.error([(0, 1)]).max() < CLOSE


def test_what_the_summaries_take_is_said(caplog):
    with caplog.at_level("INFO", logger="sglang.attnplug"):
        Server(COVERING)
    assert "prefill momo" in caplog.text and "outside of --mem-fraction-static" in caplog.text


def test_keys_that_something_else_wrote_are_read_from_the_pages_and_noted():
    """As models do whose rotary kernel writes the cache: what they hand on may be anything."""
    server = Server(COVERING, layers=1)
    layer, backend = server.attentions[0], server.backend
    assert backend.get_fused_kv_write_buffers(layer, None) is None

    def written(parts, mode):
        batch, (q, k, v) = server.batch(parts, mode), server.inputs(parts, 0)
        backend.token_to_kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        backend.init_forward_metadata(batch)
        forward = backend.forward_decode if mode == "DECODE" else backend.forward_extend
        nothing = torch.full_like(k, torch.nan)
        out = forward(q.flatten(1), nothing, nothing, layer, batch, save_kv_cache=False)
        error = (out - server.exact(parts, 0)).abs().max()
        server.done(parts)
        return error

    assert written([(0, 160)], "EXTEND") < CLOSE
    assert written([(0, 100), (1, 30)], "EXTEND") < CLOSE
    assert written([(0, 1), (1, 1)], "DECODE") < CLOSE
    assert stale(server) == 0 and server.backend.served == ["extend 30"]


def test_the_output_goes_where_a_breakable_graph_wants_it():
    server = Server(COVERING, layers=1)
    layer, backend = server.attentions[0], server.backend
    server.error([(1, 120)])
    parts = [(0, 100), (2, 20), (1, 1)]
    batch, (q, k, v) = server.batch(parts, "MIXED"), server.inputs(parts, 0)
    batch._attn_output = torch.full((121, HEADS * WIDTH), torch.nan)
    backend.init_forward_metadata(batch)
    out = backend.forward_extend(q.flatten(1), k, v, layer, batch)
    assert out.data_ptr() == batch._attn_output.data_ptr()
    assert (out - server.exact(parts, 0)).abs().max() < CLOSE


def test_what_only_flash_attention_knows_is_left_to_it():
    server = Server(COVERING, layers=1)
    server.run([(0, 200)], score_mod=object())
    server.done([(0, 200)])
    assert server.backend.served == ["extend 200"]
    server.run([(0, 1)], return_lse=True)
    server.done([(0, 1)])
    assert server.backend.served == ["extend 200", "decode 1"]
    assert stale(server) == 0  # and what they wrote is known
    server.run([(0, 1)], q_rope=None, return_lse=False)
    assert len(server.backend.served) == 2


def test_sinks_come_with_a_call():
    server, sinks = Server(COVERING, layers=1), torch.randn(HEADS)
    parts = [(0, 150)]
    for parts in ([(0, 150)], [(0, 1)]):
        plain, (out,) = server.exact(parts, 0), server.run(parts, sinks=sinks)
        n, last = parts[0][1], server.seen[0] + parts[0][1]
        q, k = server.draw(0, 0, 0, last - n, last), server.draw(1, 0, 0, 0, last)
        k = k.repeat_interleave(HEADS // KV_HEADS, 1)
        scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * WIDTH**-0.5
        at = torch.arange(last - n, last)[:, None] - torch.arange(last)
        lse = scores.masked_fill(at < 0, -torch.inf).logsumexp(-1)  # [Hq, n]
        share = (lse - sinks.double()[:, None]).sigmoid().T[..., None]  # of what is no sink
        want = (plain.view(n, HEADS, WIDTH) * share).flatten(1)
        assert (out - want).abs().max() < CLOSE
        server.done(parts)
    assert server.backend.served == []


def test_a_step_that_nobody_prepared_is_no_silent_dense_one():
    server = Server(COVERING, layers=1)
    server.error([(0, 200)])
    batch = server.batch([(0, 1)], "DECODE")
    server.backend.init_forward_metadata(batch)
    server.backend._forget()
    q, k, v = server.inputs([(0, 1)], 0)
    with pytest.raises(ServeError, match="a step of 1 rows comes, and 0 were prepared"):
        server.backend.forward_decode(q.flatten(1), k, v, server.attentions[0], batch)


def test_an_embedding_model_that_keeps_no_keys_is_refused(monkeypatch):
    start = stand_in.FlashAttentionBackend.__init__

    def skips(self, runner):
        start(self, runner)
        self.fa_skip_kv_cache = True

    monkeypatch.setattr(stand_in.FlashAttentionBackend, "__init__", skips)
    with pytest.raises(ServeError, match="writes no pages"):
        Server(COVERING)


def test_warming_runs_each_kind_of_layer_once(monkeypatch):
    server, called = Server(COVERING, chunked_prefill_size=128), []
    for index, served in server.backend.layers.items():
        for name in ("warm_prompts", "warm_steps"):
            monkeypatch.setattr(
                served, name, lambda *a, kind=(index, name), **o: called.append((*kind, a, o))
            )
    server.backend.warm()
    shape = dict(heads=HEADS, kv_heads=KV_HEADS, head_dim=WIDTH, dtype=torch.float32)
    shape["device"] = torch.device("cpu")
    assert called == [
        (0, "warm_prompts", (128, LONGEST), shape),
        (0, "warm_steps", (6, LONGEST), shape | {"page": 32, "fp8": False, "scaled": False}),
    ]


def test_layers_are_found_by_what_radix_attention_has():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), stand_in.RadixAttention(4, 64, 1.0, 2, 7))
    assert [each.layer_id for each in attention_layers(model)] == [7]


def test_it_gives_what_transformers_gives(monkeypatch):
    """A prompt and a step of a model under attnplug.apply, with budgets that leave keys out, and
    the same queries, keys and values on SGLang's pages."""
    policy = (
        "momo(gamma=8, block=16, query_block=32, top_k=3, tail=0, min_tokens=0)"
        "+gather(k=2, sink=1, local=1, bounds='exact', min_tokens=0)"
    )
    model, seen = tiny_model(), {}
    for method in (Momo, Gather):

        def attend(self, call, stock=method.attend):
            out = stock(self, call)
            cache = call.k, call.v
            if isinstance(call.state, GatherLayer):  # the step's token is written then
                cache = call.state.keys.clone(), call.state.values.clone()
            seen.setdefault(self.name, (call, out.clone(), cache))
            return out

        monkeypatch.setattr(method, "attend", attend)
    attnplug.apply(model, policy)
    ids = torch.arange(300)[None] * 7 % 30 + 1  # 0 pads
    model.generate(ids, max_new_tokens=2, do_sample=False)
    prompt, step = seen["momo"], seen["gather"]
    call = prompt[0]
    heads, width = call.q.shape[1], call.q.shape[3]
    layer = stand_in.RadixAttention(heads, width, call.scale, call.k.shape[1], 0)
    server = Server(policy, layers=1)
    pool = stand_in.MHATokenToKVPool(2560, 32, 1, call.k.shape[1], width, torch.float32)
    server.runner.token_to_kv_pool, server.runner.model = pool, torch.nn.ModuleList([layer])
    backend = type(server.backend)(server.runner, stand_in.server_args(), server.policy)

    def run(first, last, q, cache):
        batch = server.batch([(0, last - first)], "EXTEND" if first == 0 else "DECODE")
        backend.init_forward_metadata(batch)
        k, v = (x[0, :, first:last].transpose(0, 1) for x in cache)
        forward = backend.forward_extend if first == 0 else backend.forward_decode
        out = forward(q[0].transpose(0, 1).flatten(1), k, v, layer, batch)
        server.done([(0, last - first)])
        return out.view(1, last - first, heads, width).transpose(1, 2)

    room = 4 * torch.finfo(torch.float32).eps
    for first, last, (call, want, cache) in ((0, 300, prompt), (300, 301, step)):
        found = run(first, last, call.q, cache)
        assert (found - want).abs().max() <= room * want.abs().max()
        k, v = (x[:, :, :last].double() for x in cache)
        mask = torch.ones(last - first, last, dtype=torch.bool).tril(first)
        dense = torch.nn.functional.scaled_dot_product_attention(
            call.q.double(), k, v, mask, scale=call.scale, enable_gqa=True
        )
        assert (found - dense).abs().max() > 1e-3 * dense.abs().max()  # keys were left out
    assert backend.served == []
