"""bench/eval_long.sh: what it asks of which model, on which GPU, and what it leaves behind."""

import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parent.parent / "bench"
# in the place of attnplug eval; all else is Python's
PYTHON = """#!/bin/bash
case "$*" in
  "-m attnplug eval"*) ;;
  *pretrained*) exit ;;
  *) exec {python} "$@" ;;
esac
echo "$CUDA_VISIBLE_DEVICES $*" >>{folder}/calls
while [ "$1" != --out ]; do shift; done
for task in needle-prose needle-noise; do
  score=$([ $task = needle-prose ] && echo 1 || echo 0.1)
  echo '{{"task": "'$task'", "policy": "stock", "score": '$score'}}' >>"$2/samples.jsonl"
done
"""


def test_each_gpu_looks_first_and_then_asks_what_the_model_can_do(tmp_path):
    commands = {
        "python3": PYTHON.format(python=sys.executable, folder=tmp_path),
        "nvidia-smi": "#!/bin/bash\necho one; echo two\n",
        "nvidia-cuda-mps-control": "#!/bin/bash\n",
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    out = tmp_path / "out"
    out.mkdir()
    here = os.environ | {"OUT": str(out), "PROCESSES": "1", "FRESH": "1"}
    here["PATH"] = f"{tmp_path}:{here['PATH']}"
    models = "gemma3-270m@64k,gemma3-270m@128k"
    subprocess.run(["bash", BENCH / "eval_long.sh", "60", models], check=True, env=here)
    assert {path.name for path in out.glob("*.jsonl")} == {
        "as-written-gemma3-270m-64k.jsonl",
        "as-written-gemma3-270m-128k.jsonl",
    }
    calls = (tmp_path / "calls").read_text().splitlines()
    for gpu, model, n in (("0", "gemma3-270m@64k", 65536), ("1", "gemma3-270m@128k", 131072)):
        look, study = (call for call in calls if call.startswith(f"{gpu} "))
        assert all(f" {model} " in call and f"--lengths {n} " in call for call in (look, study))
        assert look.count("--policy") == 1 and "--trials 12" in look and "needle-noise" in look
        assert "gvr(min_tokens=0)" in study and "needle-noise" not in study
        assert ("--batch 2" in study) == (gpu == "1")
