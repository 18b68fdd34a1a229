# shellcheck shell=bash
# source bench/gpu_join.sh, in the repository's root on a GPU machine: installs the wheels of .whl/
# that the machine lacks, and puts weights together of the pieces .carry/MODEL-N that this call
# brought, in /tmp/attnplug. A machine that is warm keeps what earlier calls brought.
# bench/gpu_pack.sh makes wheels and pieces, bench/flashinfer_pack.sh FlashInfer's top-k, which is
# unpacked beside the wheels. Nothing is done for the jobs of lanes.sh, which has done it.
[ -z "${ATTNPLUG_JOINED:-}" ] || return 0
export PYTHONPATH="$PWD:/tmp/site${PYTHONPATH:+:$PYTHONPATH}"
if compgen -G ".whl/*.whl" >/dev/null; then
  "${PYTHON:-python3}" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
    --upgrade --target /tmp/site .whl/*.whl || exit
fi
if [ -f .peers/flashinfer.tar.xz ] && [ ! -d /tmp/site/flashinfer ]; then
  mkdir -p /tmp/site
  tar -xJf .peers/flashinfer.tar.xz -C /tmp/site || exit # bench/flashinfer_pack.sh
fi
if [ -d /tmp/attnplug ] || compgen -G ".carry/*/*.part*-of-*" >/dev/null; then
  export ATTNPLUG_CACHE="${ATTNPLUG_CACHE:-/tmp/attnplug}"
  PYTHONPATH="$PYTHONPATH:$ATTNPLUG_CACHE/site"
  for piece in .carry/*-[0-9]*; do
    if compgen -G "$piece/*.part*-of-*" >/dev/null; then
      "${PYTHON:-python3}" bench/carry_weights.py join "$piece" || exit
    fi
  done
fi
if ! "${PYTHON:-python3}" -c 'import gguf, platformdirs' 2>/dev/null; then
  echo "gguf and platformdirs are missing: carry .whl, which bench/gpu_pack.sh makes" >&2
  exit 2
fi
