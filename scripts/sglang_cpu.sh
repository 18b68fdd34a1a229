#!/usr/bin/env bash
# attnplug over SGLang's own classes on a CPU: makes a virtual environment in FOLDER and runs the tests
# that are marked sglang, with the newest SGLang and the oldest that attnplug serves.
#
#     bash scripts/sglang_cpu.sh FOLDER [pytest arguments]
#
# SGLang's wheel is installed without its dependencies, which are for a GPU, beside the torch and the
# transformers of attnplug's tests. It imports with the few packages of scripts/sglang_cpu.txt, and
# without kernels: an empty package stands in for sgl_kernel, and torch for FlashAttention
# (tests/serve/sglang_real.py). Its engine does not run on a CPU like this.
set -euo pipefail
folder="$(realpath -m "${1:?name a folder for the virtual environment}")"
shift
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE
if [ ! -x "$folder/bin/python" ]; then
  "${PYTHON:-python3.11}" -m venv "$folder"
  install=("$folder/bin/pip" install --quiet --no-compile)
  "${install[@]}" -e '.[test]' aiohttp fastapi ipython psutil pydantic pyzmq requests
  "${install[@]}" --no-deps -r scripts/sglang_cpu.txt
fi
for version in 0.5.23 0.5.22; do
  own="$folder/$version"
  [ -d "$own/sglang" ] || "$folder/bin/pip" install --quiet --no-compile --no-deps --target "$own" "sglang==$version"
  PYTHONPATH="$own" "$folder/bin/python" -m pytest -m sglang tests/serve --numprocesses 0 "$@"
done
