"""The grammar of policy strings: "momo(gamma=16)+gather(k=32)"."""

import ast
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from attnplug.errors import PolicyError
from attnplug.models.pretrained import did_you_mean
from attnplug.policies.base import SLOTS, Phase
from attnplug.policies.policy import Policy


def parse_policy(text: str, methods: Mapping[str, type[Phase]]) -> Policy:
    """The Policy that a string such as "momo(gamma=16)+gather(k=32)" describes.

    Terms are joined with "+"; each is a method's name, with options as Python keywords. A method
    takes the phases that it serves and no other term claims; the rest is dense. Phases can also be
    named: "prefill=momo, decode=dense, trace=stream".
    """
    if not text.strip():
        raise PolicyError(f"the policy is empty; there are {', '.join(sorted(methods))}")
    whole = _parse_call(text)
    if whole.keywords and not whole.args:
        named = _keywords(whole, text)
        if not named.keys() <= SLOTS:
            raise PolicyError(
                f"policy {text!r}: a phase is prefill, decode or trace, not "
                f"{', '.join(sorted(named.keys() - SLOTS))}"
            )
        return Policy(**{slot: _parse_term(node, text, methods) for slot, node in named.items()})
    if len(whole.args) != 1 or whole.keywords:
        raise PolicyError(f"policy {text!r}: join methods with '+', as in momo+dense")
    terms = [_parse_term(node, text, methods) for node in _terms(whole.args[0])]
    slots: dict[str, Phase] = {}
    for phase in sorted(terms, key=lambda term: len(term.phases)):
        free = [slot for slot in sorted(phase.phases) if slot not in slots]
        if not free:
            taken = slots[min(phase.phases)]
            raise PolicyError(
                f"policy {text!r}: {taken.name} and {phase.name} both want to be the "
                f"{'/'.join(sorted(phase.phases))} method; keep one"
            )
        slots.update(dict.fromkeys(free, phase))
    return Policy(**slots)


def _parse_call(text: str) -> ast.Call:
    """The text as the arguments of a call."""
    try:
        node = ast.parse(f"_({text.strip()})", mode="eval").body
    except (SyntaxError, ValueError) as error:  # ValueError: NUL, or no UTF-8
        why = getattr(error, "msg", "it is no text")
        raise PolicyError(
            f"policy {text!r} cannot be read ({why}); write for example "
            '"momo(gamma=16)" or "momo+dense"'
        ) from error
    if not isinstance(node, ast.Call):
        raise PolicyError(f"policy {text!r} cannot be read; write for example 'momo+dense'")
    return node


def _ask(name: str, known: Iterable[str]) -> str:
    """What follows a message about a name that there is not: ". Did you mean gather?", or ""."""
    close = did_you_mean(name, known).strip()
    return f". {close}" if close else ""


def _keywords(call: ast.Call, text: str) -> dict[str, ast.expr]:
    """Each keyword's value. Python's parser takes a name twice, and `**` without a name."""
    named: dict[str, ast.expr] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise PolicyError(f"policy {text!r}: write the options out, as in momo(gamma=16)")
        if keyword.arg in named:
            raise PolicyError(f"policy {text!r}: {keyword.arg} is given twice")
        named[keyword.arg] = keyword.value
    return named


def _terms(node: ast.expr) -> list[ast.expr]:
    terms: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        terms.insert(0, node.right)
        node = node.left
    return [node, *terms]


def _parse_term(node: ast.expr, text: str, methods: Mapping[str, type[Phase]]) -> Phase:
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    if not isinstance(call.func, ast.Name):
        raise PolicyError(f"policy {text!r}: {ast.unparse(node)!r} is not a method's name")
    if call.func.id not in methods:
        raise PolicyError(
            f"policy {text!r}: there is no method {call.func.id!r}; there are "
            f"{', '.join(sorted(methods))}{_ask(call.func.id, methods)}"
        )
    if call.args:
        raise PolicyError(f"policy {text!r}: options need their names, as in momo(gamma=16)")
    cls = methods[call.func.id]
    known = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    options: dict[str, Any] = {}
    for name, value in _keywords(call, text).items():
        if name not in known:
            raise PolicyError(
                f"policy {text!r}: {cls.name} has no option {name!r}; it has "
                f"{', '.join(known) or 'none'}{_ask(name, known)}"
            )
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, TypeError) as error:  # TypeError: a list in a set
            raise PolicyError(
                f"policy {text!r}: {name}={ast.unparse(value)} is not a literal"
            ) from error
    return cls(**options)
