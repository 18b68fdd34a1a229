"""A tokenizer from a GGUF file's metadata.

transformers can do this too, but its result depends on its version (5.17 splits Gemma's text into
characters and takes bos for SmolLM2's eos), and a cached checkpoint must not. Two kinds are known:
byte-level BPE with its merges ("gpt2": SmolLM2), and SentencePiece BPE ("llama": Gemma), whose
merges follow from the pieces: two pieces merge when their concatenation is a piece, the one with
the highest score (the lowest id among equals) first."""

from pathlib import Path
from typing import Any

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

SPACE = "▁"


def read_tokenizer(path: Path) -> Any:
    """The `PreTrainedTokenizerFast` that a GGUF describes, padding on the left."""
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(path).fields

    def read(key: str, default: Any = None) -> Any:
        field = fields.get(f"tokenizer.{key}")
        return default if field is None else field.contents()

    pieces = read("ggml.tokens")
    kind = read("ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(pieces, read("ggml.merges"))
    elif kind == "llama":
        tokenizer = _sentence_piece(pieces, read("ggml.scores"))
    else:
        raise ValueError(f"{path}: tokenizer.ggml.model is {kind!r}, needs 'gpt2' or 'llama'")
    _add_special(tokenizer, pieces, read("ggml.token_type"))
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    names = {f"{role}_token": pieces[read(f"ggml.{key}_token_id")] for role, key in roles.items()}
    if read("ggml.add_bos_token", False):
        bos = names["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, pieces.index(bos))],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=read("chat_template"),
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **names,
    )


def _byte_level(pieces: list[str], merges: list[str]) -> Tokenizer:
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    tokenizer = Tokenizer(BPE(vocabulary, pairs))
    # GGUF names the splitter "smollm": digits alone, then GPT-2's pattern.
    digits = pre_tokenizers.Digits(individual_digits=True)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(pieces: list[str], scores: list[float]) -> Tokenizer:
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = []
    for piece, score in zip(pieces, scores, strict=True):
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        local = [s for s in splits if s[0] in vocabulary and s[1] in vocabulary]
        local.sort(key=lambda s: (vocabulary[s[0]], vocabulary[s[1]]))
        merges += [(-score, split) for split in local]
    merges.sort(key=lambda merge: merge[0])
    pairs = [split for _, split in merges]
    tokenizer = Tokenizer(
        BPE(vocabulary, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _add_special(tokenizer: Tokenizer, pieces: list[str], types: list[int]) -> None:
    """Control tokens vanish on decoding; user-defined ones only bypass the merges."""
    # In one call each: every call builds the matcher of all added tokens anew.
    control = [p for p, t in zip(pieces, types, strict=True) if t == TokenType.CONTROL]
    defined = [p for p, t in zip(pieces, types, strict=True) if t == TokenType.USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(p, normalized=False, special=True) for p in control])
    tokenizer.add_tokens([AddedToken(p, normalized=False, special=False) for p in defined])
