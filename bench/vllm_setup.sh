# shellcheck shell=bash
# source bench/vllm_setup.sh: unpacks the pieces .carry/vllm-N that this call brought, on the GPU
# machine, and once all of them are there puts vLLM and this checkout's attnplug on PYTHONPATH. A
# machine that is still warm keeps what earlier calls brought. VS: where to, /tmp/vs by default.
VS="${VS:-/tmp/vs}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
mkdir -p "$VS/parts"
for piece in "$root"/.carry/vllm-[0-9]*; do
  [ -f "$piece/part" ] || continue
  cp -n "$piece/part" "$VS/parts/${piece##*-}"
  cp "$piece/pieces" "$VS/pieces"
done
if [ ! -f "$VS/pieces" ] || [ "$(find "$VS/parts" -type f | wc -l)" -lt "$(cat "$VS/pieces")" ]; then
  echo "vLLM: $(find "$VS/parts" -type f | wc -l) of $(cat "$VS/pieces" 2>/dev/null || echo '?') pieces are here"
  return 1 2>/dev/null || exit 1
fi
if [ ! -f "$VS/ready" ]; then
  mkdir -p "$VS/packed" "$VS/site" "$VS/tree/vllm/vllm_flash_attn"
  cat "$VS"/parts/* | tar -x -C "$VS/packed"
  tar -xJf "$VS/packed/py.tar.xz" -C "$VS/tree" &
  tar -xJf "$VS/packed/site.tar.xz" -C "$VS/site" &
  for library in _C _C_stable_libtorch; do
    xz -dc "$VS/packed/$library.xz" >"$VS/tree/vllm/$library.abi3.so" &
  done
  xz -dc "$VS/packed/_vllm_fa3_C.xz" >"$VS/tree/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so" &
  wait
  touch "$VS/ready"
fi
# What an installed attnplug would tell vLLM.
info="$VS/plug/attnplug-0.1.0.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: attnplug\nVersion: 0.1.0\n' >"$info/METADATA"
printf '[vllm.general_plugins]\nattnplug = attnplug.serve.vllm:register\n' >"$info/entry_points.txt"
export PYTHONPATH="$VS/tree:$VS/plug:$root:$VS/site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
# Two GPUs: no NVLink multicast, which could take the host's GPUs out of service.
export VLLM_ALLREDUCE_USE_SYMM_MEM=0 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
