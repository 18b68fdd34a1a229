#!/usr/bin/env bash
# The dependency ranges of pyproject.toml at both ends: a venv with the lowest version of everything
# that a lower bound names, one with the newest, and in each of them the tests that meet torch,
# transformers, numpy and triton most. Downloads about 3 GB a venv; run from the repository's root.
#
#     scripts/check_ranges.sh [lowest|newest]      both without an argument
set -euo pipefail

TESTS=(
  tests/test_api.py
  tests/hostile/test_configs.py
  tests/hostile/test_room.py
  tests/hostile/test_past_the_end.py
  tests/hostile/test_export.py
  tests/hostile/test_trace_damage.py
  tests/contract/test_traps.py
  tests/ops/dense
  tests/ops/gather
)
folder=${TMPDIR:-/tmp}/attnplug-ranges

requirements() { # lowest or newest: one requirement a line
  python - "$1" <<'PYTHON'
import re
import sys
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = [project["optional-dependencies"][name] for name in ("demo", "eval", "plot", "trace")]
lines = project["dependencies"] + [line for extra in extras for line in extra]
for line in lines:
    if line.startswith("attnplug["):
        continue
    requirement, _, marker = line.partition(";")
    name, low = re.match(r"([\w.-]+)>=([\w.]+)", requirement).groups()
    version = f"{low}.*" if low.count(".") < 2 else low
    chosen = f"{name}=={version}" if sys.argv[1] == "lowest" else requirement.strip()
    print(f"{chosen} ; {marker.strip()}" if marker else chosen)
PYTHON
}

for end in ${1:-lowest newest}; do
  python -m venv "$folder/$end"
  requirements "$end" > "$folder/$end.txt"
  "$folder/$end/bin/pip" install --quiet --upgrade --requirement "$folder/$end.txt" \
    pytest pytest-xdist pytest-timeout pytest-benchmark hypothesis "pandas>=2.2"
  echo "== $end: $("$folder/$end/bin/pip" list 2>/dev/null | grep -E '^(torch|transformers|numpy|triton|numba) ' | tr -s ' ' | tr '\n' ',')"
  PYTHONPATH=$PWD "$folder/$end/bin/python" -m pytest -q "${TESTS[@]}"
done
