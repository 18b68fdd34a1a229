# shellcheck shell=bash
# source bench/vllm_setup.sh: unpacks the pieces .carry/vllm-N that this call brought, on the GPU
# machine, and those of .carry/torch-N where that vLLM wants another torch than the machine's. Once all
# of them are there, it puts vLLM and this checkout's attnplug on PYTHONPATH. A machine that is still
# warm keeps what earlier calls brought. VS: where to, /tmp/vs by default.
VS="${VS:-/tmp/vs}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=bench/unpack.sh
source "$root/bench/unpack.sh"
join_pieces vllm "$VS" || return 1
if [ -f "$VS/packed/wants-torch" ]; then
  # shellcheck source=bench/torch_setup.sh
  source "$root/bench/torch_setup.sh" || return 1
fi
# What an installed attnplug would tell vLLM.
info="$VS/plug/attnplug-0.1.0.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: attnplug\nVersion: 0.1.0\n' >"$info/METADATA"
printf '[vllm.general_plugins]\nattnplug = attnplug.serve.vllm:register\n' >"$info/entry_points.txt"
export PYTHONPATH="$VS/tree:$VS/plug:$root:$VS/site${PYTHONPATH:+:$PYTHONPATH}"
# FlashInfer, which newer versions sample with unless told otherwise, is not packed.
export VLLM_USE_FLASHINFER_SAMPLER=0
export PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
# Two GPUs: no NVLink multicast, which could take the host's GPUs out of service.
export VLLM_ALLREDUCE_USE_SYMM_MEM=0 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
