"""bench/eval_long.sh: what it asks of which model, on which GPU, and what it leaves behind."""

import os
import subprocess
import sys
from collections.abc import Iterable
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
MPS = """#!/bin/bash
echo "${{CUDA_VISIBLE_DEVICES-all}}" >>{folder}/mps
"""


def calls_of(folder: Path, program: str, models: Iterable[str], **given: str) -> list[str]:
    """The evaluations that the script starts on a machine of two GPUs: each one's GPU and
    arguments."""
    commands = {
        "python3": PYTHON.format(python=sys.executable, folder=folder, program=program),
        "nvidia-smi": "#!/bin/bash\necho one; echo two\n",
        "nvidia-cuda-mps-control": MPS.format(folder=folder),
    }
    for name, text in commands.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    out = folder / "out"
    out.mkdir()
    here = os.environ | {"OUT": str(out), "PROCESSES": "1", "FRESH": "1"} | given
    here["PATH"] = f"{folder}:{here['PATH']}"
    command = ["bash", BENCH / "eval_long.sh", "60", ",".join(models)]
    subprocess.run(command, check=True, env=here)
    return (folder / "calls").read_text().splitlines()


def test_a_model_has_the_gpus_that_are_given_and_mps_sees_all(tmp_path):
    """MPS numbers anew the GPUs that it is started with."""
    given = {"CUDA_VISIBLE_DEVICES": "2,3"}
    calls = calls_of(tmp_path, "-m attnplug", ["gemma3-270m@64k"], **given)
    assert sorted(call.split()[0] for call in calls) == ["2", "2", "3", "3"]
    assert (tmp_path / "mps").read_text().splitlines()[0] == "all"


@pytest.mark.parametrize(
    ("study", "program", "models"),
    [
        ("as-written", "-m attnplug", {"gemma3-270m@64k": 65536, "gemma3-270m@128k": 131072}),
        ("rivals", "bench/rivals.py", {"gemma3-270m": 32768}),
    ],
)
def test_each_gpu_looks_first_and_then_asks_what_the_model_can_do(tmp_path, study, program, models):
    given = {} if study == "as-written" else {"STUDY": study}
    calls = calls_of(tmp_path, program, models, **given)
    wanted = {f"{study}-{model.replace('@', '-')}.jsonl" for model in models}
    assert {path.name for path in (tmp_path / "out").glob("*.jsonl")} == wanted
    for gpu, (model, n) in enumerate(models.items()):
        look, asked = (call for call in calls if call.startswith(f"{gpu} "))
        assert all(f" {model} " in call and f"--lengths {n}" in call for call in (look, asked))
        assert look.count("--policy") == 1 and "--trials 12" in look and "needle-prose" in look
        one = "gvr(min_tokens=0)" if study == "as-written" else "quest(like='sketch')"
        assert one in asked and "needle-noise" not in asked and "needle-prose" in asked
        assert ("--batch 2" in asked) == (model == "gemma3-270m@128k")
