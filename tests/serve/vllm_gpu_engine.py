"""python vllm_gpu_engine.py JOB: one vLLM engine on GPUs, for tests/serve/test_vllm_gpu.py.

JOB is a JSON file {"model", "policy" or null for stock, "options", "turns"}; each turn has prompts,
as lists of tokens, and how many tokens to make. Prints one JSON line: of each prompt the tokens,
the two likeliest tokens of each place with their log-probabilities, and how many tokens of the
prompt came from the prefix cache. A line COMPILED names each kernel that Triton compiles while
requests are served.
"""

import json
import sys
from pathlib import Path

COMMON = dict(
    skip_tokenizer_init=True,
    max_model_len=8192,
    max_num_seqs=8,
    # Not measured: engines start side by side, and vLLM stops where one frees memory meanwhile.
    kv_cache_memory_bytes=4 << 30,
    enable_prefix_caching=True,
    seed=0,
    block_size=16,
    disable_custom_all_reduce=True,
    compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]},
)


def tell_of_kernels() -> None:
    """Have Triton print what it compiles from here on."""
    from triton import knobs

    def told(*, fn, repr, **_) -> None:
        print("COMPILED", fn.module, repr, flush=True)

    knobs.runtime.jit_post_compile_hook = told


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    job = json.loads(Path(sys.argv[1]).read_text())
    chosen = {"attention_backend": "FLASH_ATTN"}
    if job["policy"] is not None:
        chosen = {
            "attention_backend": "CUSTOM",
            "additional_config": {"attnplug": job["policy"]},
        }
    llm = LLM(model=job["model"], **(COMMON | job["options"] | chosen))
    tell_of_kernels()
    outputs = []
    for turn in job["turns"]:
        prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens in turn["prompts"]]
        sampling = SamplingParams(
            temperature=0, max_tokens=turn["tokens"], ignore_eos=True, detokenize=False, logprobs=5
        )
        for output in llm.generate(prompts, sampling, use_tqdm=False):
            made = output.outputs[0]
            best = [{t: p.logprob for t, p in place.items()} for place in made.logprobs]
            outputs.append(
                {"tokens": list(made.token_ids), "best": best, "cached": output.num_cached_tokens}
            )
    print("JOB", json.dumps(outputs), flush=True)


if __name__ == "__main__":
    main()
