#!/usr/bin/env bash
# A study of bench/studies.py on models that read long prompts, on a machine with GPUs of 140 GB:
#   [STUDY=rivals] bash bench/eval_long.sh SECONDS [MODEL,... [options of attnplug eval]]
#
# STUDY is as-written where nothing else is said: what users write, on prompts of 64K and 128K tokens.
# Models take the GPUs (those of CUDA_VISIBLE_DEVICES, or all) by turns: of two, gemma3-270m@64k the
# first, @128k the second, gemma3-270m (32K) the first again. Where there are more GPUs than models, a
# model has several. Of another study name its models. Of a model without samples dense alone is asked
# first; tasks that the model itself cannot do at its length are then left out, and the others run in
# the study's order. $OUT gets STUDY-MODEL.jsonl and .log, also where SECONDS end it. Then, for each
# model:
#   python bench/eval_rows.py STUDY-MODEL $OUT/STUDY-MODEL.jsonl --study STUDY
# What bench/results/samples has is not run again (FRESH=1 asks everything anew), so that the next
# call goes on. PROCESSES (2) share a GPU through MPS. Weights come in pieces (gpu_join.sh); name the
# commit in ATTNPLUG_COMMIT where there is no git. Options replace those of the study.
set -uo pipefail
cd "$(dirname "$0")/.."
seconds=$1 out=${OUT:-/tmp} asked_study=${STUDY:-as-written}
[ "$asked_study" != rivals ] || export PROGRAM=bench/rivals.py
IFS=, read -ra models <<<"${2:-gemma3-270m@64k,gemma3-270m@128k,gemma3-270m}"
more=("${@:3}")
# shellcheck source=bench/gpu_join.sh
source bench/gpu_join.sh
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
IFS=, read -ra own <<<"${CUDA_VISIBLE_DEVICES-$(seq -s, 0 $((gpus - 1)))}"
if [ "$gpus" -gt 0 ] && [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ]; then
  export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log
  mkdir -p /tmp/mps /tmp/mps-log
  # It would number the GPUs that it sees anew, and processes name those of the machine.
  if env -u CUDA_VISIBLE_DEVICES nvidia-cuda-mps-control -d; then
    trap 'echo quit -t 5 | nvidia-cuda-mps-control' EXIT # it would wait for processes of other calls
  else
    echo "no MPS of this call's own" >&2
  fi
fi
# Converted once, and not by every process.
python3 -c 'import sys; from attnplug.models.pretrained import fetch; fetch(sys.argv[1])' \
  "${models[0]%@*}" || exit

# What a process holds of the GPU grows with the batch's masks: at 128K two prompts' take 34 GB.
options() { # MODEL look|SAMPLES
  python3 bench/studies.py "$asked_study" "$1" "$2"
  case $1 in *@128k) printf '%s\n' --batch 2 ;; esac
}

share() { # MODEL NAME OUT KNOWN look|SAMPLES
  local asked left=$((seconds - SECONDS))
  [ $left -gt 0 ] || { echo "not begun: $1" >&2 && return 1; } # 0 would be no limit
  mapfile -t asked < <(options "$1" "$5")
  OUT=$3 KNOWN=$4 timeout --kill-after=20 "$left" bash bench/eval_shares.sh "${PROCESSES:-2}" \
    "$2" "$1" "${asked[@]}" "${more[@]}"
}

study() { # MODEL
  local name=$asked_study-${1//@/-} folder
  folder=$(mktemp -d)
  local packed=bench/results/samples/$name.jsonl.xz known=$folder/known
  : >"$known"
  if [ -z "${FRESH:-}" ] && [ -f "$packed" ]; then
    python3 -c "import lzma, sys; sys.stdout.buffer.write(lzma.open(sys.argv[1]).read())" \
      "$packed" >"$known" || return
  fi
  if [ ! -s "$known" ]; then
    share "$1" "$name" "$folder" "$known" look
    local looked=$?
    cp "$folder/$name".{jsonl,log} "$out/" || return
    [ $looked -eq 0 ] || return
    known=$folder/$name.jsonl
  fi
  share "$1" "$name" "$out" "$known" "$known"
}

lanes=$((${#own[@]} < ${#models[@]} ? ${#own[@]} : ${#models[@]}))
[ $lanes -gt 0 ] || lanes=1 # no GPU

lane() { # NUMBER
  local i failed=0 gpus_here=
  for ((i = $1; i < ${#own[@]}; i += lanes)); do gpus_here+=" ${own[i]}"; done
  for ((i = $1; i < ${#models[@]}; i += lanes)); do
    GPUS=$gpus_here study "${models[i]}" || failed=1
  done
  return $failed
}

ids=() failed=0
for ((number = 0; number < lanes; number++)); do
  lane "$number" &
  ids+=($!)
done
for id in "${ids[@]}"; do wait "$id" || failed=1; done
exit $failed
