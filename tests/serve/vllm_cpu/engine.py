"""python engine.py MODEL JOBS: vLLM's CPU engine with attnplug, for test_vllm_engine.py.

JOBS is a JSON file, a list of {"attnplug", "options", "turns"}: an engine for each, with attnplug's
options and more of `LLM`, that answers the turns one after the other, each a list of prompts with
the tokens to make, and perhaps what each request says of its trace. Prints one JSON line a job: the
tokens of each prompt, and how many of its tokens came from the prefix cache. To the file of a job's
"report" it writes what attnplug's report says after each turn. Where there is no vLLM
for CPUs it exits with 9.
"""

import dataclasses
import json
import sys
from pathlib import Path

from attnplug.serve.vllm import REPORTING, report

try:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
except ModuleNotFoundError as error:
    if error.name != "vllm":
        raise
    sys.exit(9)
if not current_platform.is_cpu():
    sys.exit(9)

COMMON = dict(
    skip_tokenizer_init=True,
    dtype="float32",
    max_model_len=2048,
    enforce_eager=True,
    enable_prefix_caching=True,
    seed=0,
    block_size=16,
    max_num_seqs=4,
    compilation_config={"custom_ops": ["none"]},  # torch's own, for any torch
    worker_extension_cls=REPORTING,
)


def main() -> None:
    model, jobs = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    for job in jobs:
        options = COMMON | job["options"]
        llm = LLM(model=model, additional_config={"attnplug": job["attnplug"]}, **options)
        # vLLM found attnplug's own entry point, besides the tests' plugin.
        assert AttentionBackendEnum.CUSTOM.get_path() == "attnplug.serve.vllm.backend.PlugBackend"
        outputs, reports = [], []
        for turn in job["turns"]:
            prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens in turn["prompts"]]
            common = dict(temperature=0, max_tokens=turn["tokens"], ignore_eos=True)
            asked = turn.get("traces", [True] * len(prompts))
            sampling = [
                SamplingParams(**common, detokenize=False, extra_args={"attnplug_trace": name})
                for name in asked
            ]
            for output in llm.generate(prompts, sampling, use_tqdm=False):
                made = list(output.outputs[0].token_ids)
                outputs.append({"tokens": made, "cached": output.num_cached_tokens})
            if "report" in job:
                reports.append(dataclasses.asdict(report(llm)))
        if "report" in job:
            assert not any(
                x["prefill"] or x["decode"] for x in dataclasses.asdict(report(llm))["last"]
            )
            Path(job["report"]).write_text(json.dumps(reports))
        print("JOB", json.dumps(outputs), flush=True)
        llm.llm_engine.engine_core.shutdown()
        del llm


if __name__ == "__main__":
    main()
