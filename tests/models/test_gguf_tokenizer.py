"""Tokenizers and weights out of tiny GGUF files that the tests write themselves."""

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnplug.models.gguf_tokenizer import read_tokenizer
from attnplug.models.pretrained import _convert

CONTROL, NORMAL, BYTE = int(TokenType.CONTROL), int(TokenType.NORMAL), int(TokenType.BYTE)


def byte_level(writer):
    """SmolLM2's kind: bos 0, eos 1, letters, digits, one merge, and a merge across two digits."""
    pieces = ["<s>", "</s>", *"abc12", "Ġ", "ab", "12"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(pieces)
    writer.add_token_types([CONTROL, CONTROL] + [NORMAL] * (len(pieces) - 2))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}</s>")


def sentence_piece(writer):
    """Gemma's kind: merges follow from the pieces, the best score first; bytes as a last resort."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<0xC3>", "<0xB6>", *"abc▁", "bc", "ab", "▁a"]
    scores = [0.0] * 10 + [-1.0, -2.0, -3.0]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    types = [CONTROL] * 4 + [BYTE] * 2 + [NORMAL] * (len(pieces) - 6)
    writer.add_token_types(types)
    writer.add_add_bos_token(True)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)


def write(path, *parts):
    writer = GGUFWriter(path, "llama")
    for part in parts:
        part(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_byte_level_merges_and_splits_digits(tmp_path):
    tokenizer = read_tokenizer(write(tmp_path / "m.gguf", byte_level))
    assert tokenizer.tokenize("ab 12c") == ["ab", "Ġ", "1", "2", "c"]
    assert tokenizer.decode(tokenizer("ab 12c</s>").input_ids, skip_special_tokens=True) == "ab 12c"
    assert tokenizer("a").input_ids == [2]  # no bos unless the file asks for one
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<s>",
        "</s>",
        "</s>",
    )
    assert tokenizer.padding_side == "left"
    turn = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(turn, tokenize=False) == "ab</s>"


def test_sentence_piece_merges_the_best_score_first(tmp_path):
    tokenizer = read_tokenizer(write(tmp_path / "m.gguf", sentence_piece))
    # bc (-1) is merged before ab (-2), and that before ▁a (-3).
    assert tokenizer.tokenize("abc ab a") == ["a", "bc", "▁", "ab", "▁a"]
    assert tokenizer.tokenize("aö") == ["a", "<0xC3>", "<0xB6>"]
    assert tokenizer("ab").input_ids == [2, 11]
    assert tokenizer.decode(tokenizer("abc aö").input_ids, skip_special_tokens=True) == "abc aö"


def test_an_unknown_kind_is_refused(tmp_path):
    def wordpiece(writer):
        writer.add_tokenizer_model("bert")
        writer.add_token_list(["a"])

    with pytest.raises(ValueError, match="model is 'bert', needs 'gpt2' or 'llama'"):
        read_tokenizer(write(tmp_path / "m.gguf", wordpiece))


def tiny_llama(writer):
    """One layer, 2 heads over 1 KV head, width 8; weights that float16 rounds."""
    rng = np.random.default_rng(0)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(10)
    writer.add_tensor("token_embd.weight", rng.standard_normal((10, 8), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    shapes = dict(attn_q=(8, 8), attn_k=(4, 8), attn_v=(4, 8), attn_output=(8, 8))
    shapes |= dict(ffn_gate=(16, 8), ffn_up=(16, 8), ffn_down=(8, 16))
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", rng.standard_normal(shape, np.float32))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(8, np.float32))


def test_a_converted_checkpoint_is_plain_and_rounded_once(tmp_path):
    gguf = write(tmp_path / "m.gguf", byte_level, tiny_llama)
    target = _convert("tiny", gguf, tmp_path / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    direct = AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file="m.gguf", dtype=torch.float32
    )
    assert not hasattr(model.config, "quantization_config")
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert tokenizer.tokenize("ab12") == ["ab", "1", "2"]
    weights = direct.state_dict()
    for name, got in model.state_dict().items():
        assert torch.equal(got, weights[name].half().float()), name
    ids = tokenizer("ab 12", return_tensors="pt").input_ids
    torch.testing.assert_close(model(ids).logits, direct(ids).logits, rtol=0, atol=0.02)
