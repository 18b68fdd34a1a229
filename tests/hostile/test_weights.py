"""Weights in the cache that are damaged are made anew, and a name that nobody knows is answered at
once, with the name that it is like."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
from full_disk import file_size_limit
from real_models import real_folder
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from attnplug import files
from attnplug.bench.command import heads_of
from attnplug.errors import ArgumentError, WeightsUnavailableError
from attnplug.models import pretrained
from attnplug.plan import shape_of
from attnplug.testing.policy import tiny_model

NAME = "smollm2-135m"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, a conversion that makes a tiny model, and how often it has run."""
    monkeypatch.setenv("ATTNPLUG_CACHE", str(tmp_path))
    made = []

    def convert(name, gguf, target):
        made.append(name)
        tiny_model().save_pretrained(target)
        (target / "tokenizer.json").write_text("{}")
        return target

    monkeypatch.setattr(pretrained, "_gguf", lambda *arguments: Path("unused"))
    monkeypatch.setattr(pretrained, "_convert", convert)
    return tmp_path, made


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def overwrite(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100:-50] = bytes(50)
    path.write_bytes(data)


DAMAGE = {"truncated": truncate, "overwritten": overwrite, "deleted": Path.unlink}


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "attnplug-checksums.json"])
@pytest.mark.parametrize("harm", list(DAMAGE.values()), ids=list(DAMAGE))
def test_a_damaged_checkpoint_is_made_anew(cache, file, harm):
    folder, made = cache
    target = pretrained.fetch(NAME)
    wanted = (target / file).read_bytes()
    assert pretrained.fetch(NAME) == target and len(made) == 1
    harm(target / file)
    assert pretrained.fetch(NAME) == target
    if (file, harm) != ("attnplug-checksums.json", Path.unlink):  # as an older attnplug left it
        assert len(made) == 2 and (target / file).read_bytes() == wanted
    assert [path.name for path in folder.iterdir()] == [target.name]
    twin = LlamaForCausalLM.from_pretrained(target)
    assert torch.equal(twin.lm_head.weight, tiny_model().lm_head.weight)


def test_a_truncated_checkpoint_without_checksums_is_one_clear_error(cache, monkeypatch):
    target = pretrained.fetch(NAME)
    (target / pretrained.SEAL).unlink()
    truncate(target / "model.safetensors")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *a, **k: None)
    with pytest.raises(WeightsUnavailableError, match=r"cannot be read.*delete that folder"):
        pretrained.load(NAME, device="cpu")


def test_checksums_name_every_file(cache):
    target = pretrained.fetch(NAME)
    sums = json.loads((target / pretrained.SEAL).read_text())
    assert {*sums, pretrained.SEAL} == {path.name for path in target.iterdir()}


def test_a_mistyped_name_offline_is_answered_with_the_closest_one():
    with pytest.raises(WeightsUnavailableError, match=r"Did you mean smollm2-135m\?"):
        pretrained.load("SmolM2-135m", device="cpu")


def test_a_mistyped_name_is_answered_at_once_where_the_hub_does_not_answer(tmp_path):
    """In a process that does not know that it is offline."""
    code = (
        "import time; from attnplug.models import pretrained\n"
        "import transformers, huggingface_hub\n"
        "from transformers import AutoTokenizer, AutoModelForCausalLM\n"
        "begin = time.perf_counter()\n"
        "try: pretrained.load('gema3-270m', device='cpu')\n"
        "except pretrained.WeightsUnavailableError as error: print(error)\n"
        "print('SECONDS', time.perf_counter() - begin)"
    )
    gone = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    env = {k: v for k, v in os.environ.items() if k not in gone and "proxy" not in k.lower()}
    # TEST-NET-1: nobody answers there, not even to refuse.
    env |= {"HF_ENDPOINT": "http://192.0.2.1", "HF_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert "Did you mean gemma3-270m?" in run.stdout, run.stderr
    assert float(run.stdout.rsplit("SECONDS", 1)[1]) < 15


def test_a_mistyped_shape_is_answered_with_the_closest_one():
    with pytest.raises(ArgumentError, match=r"Did you mean llama-3\.1-8b\?"):
        shape_of("lama-3.1-8b")


@pytest.mark.parametrize(
    "config",
    [
        [1, 2],
        {"model_type": "llama", "hidden_size": "x"},
        {"model_type": "llama", "num_attention_heads": 0},
    ],
)
def test_a_config_that_is_none_is_one_clear_error(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArgumentError, match="has no config"):
        shape_of(str(tmp_path))
    with pytest.raises(ArgumentError, match="has no config"):
        heads_of(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WeightsUnavailableError, match="no model could be loaded"):
        pretrained.load(str(tmp_path), device="cpu")


def test_the_tokenizer_of_another_model_is_one_clear_error(tmp_path):
    """Not an IndexError in the middle of the work; a token that was added beside the model's is
    nobody's mistake."""
    tokenizer = AutoTokenizer.from_pretrained(real_folder(NAME))
    known = tokenizer.vocab_size
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(tmp_path)
    tiny_model(vocab_size=known).save_pretrained(tmp_path)
    assert len(pretrained.load(str(tmp_path), device="cpu")[1]) == known + 1
    tiny_model(vocab_size=known - 1).save_pretrained(tmp_path)
    with pytest.raises(WeightsUnavailableError, match="49,152 tokens and the model knows 49,151"):
        pretrained.load(str(tmp_path), device="cpu")


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_weights_have_the_permissions_of_the_users_umask(cache, umask):
    before = os.umask(umask)
    try:
        target = pretrained.fetch(NAME)
    finally:
        os.umask(before)
    assert modes(target) == {0o666 & ~umask}
    assert stat.S_IMODE(target.stat().st_mode) == 0o777 & ~umask
    (target / "model.safetensors").chmod(0o600)  # as an older attnplug left it
    assert pretrained.fetch(NAME) == target
    assert modes(target) == {0o666 & ~umask}


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize("hidden", ["model.safetensors", "attnplug-checksums.json", "."])
def test_weights_that_another_user_may_not_read_are_said_to_be_so(cache, hidden, tmp_path_factory):
    folder, made = cache
    target = pretrained.fetch(NAME)
    for above in (folder, *folder.parents[:2]):
        above.chmod(0o755)
    (target / hidden).chmod(0o700 if hidden == "." else 0o600)
    os.seteuid(65534)
    try:
        with pytest.raises(WeightsUnavailableError, match=r"Permission denied.*chmod -R a\+rX"):
            pretrained.fetch(NAME)
    finally:
        os.seteuid(0)
    assert len(made) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_damaged_weights_in_a_folder_of_another_user_are_one_clear_error(cache):
    folder, _ = cache
    truncate(pretrained.fetch(NAME) / "model.safetensors")
    for above in (folder, *folder.parents[:2]):
        above.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(WeightsUnavailableError, match="set ATTNPLUG_CACHE to a folder of your"):
            pretrained.fetch(NAME)
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("limit", [0, 20, 200, 600, 2000, 20_000, 100_000])
def test_a_disk_that_is_full_in_the_conversion_is_one_clear_error(cache, limit, monkeypatch):
    """Whichever file is the first that does not fit: the last of them has the most bytes."""
    folder, _ = cache
    plain = pretrained._convert

    def convert(name, gguf, target):
        plain(name, gguf, target)
        words = {f"w{i}": i for i in range(2000)}
        tokenizers.Tokenizer(tokenizers.models.WordLevel(words)).save(f"{target}/tokenizer.json")
        save_file({"w": torch.zeros(100_000)}, target / "more.safetensors")
        return target

    monkeypatch.setattr(pretrained, "_convert", convert)
    with file_size_limit(limit), pytest.raises(WeightsUnavailableError, match="free some space"):
        pretrained.fetch(NAME)
    assert list(folder.iterdir()) == []
    assert len(list(pretrained.fetch(NAME).iterdir())) > 3


@pytest.mark.parametrize("place", ["file", "link"])
def test_a_cache_that_is_no_folder_is_not_said_to_be_full(cache, place, monkeypatch):
    where = cache[0] / "place"
    where.write_text("") if place == "file" else where.symlink_to(cache[0] / "nowhere" / "x")
    monkeypatch.setenv("ATTNPLUG_CACHE", str(where))
    with pytest.raises(WeightsUnavailableError, match="set ATTNPLUG_CACHE") as caught:
        pretrained.fetch(NAME)
    assert "space" not in str(caught.value)


def test_what_a_killed_conversion_leaves_is_deleted_by_the_next_run(cache):
    folder, _ = cache
    code = (
        "import os; from attnplug.models import pretrained\n"
        "pretrained._gguf = lambda name, weights, work, console: (work / 'big').write_text('x')\n"
        "pretrained._convert = lambda *arguments: os.kill(os.getpid(), 9)\n"
        f"pretrained.fetch({NAME!r})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert run.returncode == -9 and len(list(folder.iterdir())) == 1
    target = pretrained.fetch(NAME)
    assert list(folder.iterdir()) == [target]


def test_the_scratch_folder_of_a_process_that_lives_stays(cache):
    folder, _ = cache
    with files.scratch_folder(folder, NAME) as working:
        target = pretrained.fetch(NAME)
        assert {*folder.iterdir()} == {working, target}
    assert list(folder.iterdir()) == [target]
