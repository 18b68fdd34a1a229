"""The bytes of tokens, as a tokenizer would join them: token strings have a spelling of their own
(byte-level letters, "▁" for a space, "<0x0A>"), and decoding tokens one by one loses characters
that two of them share."""

import re
from collections.abc import Iterable
from typing import Any

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Any, ids: Iterable[int]) -> dict[int, bytes]:
    """Token id -> bytes, for ids of a tokenizer of transformers; an id that it does not know has
    none."""
    ids = sorted({int(i) for i in ids})
    names = tokenizer.convert_ids_to_tokens(ids)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    letters = _byte_letters() if _is_byte_level(tokenizer) else None
    pieces = {}
    for i, name in zip(ids, names, strict=True):
        if name is None:
            pieces[i] = b""
        elif i in added:
            pieces[i] = name.encode()
        elif letters is not None and all(letter in letters for letter in name):
            pieces[i] = bytes(letters[letter] for letter in name)
        elif BYTE.fullmatch(name):
            pieces[i] = bytes.fromhex(name[3:5])
        else:
            pieces[i] = name.replace("▁", " ").encode()
    return pieces


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether token strings are spelt in GPT-2's byte letters: a space is "Ġ", or alone a token."""
    vocabulary = tokenizer.get_vocab()
    return "Ġ" in vocabulary and "Ċ" in vocabulary


def _byte_letters() -> dict[str, int]:
    """GPT-2's letter of each byte: itself where it prints, else one from 256 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in prints]
    letters = {chr(byte): byte for byte in prints}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}
