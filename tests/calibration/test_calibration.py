"""A model is measured as its keys are; its basis is kept in a file that is read back bit for bit,
and no other file passes for it."""

import json
import os
import random
import shutil
import stat
import struct
import types
from pathlib import Path

import pytest
import torch
from real_models import real_folder, real_model
from safetensors.torch import load_file, save, save_file
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
)
from typer.testing import CliRunner

from attnplug.calibration import basis_file, command, texts
from attnplug.calibration.basis_file import Bases
from attnplug.calibration.measure import frequencies, measure
from attnplug.cli import app
from attnplug.errors import FileError, UnsupportedModelError, WeightsUnavailableError
from attnplug.eval.capture import capture_layers
from attnplug.ops.sketch.model_basis import ModelBasis, turn
from attnplug.testing import tiny_model

SEEDS = 300


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNPLUG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    return path


def config_of(folder, **changes):
    config = LlamaConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def bases_of(folder, layers=(0, 3), width=64, rank=64, heads=2):
    numbers = torch.Generator().manual_seed(0)
    made = {
        layer: ModelBasis(
            torch.randn(heads, width + 1, rank, generator=numbers),
            torch.randn(heads, width, rank + 1, generator=numbers),
        )
        for layer in layers
    }
    inv_freq = 10000.0 ** (-torch.arange(width // 2) / (width // 2))
    rope = basis_file.rope_of(config_of(folder))
    return Bases(basis_file.weights_of(folder), rope, inv_freq, made)


def same(a: Bases, b: Bases) -> bool:
    tensors = zip(a.layers.values(), b.layers.values(), strict=True)
    equal = all(torch.equal(x, y) for pair in tensors for x, y in zip(*pair, strict=True))
    return equal and list(a.layers) == list(b.layers) and torch.equal(a.inv_freq, b.inv_freq)


def test_moments_are_those_of_keys_before_rope():
    """Of a tiny model: beside its projections, which no rope has turned yet."""
    model = tiny_model()
    ids = [torch.randint(2, 90, (400,), generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
    inv_freq, found = measure(model, [x.tolist() for x in ids])
    assert list(found) == [0, 1] and torch.equal(inv_freq, model.model.rotary_emb.inv_freq)
    before = {name: [] for name in ("q_proj", "k_proj")}
    layer = model.model.layers[1].self_attn
    hooks = [
        getattr(layer, name).register_forward_hook(lambda m, a, out, n=name: before[n].append(out))
        for name in before
    ]
    with torch.no_grad():
        for x in ids:
            model(x[None])
    for hook in hooks:
        hook.remove()
    q, k = (torch.cat([x[0, 128:] for x in before[name]]).double() for name in before)
    q, k = (x.unflatten(1, (-1, 64)).transpose(0, 1) for x in (q, k))
    own = found[1]
    assert torch.allclose(own.k_mean, k.mean(1), atol=1e-5)
    assert torch.allclose(own.k_pairs, k.mT @ k / k.shape[1], rtol=1e-4, atol=1e-4)
    assert torch.allclose(own.q_pairs, q.mT @ q / q.shape[1], rtol=1e-4, atol=1e-4)


def test_the_turn_is_that_of_the_model():
    """The first layer's keys of one token differ in their turn alone."""
    model = tiny_model()
    ids = torch.full((1, 300), 7)
    keys = capture_layers(model, ids, [0])[0].k[0]
    angles = -torch.arange(300).double()[:, None] * frequencies(model).double()
    still = turn(keys.double(), angles)
    assert torch.allclose(still, still[:, :1].expand_as(still), atol=1e-4)
    assert not torch.allclose(keys, keys[:, :1].expand_as(keys), atol=1e-1)


def test_what_cannot_be_measured_is_refused():
    config = CohereConfig(
        vocab_size=99, hidden_size=128, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, eos_token_id=1,
        bos_token_id=2,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="pairs of neighbouring channels"):
        measure(CohereForCausalLM(config).eval(), [[1] * 300])
    for head_dim in (16, 48):  # codes of pages have 64 coordinates or more
        narrow = tiny_model(head_dim=head_dim)
        with pytest.raises(UnsupportedModelError, match="sketch serves no layer of this model"):
            measure(narrow, [[1] * 300])


def letters(text: str, **_) -> types.SimpleNamespace:
    """A tokenizer that takes each letter for a token."""
    return types.SimpleNamespace(input_ids=[3 + ord(x) % 90 for x in text])


@pytest.mark.parametrize("kind", ["learned positions", "rope"])
def test_no_text_is_longer_than_the_model_reads(kind):
    """Learned positions have no more rows; a rope would turn keys as the model never saw them."""
    if kind == "rope":
        model, longest = tiny_model(), []
        model.config.max_position_embeddings = 300
    else:
        sizes = {"vocab_size": 99, "n_positions": 300, "n_embd": 128, "n_layer": 1, "n_head": 2}
        ids = {"bos_token_id": 1, "eos_token_id": 1}
        model, longest = GPT2LMHeadModel(GPT2Config(**sizes, **ids)).eval(), []
    model.base_model.register_forward_pre_hook(lambda _, args: longest.append(args[0].shape[1]))
    bases, read = command.make(model, letters, "0" * 16)
    assert bases.layers and max(longest) == 300 and read == 8 * 300
    model.config.max_position_embeddings = 128
    with pytest.raises(UnsupportedModelError, match="reads 128 tokens at most"):
        command.make(model, letters, "0" * 16)


def test_a_model_whose_keys_are_not_finite_has_no_basis():
    model = tiny_model()
    model.model.layers[1].self_attn.k_proj.weight.data[0] = torch.nan
    with pytest.raises(UnsupportedModelError, match=r"layer 1 of this model .* not finite"):
        command.make(model, letters, "0" * 16, 300)


def test_there_are_eight_kinds_of_text():
    _, tokenizer = real_model("smollm2-135m")
    found = dict(texts.windows(tokenizer))
    assert len(found) == 8 and all(len(ids) == texts.TOKENS for ids in found.values())
    assert found == dict(texts.windows(tokenizer))
    assert len({tuple(ids[:300]) for ids in found.values()}) == 8


def test_a_basis_is_written_and_read(cache, folder):
    bases = bases_of(folder)
    path = basis_file.write(bases, "tiny")
    assert path.parent == cache / "bases" and [x.name for x in path.parent.iterdir()] == [path.name]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    found = basis_file.read(path, bases.weights, bases.rope)
    assert same(found, bases) and found[:2] == bases[:2]
    assert same(basis_file.find(folder, bases.rope, "tiny"), bases)


def test_the_basis_of_other_weights_is_refused(cache, folder, tmp_path):
    bases = bases_of(folder)
    path = basis_file.write(bases, "tiny")
    with pytest.raises(FileError, match=r"basis of other weights .*; run `attnplug calibrate`"):
        basis_file.read(path, "0" * 16)
    with pytest.raises(FileError, match=r"basis of another rope .*; run `attnplug calibrate`"):
        basis_file.read(path, bases.weights, "0" * 8)
    stretched = config_of(folder, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    with pytest.raises(FileError, match=r"only for another rope: .*calibrate that folder"):
        basis_file.find(folder, basis_file.rope_of(stretched), "tiny")
    other = tmp_path / "other"
    tiny_model(seed=1).save_pretrained(other)
    with pytest.raises(FileError, match=r"none in attnplug's cache folder.*calibrate tiny2` once"):
        basis_file.find(other, bases.rope, "tiny2")


def test_a_fingerprint_is_of_the_weights_alone(folder, tmp_path):
    """Not of the names of files, nor of how tensors are spread over them; a change of one tensor's
    first number shows."""
    own = basis_file.weights_of(folder)
    tensors = load_file(folder / "model.safetensors")
    half = len(tensors) // 2
    names = sorted(tensors)
    for i, part in enumerate((names[:half], names[half:])):
        kept = {name: tensors[name] for name in part}
        save_file(kept, tmp_path / f"part-{i}.safetensors", metadata={"format": "pt"})
    assert basis_file.weights_of(tmp_path) == own
    changed = dict(tensors)
    changed[names[3]] = changed[names[3]].clone()
    changed[names[3]].view(-1)[0] += 1
    for path in tmp_path.iterdir():
        path.unlink()
    save_file(changed, tmp_path / "model.safetensors")
    assert basis_file.weights_of(tmp_path) != own


def test_a_rope_is_one_in_all_versions_of_transformers():
    """As its config says it today, and as it did before version 5; what stretches it is another."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 9}

    def rope(**facts):
        return basis_file.rope_of(types.SimpleNamespace(**heads, **facts))

    plain = rope(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    assert plain == rope(rope_theta=10000, rope_scaling=None)
    assert plain == rope(rope_theta=1e4, partial_rotary_factor=1.0)
    by_kind = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}, "sliding": {"x": 1}}
    assert plain == rope(rope_parameters=by_kind)
    linear = rope(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    assert linear == rope(rope_theta=1e4, rope_scaling={"type": "linear", "factor": 2})
    others = rope(rope_theta=1e4, partial_rotary_factor=0.5), rope(rope_theta=5e5), rope()
    assert len({plain, linear, *others}) == 5


def header(changes: dict) -> bytes:
    text = json.dumps(changes).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 4) + b"[1]]",
        header({"a": 7}),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": ["x", 8]}}),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [1e999, 8]}}),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-90, 8]}}),
    ],
)
def test_damaged_weights_have_no_fingerprint(tmp_path, data):
    with pytest.raises(FileError, match=r"no \*\.safetensors files.*; download all of it first"):
        basis_file.weights_of(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(FileError, match="cannot be read as weights"):
        basis_file.weights_of(tmp_path)


def damaged(seed: int, data: bytes) -> bytes:
    """Cut, with bytes changed in the header or behind it, or with some too many."""
    rng, spoilt = random.Random(seed), bytearray(data)
    if seed % 4 == 0:
        return bytes(spoilt[: rng.randrange(len(spoilt))])
    if seed % 4 == 1:
        at = rng.randrange(len(spoilt))
        spoilt[at:at] = rng.randbytes(rng.randrange(1, 40))
        return bytes(spoilt)
    most = 500 if seed % 4 == 2 else len(spoilt)
    for _ in range(rng.randrange(1, 9)):
        spoilt[rng.randrange(most)] = rng.randrange(256)
    return bytes(spoilt)


def test_damaged_files_are_one_kind_of_error(cache, folder):
    """Or hold what could be a basis: finite numbers of shapes that fit together."""
    path = basis_file.write(bases_of(folder), "tiny")
    good, refused = path.read_bytes(), 0
    for seed in range(SEEDS):
        path.write_bytes(damaged(seed, good))
        try:
            found = basis_file.read(path)
        except FileError as error:
            assert str(path) in str(error)
            refused += 1
            continue
        for basis in found.layers.values():
            assert basis.scorer.shape == (2, 64, 65) and basis.encoder.shape == (2, 65, 64)
            assert all(x.isfinite().all() and x.dtype == torch.float32 for x in basis)
    assert refused > SEEDS // 2


def tensors_of(bases: Bases) -> dict[str, torch.Tensor]:
    parts = {
        f"{layer}.{name}": x for layer, b in bases.layers.items() for name, x in b._asdict().items()
    }
    return {"inv_freq": bases.inv_freq, **parts}


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("inv_freq", None, "no inv_freq"),
        ("inv_freq", lambda x: x[None], "no inv_freq"),
        ("inv_freq", lambda x: torch.cat((x, x)), "layer 0 do not fit"),
        ("0.encoder", None, "layer 0 do not fit"),
        ("0.encoder", lambda x: x.double(), "'0.encoder' is not float32"),
        ("3.scorer", lambda x: x.log(), "'3.scorer' is not float32, or not finite"),
        ("3.scorer", lambda x: x[:, :, 1:].contiguous(), "layer 3 do not fit"),
        ("3.scorer", lambda x: x[:0], "layer 3 do not fit"),
        ("x.scorer", lambda x: torch.ones(1), "nobody knows what 'x.scorer' is"),
        ("1.scores", lambda x: torch.ones(1), "nobody knows what '1.scores' is"),
    ],
)
def test_what_does_not_fit_together_is_refused(cache, folder, name, change, said):
    bases = bases_of(folder)
    path, tensors = basis_file.write(bases, "tiny"), tensors_of(bases)
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors.get(name))
    facts = {"format": basis_file.FORMAT, "weights": bases.weights}
    path.write_bytes(save(tensors, metadata=facts))
    with pytest.raises(FileError, match=said):
        basis_file.read(path)
    path.write_bytes(save(tensors_of(bases), metadata=facts | {"format": "attnplug-basis-9"}))
    with pytest.raises(FileError, match="format is 'attnplug-basis-9', needs"):
        basis_file.read(path)


def test_the_command_makes_a_basis_and_says_where(cache, folder, tmp_path, monkeypatch):
    """As a user would: of a folder, with a real tokenizer; and what it says of a wrong name."""
    monkeypatch.setattr(texts, "TOKENS", 200)
    monkeypatch.setattr(command, "TOKENS", 200)
    monkeypatch.setattr(command.calibrate, "__defaults__", (None, 200))
    real = tmp_path / "model"
    with monkeypatch.context() as here:
        here.delenv("ATTNPLUG_CACHE")
        source = real_folder("smollm2-135m")
    _, tokenizer = real_model(str(source))
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(real)
    for path in Path(source).glob("token*"):
        shutil.copy(path, real)
    runner = CliRunner(env={"COLUMNS": "400", "NO_COLOR": "1"})
    said = runner.invoke(app, ["calibrate", str(real), "--device", "cpu"])
    assert said.exit_code == 0, said.output
    assert "2 layers, 4 KV heads, of 1,600 tokens" in said.output
    (path,) = (cache / "bases").iterdir()
    assert str(path) in said.output
    bases = basis_file.read(path, basis_file.weights_of(real))
    assert list(bases.layers) == [0, 1]
    told = json.loads(runner.invoke(app, ["calibrate", str(real), "--json"]).output)
    assert told["path"] == str(path) and told["tokens"] == 1600
    assert same(basis_file.read(path), bases)
    wrong = runner.invoke(app, ["calibrate", str(tmp_path / "none")])
    assert wrong.exit_code == 1 and "no model could be loaded from" in wrong.output


@pytest.mark.parametrize("there", ["a file", "a link to nowhere", "no right to write"])
def test_a_place_that_cannot_be_written_is_told_before_the_work(cache, folder, there, monkeypatch):
    """Minutes of work end in a file, for which no option names another place."""
    cache.mkdir()
    if there == "a file":
        (cache / "bases").write_text("")
    elif there == "a link to nowhere":
        (cache / "bases").symlink_to(cache / "none" / "bases")
    else:
        monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may write anywhere
    monkeypatch.setattr(command, "load", lambda *_, **__: (tiny_model(), None))
    monkeypatch.setattr(command, "make", lambda *_: pytest.fail("the work began"))
    with pytest.raises(FileError, match=r"may not be|cannot be") as raised:
        command.calibrate(str(folder))
    assert "set ATTNPLUG_CACHE" in str(raised.value)


def test_a_folder_is_where_the_checkpoint_is(folder):
    from attnplug.models.pretrained import checkpoint_dir, checkpoint_folder

    assert checkpoint_folder(str(folder)) == folder
    real_folder("gemma3-270m")
    assert checkpoint_folder("gemma3-270m@64k") == checkpoint_dir("gemma3-270m")
    with pytest.raises(WeightsUnavailableError, match="no model could be loaded"):
        checkpoint_folder("nobody/nothing")
