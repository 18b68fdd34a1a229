# shellcheck shell=bash
# source bench/sglang_setup.sh: unpacks the pieces .carry/torch-N and .carry/sglang-N that this call
# brought, on the GPU machine, and once all of them are there puts SGLang, its torch and this checkout's
# attnplug on PYTHONPATH. A machine that is still warm keeps what earlier calls brought. SG: where to,
# /tmp/sg by default. Not run yet.
SG="${SG:-/tmp/sg}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=bench/torch_setup.sh
source "$root/bench/torch_setup.sh" || return 1
join_pieces sglang "$SG" || return 1
# What an installed attnplug would tell SGLang.
info="$SG/plug/attnplug-0.1.0.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: attnplug\nVersion: 0.1.0\n' >"$info/METADATA"
printf '[sglang.srt.plugins]\nattnplug = attnplug.serve.sglang:register\n' >"$info/entry_points.txt"
export PYTHONPATH="$SG/tree:$SG/plug:$root:$SG/site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
