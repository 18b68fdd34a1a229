"""What `bench/vllm_pack.sh` needs of Python: smaller libraries, and the packages that vLLM imports.

    python vllm_pack.py prune IN OUT     # a CUDA library without machine code for other GPUs
    python vllm_pack.py site FOLDER      # copies what vLLM imports and the GPU machine lacks
    python vllm_pack.py check            # imports vLLM, and names what came from elsewhere

`prune` fills every kernel image that is not sm_90 machine code with zeros: offsets stay, and xz
packs the zeros away. `site` and `check` import vLLM's server and its engine, and look where modules
lie.
"""

import importlib.metadata
import os
import shutil
import struct
import sys
from pathlib import Path

# On the GPU machine already (pip list, 2026-11-17); everything else that is imported travels.
PRESENT = set(
    """
    accelerate aiohappyeyeballs aiohttp aiosignal annotated-doc anyio attrs certifi
    charset-normalizer click cloudpickle cuda-bindings cuda-pathfinder einops filelock frozenlist
    fsspec h11 hf-xet httpcore httpx huggingface-hub hypothesis idna jinja2 llvmlite
    markdown-it-py markupsafe mpmath multidict networkx ninja numba numpy
    opencv-python-headless packaging pandas pillow pip prometheus-client propcache protobuf psutil
    py-cpuinfo pygments pytest pytest-timeout pytest-xdist pyyaml regex requests rich safetensors
    scipy sentencepiece setuptools six sympy tiktoken tokenizers torch tqdm transformers triton
    typer typing-extensions urllib3 uvloop wheel yarl
    """.split()
)
# Imported on the way to a first request, later than at the import of vLLM; and attnplug's own.
MORE = """
    blake3 compressed-tensors depyf astor dill diskcache setproctitle loguru jiter openai
    python-json-logger prometheus-fastapi-instrumentator ijson lark interegular lm-format-enforcer
    gguf platformdirs shellingham mdurl httptools websockets python-dotenv jsonschema-specifications
    referencing rpds-py httpcore2 truststore
    """.split()
# Data that nothing here reads.
LEFT_OUT = (
    "/tests/",
    "__pycache__",
    "mistral_common/data",
    "pycountry/locales",
    "/include/",
    ".pyi",
)
SM90_MACHINE_CODE = (2, 90)  # kind of image, architecture
FATBIN_MAGIC = 0xBA55ED50


def main() -> None:
    command, *given = sys.argv[1:]
    {"prune": prune, "site": copy_site, "check": check}[command](*given)


def prune(source: str, target: str) -> None:
    """Copy a shared library with zeros for kernels that an H200 does not run."""
    data = bytearray(Path(source).read_bytes())
    position, size = section(data, ".nv_fatbin")
    end = position + size
    while position < end:
        if struct.unpack_from("<I", data, position)[0] != FATBIN_MAGIC:
            position += 8
            continue
        _, _, head, length = struct.unpack_from("<IHHQ", data, position)
        entry, stop = position + head, position + head + length
        while entry < stop:
            kind, _, head = struct.unpack_from("<HHI", data, entry)
            (payload,) = struct.unpack_from("<Q", data, entry + 8)
            (architecture,) = struct.unpack_from("<I", data, entry + 28)
            if (kind, architecture) != SM90_MACHINE_CODE:
                data[entry + head : entry + head + payload] = bytes(payload)
            entry += head + payload
        position = stop
    Path(target).write_bytes(data)


def section(data: bytearray, wanted: str) -> tuple[int, int]:
    """(offset, size) of a section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    each, count, names = struct.unpack_from("<HHH", data, 0x3A)
    heads = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * each) for i in range(count)]
    for head in heads:
        at = heads[names][4] + head[0]
        if data[at : data.index(0, at)].decode() == wanted:
            return head[4], head[5]
    raise SystemExit(f"no section {wanted}")


def import_vllm() -> None:
    """What a server, an engine and a worker import."""
    import vllm.entrypoints.openai.api_server
    import vllm.model_executor.model_loader.dummy_loader
    import vllm.model_executor.models.gemma3
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.qwen2
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.engine.llm_engine
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.gpu_worker  # noqa: F401


def normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def imported() -> set[str]:
    """The distributions that have an imported module."""
    import_vllm()
    tops = {module.split(".")[0] for module in sys.modules}
    owners = importlib.metadata.packages_distributions()
    return {normal(name) for top in tops for name in owners.get(top, [])}


def copy_site(folder: str) -> None:
    """Copy the files of what is imported and not PRESENT."""
    total = 0
    for name in sorted((imported() | {normal(n) for n in MORE}) - PRESENT - {"vllm", "attnplug"}):
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            print(f"not here: {name}")
            continue
        for file in found.files or []:
            source, text = Path(str(found.locate_file(file))), str(file)
            if text.startswith("..") or any(part in text for part in LEFT_OUT):
                continue
            if source.is_file():
                target = Path(folder, text)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
                total += source.stat().st_size
    print(f"{total >> 20} MiB of packages")


def check() -> None:
    """Fail where an imported package comes neither from the pack nor from what is PRESENT."""
    names = imported()
    roots = [os.path.realpath(root) for root in os.environ["PYTHONPATH"].split(os.pathsep)]
    elsewhere = set()
    for name in names - PRESENT - {"vllm"}:
        path = os.path.realpath(str(importlib.metadata.distribution(name).locate_file("")))
        if not any(path.startswith(root) for root in roots):
            elsewhere.add(name)
    if elsewhere:
        raise SystemExit(f"these are not in the pack: {', '.join(sorted(elsewhere))}")
    print(f"vLLM imports; {len(names)} distributions, all in the pack or on the machine")


if __name__ == "__main__":
    main()
