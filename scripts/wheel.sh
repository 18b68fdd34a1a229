#!/usr/bin/env bash
# Builds the source distribution and the wheel, holds them to PyPI's rules, and tries the wheel in a
# clean environment: first as a serving process has it, then with the extra of the demo.
#
#     bash scripts/wheel.sh FOLDER     FOLDER/dist has what was built
set -euo pipefail
folder="$(realpath -m "${1:?name a folder for the environments and what is built}")"
cd "$(dirname "$0")/.."
"${PYTHON:-python3.11}" -m venv "$folder/tools"
"$folder/tools/bin/pip" install --quiet build twine
rm -rf "$folder/dist"
"$folder/tools/bin/python" -m build --outdir "$folder/dist" .
"$folder/tools/bin/twine" check --strict "$folder"/dist/*
wheel="$(echo "$folder"/dist/*.whl)"

rm -rf "$folder/clean"
"${PYTHON:-python3.11}" -m venv "$folder/clean"
# torch first and pinned: where the index has a CPU build, the gigabytes of the CUDA build stay away.
"$folder/clean/bin/pip" install --quiet torch==2.13.0
"$folder/clean/bin/pip" install --quiet "$wheel"
mkdir -p "$folder/work"
cd "$folder/work"  # so that the wheel is imported, and not the repository
unset PYTHONPATH
attnplug() { "$folder/clean/bin/attnplug" "$@"; }
attnplug --version
attnplug --help >/dev/null
attnplug plan qwen2.5-7b
attnplug doctor
"$folder/clean/bin/python" - "$folder" <<'PYTHON'
import sys
import torch
import attnplug
from attnplug.testing import tiny_model
assert attnplug.__file__.startswith(sys.argv[1]), attnplug.__file__
model = attnplug.apply(tiny_model(), "momo(min_tokens=0)+gather(min_tokens=0)")
ids = torch.arange(2, 42)[None]
found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4)
assert found.shape == (1, 44), found.shape
print(attnplug.report(model))
PYTHON
"$folder/clean/bin/pip" install --quiet "$wheel[demo]"
attnplug demo --tokens 1K
