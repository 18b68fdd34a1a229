#!/usr/bin/env bash
# compute-sanitizer's memcheck over every op that appends, on a machine with a CUDA GPU:
#
#     bash bench/sanitizer.sh [pytest arguments]
#
# The tests are those past the end of a cache, tests/hostile/test_past_the_end*.py, which have each
# op that writes to its arguments. PROCESSES (8) beside each other take a share of them each, and have
# SECONDS_EACH (480). torch's allocator, which would hide what lies behind a tensor in the same block
# of memory, is off. $OUT gets sanitizer.log and the counts, sanitizer.json. The exit status is 1 for
# an error, a failed test, or a share that did not end.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
# shellcheck source=bench/gpu_join.sh
source bench/gpu_join.sh
out="${OUT:-/tmp}" work="$(mktemp -d)" processes="${PROCESSES:-8}" seconds="${SECONDS_EACH:-480}"
sanitizer="$(command -v compute-sanitizer || true)"
for place in /usr/local/cuda*/bin /usr/local/cuda*/compute-sanitizer; do
  [ -n "$sanitizer" ] || [ ! -x "$place/compute-sanitizer" ] || sanitizer="$place/compute-sanitizer"
done
if [ -z "$sanitizer" ]; then
  echo "compute-sanitizer is neither on PATH nor under /usr/local/cuda*" >&2
  exit 2
fi
tests=(tests/hostile/test_past_the_end*.py)
if ! python3 -m pytest -n0 -q -m gpu --collect-only "${tests[@]}" "$@" >"$work/found.txt" 2>&1; then
  tail -n 30 "$work/found.txt" >&2 # a file that cannot be imported must not be left out
  exit 2
fi
grep '::' "$work/found.txt" >"$work/tests.txt"
count="$(wc -l <"$work/tests.txt")"
echo "$count tests, $processes processes, $("$sanitizer" --version | tail -1)"
[ "$count" -gt 0 ] || exit 2
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
pids=()
for ((index = 0; index < processes; index++)); do
  mapfile -t share < <(awk -v n="$processes" -v i="$index" 'NR % n == i' "$work/tests.txt")
  [ "${#share[@]}" -gt 0 ] || continue
  timeout "$seconds" "$sanitizer" --tool memcheck --target-processes application-only --error-exitcode 99 \
    python3 -m pytest -n0 -v -m gpu -p no:cacheprovider "${share[@]}" \
    >"$work/$index.log" 2>&1 &
  pids+=($!)
done
codes=()
for pid in "${pids[@]}"; do
  wait "$pid"
  codes+=($?)
done
cat "$work"/*.log >"$out/sanitizer.log"
python3 - "$out" "$count" "${codes[@]}" <<'PYTHON'
import json
import re
import sys
from pathlib import Path

out, count, codes = Path(sys.argv[1]), int(sys.argv[2]), list(map(int, sys.argv[3:]))
text = (out / "sanitizer.log").read_text()
errors = [int(n) for n in re.findall(r"ERROR SUMMARY: (\d+) error", text)]
passed = sum(int(n) for n in re.findall(r"(\d+) passed", text))
failed = re.findall(r"^FAILED (\S+)", text, re.M)
facts = {
    "tests": count,
    "passed": passed,
    "failed": failed,
    "errors": sum(errors),
    "summaries": len(errors),
    "exit statuses": codes,
    "kinds of error": sorted(set(re.findall(r"^========= (Invalid .*|Program hit .*)", text, re.M))),
}
(out / "sanitizer.json").write_text(json.dumps(facts, indent=1) + "\n")
print(json.dumps(facts, indent=1))
sys.exit(bool(any(codes) or failed or sum(errors) or passed != count or len(errors) < len(codes)))
PYTHON
