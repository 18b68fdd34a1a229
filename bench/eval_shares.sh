#!/usr/bin/env bash
# One eval study by several processes of one machine:
#   bash bench/eval_shares.sh PROCESSES NAME MODEL [options of attnplug eval]
#
# A model that is small leaves most of a GPU idle. Each process runs its share of every cell; $OUT/NAME.jsonl
# gets all samples, in which `python bench/eval_rows.py MODEL $OUT/NAME.jsonl` finds its rows, and
# $OUT/NAME-I.log what process I said. Fails if one of them did; what was measured is there all the same.
set -uo pipefail
cd "$(dirname "$0")/.."
processes=$1 name=$2 model=$3
shift 3
folder=$(mktemp -d)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
ids=()
for ((i = 0; i < processes; i++)); do
  python3 -m attnplug eval "$model" --share "$i/$processes" --out "$folder/$i" "$@" \
    >"${OUT:-/tmp}/$name-$i.log" 2>&1 &
  ids+=($!)
done
failed=0
for id in "${ids[@]}"; do wait "$id" || failed=1; done
cat "$folder"/*/samples.jsonl >"${OUT:-/tmp}/$name.jsonl"
wc -l "${OUT:-/tmp}/$name.jsonl"
exit $failed
