"""`attnplug serve`: the policy is on the model that answers, which goes by the names that it was
given; bad requests are told, and a signal ends the process."""

import json
import re

import pytest
from hugging_face_cases import HELLO
from transformers import GenerationConfig
from transformers.utils.import_utils import is_serve_available
from typer.testing import CliRunner

import attnplug
from attnplug.cli import app
from attnplug.serve import hugging_face
from attnplug.serve.hugging_face.requests import (
    input_problem,
    length_problem,
    messages_problem,
    problem_of,
    vocabulary_problem,
)


def test_a_wrong_policy_does_not_wait_for_weights():
    result = CliRunner().invoke(app, ["serve", "nothing/here", "--policy", "gathr"])
    assert result.exit_code == 1 and "gathr" in result.output


def test_the_usage_names_attnplugs_own_flags():
    shown = re.sub(r"\x1b\[[\d;]*m", "", CliRunner().invoke(app, ["serve", "--help"]).output)
    assert "force_model" not in shown and "attnplug serve [OPTIONS]" in shown
    for flag in ("--served-model-name", "--host", "--port", "--policy"):
        assert flag in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(reasoning="maybe"), "reasoning is 'maybe', needs on or off or auto"),
        (dict(dtype="int3"), "dtype is 'int3', needs auto or float32"),
        (dict(chat_template_kwargs="[1]"), "needs the JSON text of an object"),
        (dict(port=65536), "port is 65536, needs 0 to 65535"),
        (dict(port=-1), "port is -1, needs 0"),
        (dict(port=10**20), "needs 0 to 65535"),
        (dict(host=""), "host is '', needs a name or an address"),
        (dict(host="a..b"), "needs a name or an address"),
        (dict(host="a" * 300), "needs a name or an address"),
        (dict(host="\udcff"), "needs a name or an address"),
        (dict(device="meta"), "device is 'meta', needs cpu or cuda"),
        (dict(device=""), "device is '', needs cpu or cuda"),
        (dict(device="cuda:99"), "device is 'cuda:99' but torch sees"),
        (dict(default_seed=1 << 64), "default_seed is 18446744073709551616, needs"),
        (dict(cb_block_size=0), "cb_block_size is 0, needs 1 to"),
        (dict(cb_num_blocks=-1), "cb_num_blocks is -1, needs 1 to"),
        (dict(cb_max_batch_tokens=0), "cb_max_batch_tokens is 0, needs 1 to"),
        (dict(cb_max_memory_percent=float("nan")), "cb_max_memory_percent is nan, needs more"),
        (dict(cb_max_memory_percent=1.5), "cb_max_memory_percent is 1.5, needs more than 0"),
    ],
)
def test_wrong_options_are_told_before_the_weights(options, message):
    with pytest.raises(attnplug.ArgumentError, match=message):
        hugging_face.Options(**options)


@pytest.mark.skipif(is_serve_available(), reason="the server's packages are here")
def test_missing_packages_are_named():
    with pytest.raises(attnplug.UnsupportedCallError, match=r"attnplug\[serve\]"):
        hugging_face.run("smollm2-135m", "dense")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (dict(temperature=-3), "temperature is -3, needs a number from 0 to 2"),
        (dict(temperature="hot"), 'temperature is "hot", needs'),
        (dict(temperature=True), "temperature is true, needs"),
        (dict(top_p=0), "top_p is 0, needs"),
        (dict(n=2), "n=2 is not served here; leave it out or give 1"),
        (dict(logprobs=True), "logprobs=true is not served here"),
        (dict(response_format={"type": "json_object"}), "response_format="),
        (dict(max_tokens=0), "max_tokens is 0, needs an integer of at least 1"),
        (dict(max_completion_tokens=2.5), "max_completion_tokens is 2.5"),
        (dict(stop=[""]), "stop is"),
        (dict(logit_bias={"a": 1}), "logit_bias is"),
        (dict(generation_config="{"), "generation_config is"),
        (dict(generation_config='{"max_new_tokens": -1}'), "generation_config: max_new_tokens is"),
        (
            dict(generation_config='{"compile_config": {"backend": 3, "x": 1}}'),
            "generation_config:",
        ),
        (dict(frequency_penalty=-1), "frequency_penalty is -1"),
        (dict(logit_bias={"\u00b2": 1}), "logit_bias is"),
        (dict(seed=2**64), "seed is 18446744073709551616, needs an integer of 64 bits"),
        (dict(seed=-(2**63) - 1), "seed is -9223372036854775809, needs"),
        (dict(temperature=10**400), "temperature is 1000"),
        (dict(logit_bias={"70": -(10**400)}), "logit_bias is"),
        (dict(stop="\ud800"), "the request has a lone surrogate"),
        (dict(messages=[dict(role="user", content="\ud800")]), "the request has a lone surrogate"),
    ],
)
def test_what_is_not_served_is_told(body, told):
    assert problem_of(body).startswith(told)


@pytest.mark.parametrize("calls", [5, [5], [{}], [dict(function={})], [dict(function=3)]])
def test_calls_of_tools_without_a_name_are_told(calls):
    message = dict(role="assistant", tool_calls=calls)
    assert messages_problem(dict(messages=[message])).startswith("messages[0].tool_calls needs")
    message["tool_calls"] = [dict(function=dict(name="add", arguments="{}"))]
    assert not messages_problem(dict(messages=[message]))


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_more_tokens_than_a_model_reads_are_told(name):
    """A client that goes away would leave a row in the batch that never ends."""
    assert length_problem({name: 1025}, 1024).startswith(f"{name} is 1025, and the model reads 1,0")
    assert length_problem({name: 10**30}, None) and not length_problem({name: None}, 1024)
    assert not length_problem({name: 1024}, 1024) and not length_problem({name: 1025}, None)
    config = dict(generation_config='{"max_new_tokens": 1025}')
    assert length_problem(config, 1024).startswith("max_new_tokens is 1025, and the model reads")


def test_what_changes_nothing_is_served():
    asked = dict(n=1, temperature=0, top_p=1, logprobs=False, stop=None, presence_penalty=0.0)
    asked |= dict(user="me", stream_options={"include_usage": True}, max_tokens=3, seed=-1)
    assert problem_of(asked | dict(response_format={"type": "text"}, logit_bias={"3": -1})) == ""
    assert messages_problem(dict(messages=HELLO)) == input_problem(dict(input="Hello")) == ""
    parts = [dict(role="user", content=[dict(type="text", text="Hello")])]
    assert messages_problem(dict(messages=parts)) == input_problem(dict(input=parts)) == ""


CONFIGS = [
    (dict(num_beams=10**6), "num_beams is 1000000, needs an integer from 1 to 16"),
    (dict(num_return_sequences=2), "num_return_sequences is not served here"),
    (dict(return_dict_in_generate=True), "return_dict_in_generate is not"),
    (dict(cache_implementation="quantized"), "cache_implementation is not"),
    (dict(max_cache_len=10**9), "max_cache_len is not"),
    (dict(prompt_lookup_num_tokens=10**9), "prompt_lookup_num_tokens is not"),
    (dict(bad_words_ids=[[]]), "bad_words_ids is [[]], needs a list of lists of tokens"),
    (dict(suppress_tokens=3), "suppress_tokens is 3, needs a list of tokens"),
    (dict(penalty_alpha=0.6), "penalty_alpha is not"),
    (dict(validate=5), "validate is not"),
    (dict(eos_token_id="x"), 'eos_token_id is "x", needs'),
    (dict(repetition_penalty=0), "repetition_penalty is 0, needs"),
    (dict(temperature=10**400), "temperature is 1000"),
]


@pytest.mark.parametrize(("config", "told"), CONFIGS, ids=lambda each: next(iter(each), ""))
def test_what_a_generation_config_must_not_ask_is_told(config, told):
    """A million beams end the process for want of memory; others ended in internal errors."""
    assert problem_of(dict(generation_config=json.dumps(config))).startswith(
        f"generation_config: {told}"
    )


def test_a_generation_config_written_by_transformers_is_served():
    config = GenerationConfig(
        do_sample=True, temperature=0.5, top_k=5, top_p=0.9, min_p=0.1, max_new_tokens=9,
        num_beams=2, repetition_penalty=1.1, eos_token_id=[3, 4], length_penalty=2.0,
        suppress_tokens=[5], bad_words_ids=[[6, 7]],
    )  # fmt: skip
    for diff in (True, False):
        body = dict(generation_config=config.to_json_string(use_diff=diff))
        assert problem_of(body) == ""
        assert "beams are not streamed" in problem_of(body | dict(stream=True))


@pytest.mark.parametrize("name", ["logit_bias", "suppress_tokens", "bad_words_ids"])
def test_tokens_that_the_model_has_not_are_told(name):
    def asks(token):
        config = {"suppress_tokens": [3, token], "bad_words_ids": [[3], [4, token]]}
        if name == "logit_bias":
            return {name: {str(token): 1}}
        return {"generation_config": json.dumps({name: config[name]})}

    told = f"{name} has the token 300, and the model has 300 tokens"
    assert vocabulary_problem(asks(300), 300) == told and problem_of(asks(300)) == ""
    assert vocabulary_problem(asks(299), 300) == vocabulary_problem({}, 300) == ""
