"""bench/eval_long.sh: what it asks of which model, on which GPU, and what it leaves behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
# in the place of attnplug eval; all else is Python's
PYTHON = """#!/bin/bash
case "$*" in
  "{program} eval"*) ;;
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


@pytest.mark.parametrize(
    ("study", "program", "models"),
    [
        ("as-written", "-m attnplug", {"gemma3-270m@64k": 65536, "gemma3-270m@128k": 131072}),
        ("rivals", "bench/rivals.py", {"gemma3-270m": 32768}),
    ],
)
def test_each_gpu_looks_first_and_then_asks_what_the_model_can_do(tmp_path, study, program, models):
    commands = {
        "python3": PYTHON.format(python=sys.executable, folder=tmp_path, program=program),
        "nvidia-smi": "#!/bin/bash\necho one; echo two\n",
        "nvidia-cuda-mps-control": "#!/bin/bash\n",
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    out = tmp_path / "out"
    out.mkdir()
    here = os.environ | {"OUT": str(out), "PROCESSES": "1", "FRESH": "1"}
    if study != "as-written":
        here["STUDY"] = study
    here["PATH"] = f"{tmp_path}:{here['PATH']}"
    command = ["bash", BENCH / "eval_long.sh", "60", ",".join(models)]
    subprocess.run(command, check=True, env=here)
    wanted = {f"{study}-{model.replace('@', '-')}.jsonl" for model in models}
    assert {path.name for path in out.glob("*.jsonl")} == wanted
    calls = (tmp_path / "calls").read_text().splitlines()
    for gpu, (model, n) in enumerate(models.items()):
        look, asked = (call for call in calls if call.startswith(f"{gpu} "))
        assert all(f" {model} " in call and f"--lengths {n}" in call for call in (look, asked))
        assert look.count("--policy") == 1 and "--trials 12" in look and "needle-prose" in look
        one = "gvr(min_tokens=0)" if study == "as-written" else "quest(like='sketch')"
        assert one in asked and "needle-noise" not in asked and "needle-prose" in asked
        assert ("--batch 2" in asked) == (model == "gemma3-270m@128k")
