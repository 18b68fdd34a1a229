#!/usr/bin/env bash
# Comparisons of options (bench/studies.py), both small models, on a machine with one GPU of 140 GB:
#   bash bench/studies_gpu.sh SECONDS STUDY...
#
# $OUT gets STUDY-MODEL.jsonl of each, also where SECONDS end it, and studies.log. Everything is asked
# anew. Then, for each that ended (this script exits with 0, or the study's line has no "cut"):
#   python bench/eval_rows.py STUDY-MODEL STUDY-MODEL.jsonl --study STUDY --anew
# and without --anew for one that was cut, whose other samples stay. Weights and processes are those
# of bench/eval_gpu.sh.
set -uo pipefail
cd "$(dirname "$0")/.."
seconds=$1 out=${OUT:-/tmp} failed=0
shift
# shellcheck source=bench/gpu_join.sh
source bench/gpu_join.sh
for study; do
  left=$((seconds - SECONDS))
  [ $left -gt 20 ] || { echo "not begun: $study" && failed=1 && continue; }
  mapfile -t asked < <("${PYTHON:-python3}" bench/studies.py "$study")
  [ ${#asked[@]} -gt 0 ] || exit 2
  folder=$(mktemp -d) word=ended
  OUT=$folder FRESH=1 bash bench/eval_gpu.sh "$left" "${asked[@]}" >>"$out/studies.log" 2>&1 ||
    word=cut failed=1
  for file in "$folder"/*.jsonl; do mv "$file" "$out/$study-$(basename "$file")"; done
  tail -n 3 "$folder"/*.log >>"$out/studies.log"
  echo "$study: $word, $(cat "$out/$study"-*.jsonl | wc -l) samples, $SECONDS s"
done
exit $failed
