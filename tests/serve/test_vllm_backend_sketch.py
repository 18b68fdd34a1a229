"""sketch in the backend that vLLM sees, on a CPU: each key that is written has its code, whatever
batch it comes in, and far rows are sketch's."""

import types

import pytest
import torch
from vllm_backend_cases import HEADS, KV_HEADS, WIDTH, Layer

from attnplug.calibration.basis_file import Bases
from attnplug.errors import FileError, ServeError
from attnplug.ops import encode_pages
from attnplug.ops.sketch.model_basis import Moments, fit_model_basis
from attnplug.serve.paged.basis import Place, basis_of_rank

pytest.importorskip("vllm", reason="vLLM is not installed: scripts/vllm_cpu.sh")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def bases(backend, monkeypatch):
    """A basis of the model, without a model."""
    from attnplug.serve.vllm import impl

    eye = torch.eye(WIDTH).double()
    pairs = (eye.expand(n, -1, -1) for n in (KV_HEADS, HEADS))
    moments = Moments(torch.zeros(KV_HEADS, WIDTH).double(), *pairs)
    inv_freq = 0.8 ** torch.arange(WIDTH // 2)
    made = Bases("", "", inv_freq, {0: fit_model_basis(moments, inv_freq)})

    def basis_of(config, phases, layer_name, heads, device):
        place = Place(0, 1, heads, device)
        return None if phases.decode is None else basis_of_rank(made, 0, place, 512)

    monkeypatch.setattr(impl, "basis_of", basis_of)
    monkeypatch.setattr(impl, "check_basis", lambda config: made)
    return made


def test_batches_of_every_mixture_give_attention_and_code_their_keys(backend, monkeypatch, bases):
    layer = Layer(backend, monkeypatch, "momo(min_tokens=64, top_k=512)+sketch(min_tokens=100)")
    batches = [
        ([(0, 0, 90)], 0),  # a whole prompt, momo's
        ([(0, 90, 170), (1, 0, 50)], 0),  # a later chunk beside a short prompt
        ([(1, 50, 51), (0, 170, 230)], 0),  # a short row's step beside a chunk
        ([(0, 230, 231), (1, 51, 99)], 0),  # a far row's step beside a prompt that is dense
        ([(0, 231, 232), (1, 99, 100)], 0),
        ([(0, 232, 233), (1, 100, 101)], 2),  # as FULL graphs pad
    ]
    for batch, padding in batches:
        found = layer.step(batch, padding=padding)
        error = (found - layer.exact(batch)).abs().max()
        assert error < 2e-6, f"{batch}: {error}"
        page = layer.impl._pages(layer.layer, layer.cache)
        state, size = layer.impl.serving.state.of(page.k), page.k.shape[2]
        for row, _, last in batch:
            at = torch.arange(last)
            slots = layer.table[row, at // size].long() * size + at % size
            fresh = [torch.full_like(x, 77) for x in state.codes]
            encode_pages(page.k, page.v, state.basis.encoder, state.basis.turns, *fresh, slots, at)
            place = slots // size, slice(None), slots % size
            for own, wanted in zip(state.codes, fresh, strict=True):
                assert torch.equal(own[place], wanted[place]), batch


def test_a_server_without_a_basis_says_what_to_run(monkeypatch, tmp_path):
    from attnplug.serve.vllm import basis

    def none(folder, rope, name):
        raise FileError(f"{name} has no basis; run `attnplug calibrate {name}` once")

    monkeypatch.setattr(basis, "find", none)
    monkeypatch.setattr(basis, "checkpoint_folder", lambda name: tmp_path)
    facts = {"hf_text_config": types.SimpleNamespace(), "revision": None}
    model = types.SimpleNamespace(model="a/model", **facts)
    with pytest.raises(ServeError, match=r"sketch: a/model has no basis; run `attnplug calibrate"):
        basis.check_basis(types.SimpleNamespace(model_config=model))
    model.revision = "v2"  # whose weights may be others than those that were calibrated
    with pytest.raises(ServeError, match=r"--revision v2: .*give its folder to both commands"):
        basis.check_basis(types.SimpleNamespace(model_config=model))
    model.model = str(tmp_path)
    with pytest.raises(ServeError, match="has no basis"):
        basis.check_basis(types.SimpleNamespace(model_config=model))
