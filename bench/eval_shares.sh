#!/usr/bin/env bash
# One eval study by several processes of one machine:
#   bash bench/eval_shares.sh PROCESSES NAME MODEL [options of attnplug eval]
#
# A model that is small leaves most of a GPU idle. Each process claims a batch after the other, in the
# order of --lengths and --tasks: name first what takes longest. GPUS names GPUs, each of which gets
# PROCESSES. $OUT/NAME.jsonl gets all samples, of which `python bench/eval_rows.py MODEL
# $OUT/NAME.jsonl` makes rows, also where this script is cut short (SIGTERM, as of `timeout`);
# $OUT/NAME.log gets what the processes said last. Two files, because a machine may bring back few.
# Fails if a process did. KNOWN names a file of samples that are not to be run again. PROGRAM stands
# for `-m attnplug`.
set -uo pipefail
cd "$(dirname "$0")/.."
read -ra gpus <<<"${GPUS-}"
processes=$(($1 * (${#gpus[@]} > 0 ? ${#gpus[@]} : 1))) name=$2 model=$3
shift 3
folder=$(mktemp -d)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
ids=()
collect() {
  kill "${ids[@]}" 2>/dev/null
  cat "$folder"/*/samples.jsonl >"${OUT:-/tmp}/$name.jsonl" 2>/dev/null
  tail -n 12 "$folder"/*.log >"${OUT:-/tmp}/$name.log"
  wc -l "${OUT:-/tmp}/$name.jsonl"
}
trap collect EXIT
trap 'exit 143' TERM
for ((i = 0; i < processes; i++)); do
  mkdir "$folder/$i" && { [ -z "${KNOWN:-}" ] || cp "$KNOWN" "$folder/$i/samples.jsonl"; } || exit
  [ ${#gpus[@]} -eq 0 ] || export CUDA_VISIBLE_DEVICES=${gpus[i % ${#gpus[@]}]}
  python3 ${PROGRAM:--m attnplug} eval "$model" --claims "$folder/claims" --out "$folder/$i" "$@" \
    >"$folder/$i.log" 2>&1 &
  ids+=($!)
done
failed=0
for id in "${ids[@]}"; do wait "$id" || failed=1; done
exit $failed
