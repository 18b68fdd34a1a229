"""What a request may ask, checked before the model sees it: transformers' server passes over some
of it in silence and ends others with an internal error."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any

from transformers import GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from attnplug.files import json_of

Check = tuple[Callable[[Any], bool], str]  # what a value must be, and how to say it

# Fields that would change the answer and that nothing here serves, with the values that ask for
# no change.
UNSERVED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}


def problem_of(body: Mapping[str, Any]) -> str:
    """What is wrong with a request, in a sentence, or ""."""
    try:
        if not _is_unicode(body):
            return "the request has a lone surrogate, needs text that is Unicode"
    except RecursionError:
        return "the request has objects in objects in objects, too deep to be read"
    for name, harmless in UNSERVED.items():
        asked = body.get(name)
        if asked is not None and asked not in harmless:
            instead = f"; leave it out or give {json.dumps(harmless[0])}" if harmless else ""
            return f"{name}={json.dumps(asked)} is not served here{instead}"
    for name, (is_valid, needed) in CHECKS.items():
        if name in body and body[name] is not None and not is_valid(body[name]):
            return f"{name} is {json.dumps(body[name])}, needs {needed}"
    problem = _config_problem(body.get("generation_config"), body.get("stream"))
    return f"generation_config: {problem}" if problem else ""


def _config_problem(text: str | None, streams: Any) -> str:
    """The same for a generation config, of which a request may set what CONFIG names: other fields
    could take any time or memory, or need what only code can give."""
    if text is None:
        return ""
    fields = json_of(text)
    for name, value in fields.items():
        if value is None or name in UNREAD or _is_default(name, value):
            continue
        if name not in CONFIG:
            return f"{name} is not served here"
        is_valid, needed = CONFIG[name]
        if not is_valid(value):
            return f"{name} is {json.dumps(value)}, needs {needed}"
    if streams and (fields.get("num_beams") or 1) > 1:
        return "num_beams is above 1, and beams are not streamed"
    try:
        GenerationConfig(**fields).validate()
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def _is_default(name: str, value: Any) -> bool:
    """Whether a generation config that does not name the field has that value."""
    plain = GenerationConfig._get_default_generation_params().get(name)
    return type(value) is type(plain) and value == plain


def length_problem(body: Mapping[str, Any], reads: int | None) -> str:
    """The same for how many tokens a request may come to; `reads`: those that the model reads. A
    row without an end would stay in the batch where its client has gone away."""
    limits = {name: body.get(name) for name in LENGTHS} | {NEW: _config_of(body).get(NEW)}
    for name, asked in limits.items():
        if type(asked) is int and asked > (MOST if reads is None else reads):
            told = "a row has an end" if reads is None else f"the model reads {reads:,}"
            return f"{name} is {asked}, and {told}"
    return ""


def vocabulary_problem(body: Mapping[str, Any], tokens: int) -> str:
    """The same for the tokens that a request names, of a vocabulary of `tokens`."""
    within = _config_of(body)
    words = within.get("bad_words_ids") or []
    named = {
        "logit_bias": map(int, body.get("logit_bias") or {}),
        **{name: within.get(name) or [] for name in SUPPRESSED},
        "bad_words_ids": (token for word in words for token in word),
    }
    for name, given in named.items():
        strange = next((token for token in given if token >= tokens), None)
        if strange is not None:
            return f"{name} has the token {strange}, and the model has {tokens:,} tokens"
    ends = within.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if len(ends) >= tokens and (within.get("num_beams") or 1) > 1:
        return f"eos_token_id has {len(ends):,} tokens; beams go on by another of the {tokens:,}"
    left_out = {token for name in SUPPRESSED for token in within.get(name) or []}
    if within.get("min_new_tokens"):
        left_out |= set(ends)
    if left_out.issuperset(range(tokens)):
        return f"generation_config leaves out each of the model's {tokens:,} tokens"
    return ""


def tokens_problem(input_ids: Any) -> str:
    """The same for the tokens of a prompt, of a tokenizer or a template that made none."""
    tokens = len(input_ids) if isinstance(input_ids, list) else input_ids.shape[-1]
    return "" if tokens else "the prompt comes to no tokens, and an answer needs one to begin with"


def _config_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request's generation config, which `problem_of` has nothing against."""
    text = body.get("generation_config")
    return {} if text is None else json_of(text)


def is_long(body: Any) -> bool:
    """Whether the tokens of a request's texts should be counted before it is taken."""
    return sum(map(len, _texts(body))) > SHORT


def texts_problem(body: Any, tokenizer: Any, reads: int) -> str:
    """The same for texts of more tokens than the model reads. Counts them piece by piece, and no
    further than it must."""
    tokens, pieces = 0, 0
    for text in _texts(body):
        for start in range(0, len(text), SHORT):
            tokens += len(tokenizer(text[start : start + SHORT])["input_ids"])
            pieces += 1
            if tokens > reads + 16 * pieces:  # where a piece ends, a token may have been cut
                return f"the prompt has more than the {reads:,} tokens that the model reads"
    return ""


def _texts(body: Any) -> Iterator[str]:
    left = [body]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            left.extend(value.values() if isinstance(value, dict) else value)


def messages_problem(body: Mapping[str, Any]) -> str:
    """The same for the messages of a chat."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return "messages is missing or empty, needs a list of at least one message"
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"messages[{place}] has no role, needs an object with role and content"
        content = message.get("content")
        if not _are_calls(message.get("tool_calls") or []):
            return f"messages[{place}].tool_calls needs functions with a name and arguments"
        if content is None and message.get("tool_calls"):
            continue
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        for part in parts:
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                return f"messages[{place}].content has a part without a type"
            if part["type"] != "text":
                return f"messages[{place}].content has a part of type {part['type']!r}: only text"
            if not isinstance(part.get("text"), str):
                return f"messages[{place}].content is no text, needs a string or parts of text"
    return ""


def prompt_problem(body: Mapping[str, Any]) -> str:
    """The same for the prompt of a text completion."""
    prompt = body.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        return "prompt is missing or empty, needs one string"
    return ""


def input_problem(body: Mapping[str, Any]) -> str:
    """The same for the input of a response."""
    asked = body.get("input")
    if isinstance(asked, list):
        for place, item in enumerate(asked):
            kind = item.get("type") if isinstance(item, dict) else None
            if kind not in (None, "message"):
                return f"input[{place}] has the type {json.dumps(kind)}: only messages"
        return messages_problem({"messages": asked}).replace("messages", "input")
    if not isinstance(asked, str) or not asked:
        return "input is missing or empty, needs a string or a list of messages"
    return ""


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= FLOAT_MAX


def _positive(value: Any) -> bool:
    return type(value) is int and value >= 1


def is_object(text: Any) -> bool:
    """Whether a value is the JSON text of an object."""
    try:
        return isinstance(text, str) and isinstance(json_of(text), dict)
    except ValueError:
        return False


def _is_bias(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return all(_is_token(key) and _number(by) and abs(by) <= 100 for key, by in value.items())


def _is_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _are_calls(value: Any) -> bool:
    if not _is_objects(value):
        return False
    named = [each.get("function") for each in value]
    if not all(isinstance(x, dict) and {"name", "arguments"} <= x.keys() for x in named):
        return False
    return all(isinstance(x["arguments"], dict) or is_object(x["arguments"]) for x in named)


def _is_for_templates(value: Any) -> bool:
    """Whether a value names variables of a chat template, and nothing that renders or tokenizes
    takes for itself: such a name would fail, cut the prompt, or bring a template along."""
    doors = (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
    taken = {name for door in doors for name in signature(door).parameters}
    taken |= {"messages", "load_audio_from_video"}  # jinja's own, and the handlers'
    return isinstance(value, dict) and not value.keys() & (taken - {"documents"})


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_token(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) < 10


def _is_unicode(body: Any) -> bool:
    """Whether all strings of a request can be written: JSON can escape what no text has."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_stop(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return bool(texts) and all(isinstance(text, str) and text for text in texts)


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_share(value: Any) -> bool:
    return _number(value) and 0 < value <= 1


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < INT32


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_count, value))


def _are_ends(value: Any) -> bool:
    return _count(value) or _are_tokens(value)


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_are_tokens, value))


LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
NEW = "max_new_tokens"
FLOAT_MAX, INT32 = sys.float_info.max, 2**31
SHORT = 1 << 17  # characters that take no time to speak of
MOST = 1 << 24  # tokens of an answer, of a model that does not say how many it reads
TOKENS: Check = (_positive, "an integer of at least 1")
CHECKS: dict[str, Check] = {
    "temperature": (lambda x: _number(x) and 0 <= x <= 2, "a number from 0 to 2"),
    "top_p": (_is_share, "a number above 0 and at most 1"),
    "frequency_penalty": (lambda x: _number(x) and -1 < x <= 2, "a number above -1, at most 2"),
    **dict.fromkeys(LENGTHS, TOKENS),
    "seed": (lambda x: type(x) is int and -(2**63) <= x < 2**64, "an integer of 64 bits"),
    "stream": (_is_bool, "true or false"),
    "stop": (_is_stop, "a string, or a list of strings"),
    "logit_bias": (_is_bias, "an object from token ids to numbers from -100 to 100"),
    "tools": (_is_objects, "a list of objects"),
    "chat_template_kwargs": (_is_for_templates, "an object of the template's own variables"),
    "suffix": (_is_text, "a string"),
    "parallel_tool_calls": (_is_bool, "true or false"),
    "instructions": (_is_text, "a string"),
    "generation_config": (is_object, "the JSON text of an object"),
}
BEAMS = 16
SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens")
COUNT: Check = (_count, "an integer from 0 to 2147483647")
# What a request's generation config may set, where requests are answered one by one.
CONFIG: dict[str, Check] = {
    NEW: TOKENS,
    "min_new_tokens": COUNT,
    "no_repeat_ngram_size": COUNT,
    "top_k": COUNT,
    "temperature": CHECKS["temperature"],
    "top_p": CHECKS["top_p"],
    "typical_p": CHECKS["top_p"],
    **dict.fromkeys(
        ("min_p", "epsilon_cutoff", "eta_cutoff"),
        (lambda x: _number(x) and 0 <= x < 1, "a number from 0, below 1"),
    ),
    # a smaller one takes scores out of float32's range
    "repetition_penalty": (lambda x: _number(x) and 1e-5 <= x <= 10, "a number from 0.00001 to 10"),
    "length_penalty": (lambda x: _number(x) and abs(x) <= 10, "a number from -10 to 10"),
    "num_beams": (lambda x: type(x) is int and 1 <= x <= BEAMS, f"an integer from 1 to {BEAMS}"),
    "early_stopping": (lambda x: type(x) is bool or x == "never", 'true, false or "never"'),
    "eos_token_id": (_are_ends, "a token, or a list of tokens"),
    **dict.fromkeys(SUPPRESSED, (_are_tokens, "a list of tokens")),
    "bad_words_ids": (_are_words, "a list of lists of tokens"),
    **dict.fromkeys(
        ("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values"),
        (_is_bool, "true or false"),
    ),
}
UNREAD = ("transformers_version", "_from_model_config")  # generate asks none of them
