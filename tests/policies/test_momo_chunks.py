"""momo in chunks: bit for bit the unchunked result on the grid of query blocks, and the crossover
is that of the whole prefill."""

import dataclasses
import inspect
import types

import pytest
import torch

import attnplug
from attnplug import Momo
from attnplug.models.cache import PlugLayer
from attnplug.ops.momo import block_sparse_attention as attend
from attnplug.ops.momo import measure_blocks as measure
from attnplug.policies import AttentionCall, Dense
from attnplug.policies import momo as policy
from attnplug.testing.policy import tiny_model

MOMO = Momo(gamma=8, block=16, query_block=32, top_k=3, delta=0.5, tail=0, min_tokens=0)
TOKENS, ROOM = 235, 300


def interpreted(module: types.ModuleType, name: str):
    """An op as its launcher runs it, with the kernel interpreted."""
    public, launch = getattr(module, name), getattr(module, f"launch_{name}")
    schema = module.Call._fields
    defaults = {n: p.default for n, p in inspect.signature(public).parameters.items()}

    def call(*tensors, **options):
        given = defaults | dict(zip(schema, tensors, strict=False)) | options
        args = [given[n] for n in schema]
        outputs = module._allocate(*args)
        launch(*args, *(outputs if isinstance(outputs, tuple) else (outputs,)))
        return outputs

    return call


@pytest.fixture
def on_path(device_path, monkeypatch):
    """The device; on ("cpu", "kernel") momo's ops are their interpreted kernels."""
    if device_path == ("cpu", "kernel"):
        for module, name in ((measure, "measure_blocks"), (attend, "block_sparse_attention")):
            monkeypatch.setattr(policy, name, interpreted(module, name))
    return device_path[0]


def inputs(device: str, batch: int = 2) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(3)
    shapes = ((batch, 4, TOKENS, 64), (batch, 2, ROOM, 64), (batch, 2, ROOM, 64))
    return tuple(torch.randn(shape, generator=random).to(device) for shape in shapes)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's 0/0
# Padding of whole query blocks, which leaves the grid in place.
@pytest.mark.parametrize(("chunk", "padding"), [(32, 64), (96, 0), (96, 64), (224, 0)])
def test_chunks_on_the_grid_give_the_unchunked_bits(on_path, device_path, chunk, padding):
    q, k, v = inputs(on_path)
    mask = start = None
    if padding:
        mask = torch.ones(2, ROOM, dtype=torch.bool, device=on_path)
        mask[1, :padding] = False
        start = mask.int().argmax(-1).to(torch.int32)

    def run(first: int, last: int) -> torch.Tensor:
        length = torch.full((1,), last, device=on_path)
        options = dict(lengths=length, key_mask=mask, start=start)
        return MOMO.attend(AttentionCall(q[:, :, first:last], k, v, scale=0.125, **options))

    whole = run(0, TOKENS)
    parts = [run(at, min(at + chunk, TOKENS)) for at in range(0, TOKENS, chunk)]
    assert_same(torch.cat(parts, 2), whole, device_path)
    if not padding:  # an unchunked prefill has no slots behind its tokens
        alone = AttentionCall(q, k[:, :, :TOKENS], v[:, :, :TOKENS], scale=0.125)
        assert_same(MOMO.attend(alone), whole, device_path)


def assert_same(found: torch.Tensor, wanted: torch.Tensor, device_path: tuple[str, str]) -> None:
    """The kernels give the same bits. The reference multiplies the rows of a call at once, and BLAS
    rounds products of other sizes by other orders: it gives the same blocks, and the same sums but
    for a rounding of their largest term."""
    if device_path != ("cpu", "reference"):
        assert torch.equal(found, wanted)
    room = torch.finfo(torch.float32).eps * wanted.abs().max()
    assert (found - wanted).abs().max() <= room


@pytest.fixture
def dense_calls(monkeypatch):
    """Query tokens of each call that momo left to dense."""
    calls, keep = [], Dense.attend

    def attend(self, call):
        calls.append(call.q.shape[2])
        return keep(self, call)

    monkeypatch.setattr(Dense, "attend", attend)
    return calls


@pytest.mark.parametrize("limit, dense", [(200, []), (201, [64, 64, 64, 8])])
def test_the_crossover_is_that_of_the_whole_prompt(limit, dense, dense_calls, device):
    model = tiny_model(device=device, num_hidden_layers=1)
    ids = torch.randint(2, 97, (1, 200)).to(device)
    method = f"momo(gamma=8, block=16, query_block=32, top_k=3, tail=0, min_tokens={limit})"
    with attnplug.applied(model, method):
        out = model.generate(
            ids, max_new_tokens=1, prefill_chunk_size=64, return_dict_in_generate=True
        )
        assert dense_calls == dense
        assert all(layer.prefill_tokens == 0 for layer in out.past_key_values.layers)


def test_a_long_chunk_by_hand_counts_the_keys_that_it_sees(monkeypatch):
    monkeypatch.setattr(policy, "LEAST_CHUNK", 64)
    late = dataclasses.replace(MOMO, min_tokens=300)
    layer = PlugLayer(max_cache_len=512)
    q, k, v = inputs("cpu")
    call = AttentionCall(q[:, :, :64], k, v, scale=0.125, state=layer)
    layer.counted = 299
    assert late.is_short(call)
    layer.counted = 300
    assert not late.is_short(call)
    assert late.is_short(dataclasses.replace(call, q=q[:, :, :63]))
    assert late.is_short(dataclasses.replace(call, state=None))
