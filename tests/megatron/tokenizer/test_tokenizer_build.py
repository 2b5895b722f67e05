"""What `build_tokenizer` promises: ids that megatron-core's datasets can use, or one sentence."""

import base64
import json
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from hetero.errors import UserError
from megatron.hetero.tokenizer.build import NO_PAD, build_tokenizer
from megatron.hetero.tokenizer.vocabulary import embedding_rows, padded_vocab_size
from tests.megatron.tokenizer.tiny_tokenizers import train_gpt2, train_sentencepiece
from tests.sentences import sentence_of

TEXT = "héllo  wörld\n漢字 🙂 12"


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory) -> str:
    return train_sentencepiece(tmp_path_factory.mktemp("sp") / "tiny")


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory) -> dict[str, str]:
    return train_gpt2(tmp_path_factory.mktemp("gpt2"), ["hello world"] * 5, vocab_size=270)


@pytest.fixture(scope="module")
def huggingface_directory(gpt2_files) -> str:
    """The same tokenizer as `save_pretrained` would leave it on disk."""
    directory = Path(gpt2_files["vocab_file"]).parent
    config = '{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}'
    Path(directory, "tokenizer_config.json").write_text(config)
    return str(directory)


def build(kind: str, **flags):
    return build_tokenizer(Namespace(tokenizer_type=kind, **flags))


def assert_fits_datasets(tokenizer) -> None:
    """What megatron-core's GPTDataset reads: eod, pad, vocab_size and a JSON description."""
    ids = tokenizer.tokenize(TEXT)
    assert tokenizer.detokenize(ids) == TEXT
    assert tokenizer.detokenize(numpy.array(ids, dtype=numpy.int32)) == TEXT
    assert tokenizer.detokenize(torch.tensor(ids)) == TEXT
    assert 0 <= min(ids) <= max(ids) < tokenizer.vocab_size
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.pad == NO_PAD or 0 <= tokenizer.pad < tokenizer.vocab_size
    assert json.loads(json.dumps(tokenizer, default=lambda it: it.unique_identifiers))
    assert pickle.loads(pickle.dumps(tokenizer)).tokenize(TEXT) == ids


@pytest.mark.parametrize(
    "kind", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"]
)
def test_sentencepiece_ends_documents_with_its_end_of_sentence_token(kind, sentencepiece_model):
    tokenizer = build(kind, tokenizer_model=sentencepiece_model)
    assert_fits_datasets(tokenizer)
    assert (tokenizer.eod, tokenizer.pad, tokenizer.vocab_size) == (2, NO_PAD, 280)


def test_sentencepiece_uses_the_special_tokens_of_the_model(tmp_path, sentencepiece_model):
    model = train_sentencepiece(tmp_path / "padded", pad_id=3)
    assert build("SentencePieceTokenizer", tokenizer_model=model).pad == 3
    assert [path.name for path in tmp_path.iterdir()] == ["padded.model"], "nothing beside it"
    model = train_sentencepiece(tmp_path / "endless", eos_id=-1)
    with pytest.raises(UserError, match=r"endless\.model has no end-of-document token"):
        build("SentencePieceTokenizer", tokenizer_model=model)
    own: dict = {"tokenizer_special_tokens": ["<tool>"]}
    with pytest.raises(UserError, match="only with --tokenizer-sentencepiece-legacy; add it"):
        build("SentencePieceTokenizer", tokenizer_model=sentencepiece_model, **own)
    own["tokenizer_sentencepiece_legacy"] = True
    legacy = build("SentencePieceTokenizer", tokenizer_model=sentencepiece_model, **own)
    assert (legacy.eod, legacy.vocab_size) == (2, 281)


def test_huggingface_directory_is_read_without_a_network(monkeypatch, huggingface_directory):
    tokenizer = build("HuggingFaceTokenizer", tokenizer_model=huggingface_directory)
    assert_fits_datasets(tokenizer)
    assert tokenizer.eod == 0
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install '\.\[hf\]'"):
        build("HuggingFaceTokenizer", tokenizer_model=huggingface_directory)


def test_gpt2_takes_its_vocabulary_and_merges(gpt2_files, huggingface_directory):
    first, second = (build("GPT2BPETokenizer", **gpt2_files) for _ in range(2))
    assert_fits_datasets(first)
    reference = build("HuggingFaceTokenizer", tokenizer_model=huggingface_directory)
    assert first.tokenize(TEXT) == reference.tokenize(TEXT)
    # Described by the user's files, so cached indexes are found again.
    assert first.unique_identifiers == second.unique_identifiers
    assert first.unique_identifiers["vocab_file"] == gpt2_files["vocab_file"]


def test_null_tokenizer_counts_its_end_token_on_top():
    tokenizer = build("NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (101, 100, NO_PAD)
    assert tokenizer.detokenize(tokenizer.tokenize("7 8")) == "7 8"


@pytest.fixture
def tiktoken_file(tmp_path) -> str:
    """A TikTokenizer vocabulary of the 256 bytes, so that a letter spans several tokens."""
    pytest.importorskip("tiktoken")
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(bytes([rank])).decode(), "token_str": ""}
        for rank in range(256)
    ]
    path = tmp_path / "bytes.json"
    path.write_text(json.dumps(entries))
    return str(path)


def test_tiktoken_joins_letters_that_span_tokens(tiktoken_file):
    tokenizer = build("TikTokenizer", tokenizer_model=tiktoken_file)
    assert_fits_datasets(tokenizer)
    assert tokenizer.vocab_size == 256 + 1000
    with pytest.raises(UserError, match="at most 1256"):
        build("TikTokenizer", tokenizer_model=tiktoken_file, vocab_size=2000)


def test_a_damaged_file_is_named(tmp_path, sentencepiece_model, gpt2_files):
    damaged = tmp_path / "cut.model"
    whole = Path(sentencepiece_model).read_bytes()
    for content in (b"", b"not a model", whole[: len(whole) // 2]):
        damaged.write_bytes(content)
        said = sentence_of(build, "SentencePieceTokenizer", tokenizer_model=str(damaged))
        assert "cut.model is not a SentencePiece model or is da" in said
    said = sentence_of(build, "GPT2BPETokenizer", **gpt2_files | {"vocab_file": str(damaged)})
    assert f"GPT2BPETokenizer cannot be loaded from {damaged}" in said
    said = sentence_of(build, "HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert f"cannot be loaded from {tmp_path}: " in said


@pytest.mark.parametrize(
    ("kind", "flags", "sentence"),
    [
        (None, {}, "--tokenizer-type is missing"),
        (
            "MultimodalTokenizer",
            {},
            "MultimodalTokenizer is not supported; use SentencePieceTokenizer",
        ),
        ("SentencePieceTokenizer", {}, "SentencePieceTokenizer needs --tokenizer-model"),
        ("SentencePieceTokenizer", {"tokenizer_model": "/no/such.model"}, "/no/such.model cannot"),
        ("SentencePieceTokenizer", {"tokenizer_model": "/tmp"}, "/tmp is a directory"),
        ("HuggingFaceTokenizer", {"tokenizer_model": "no/such"}, "neither a directory nor in"),
        ("HuggingFaceTokenizer", {"tokenizer_model": __file__}, "is a file, not a directory"),
        ("GPT2BPETokenizer", {"vocab_file": __file__}, "needs --merge-file"),
        ("NullTokenizer", {}, "NullTokenizer needs --vocab-size"),
        ("BertWordPieceCase", {}, "BertWordPieceCase needs --vocab-file"),
        ("BertWordPieceCase", {"vocab_file": "/none"}, "--vocab-file /none cannot be read"),
    ],
)
def test_bad_flags_end_in_one_sentence(kind, flags, sentence):
    assert sentence in sentence_of(build, kind, **flags)


def test_the_vocabulary_is_padded_as_in_megatron():
    assert padded_vocab_size(50257, make_divisible_by=128, tensor_parallel_size=1) == 50304
    assert padded_vocab_size(50257, make_divisible_by=128, tensor_parallel_size=8) == 51200
    assert padded_vocab_size(1024, make_divisible_by=128, tensor_parallel_size=8) == 1024


@pytest.fixture(scope="module")
def bert_vocabulary(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    path.write_text("\n".join([*special, "hello", "Hello", "wor", "##ld"]) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("kind", "ids"), [("BertWordPieceLowerCase", [5, 7, 8]), ("BertWordPieceCase", [6, 7, 8])]
)
def test_word_pieces_come_from_the_vocabulary_file(bert_vocabulary, kind, ids):
    """--vocab-file"""
    built = build(kind, vocab_file=bert_vocabulary)
    assert built.tokenize("Hello world") == ids
    assert (built.eod, built.pad, built.vocab_size) == (3, 0, 9)


def test_bytes_are_tokens_and_two_more_end_and_pad():
    built = build("ByteLevelTokenizer")
    assert built.tokenize("hé") == list("hé".encode())
    assert built.detokenize([*"hé 漢\n".encode(), built.eod, built.pad]) == "hé 漢\n"
    assert (built.vocab_size, built.eod, built.pad) == (258, 256, 257)
    built = build("ByteLevelTokenizer", tokenizer_special_tokens=["<x>", "<y>"])
    assert (built.vocab_size, {built.eod, built.pad}) == (260, {258, 259})


def sized(rows: int | None, ranks: int = 1, **given: Any) -> Namespace:
    args = {"padded_vocab_size": rows, "tensor_model_parallel_size": ranks} | given
    defaults = {"hetero_tensor_sizes": None, "use_checkpoint_args": False}
    return Namespace(make_vocab_size_divisible_by=128, **defaults | args)


@pytest.mark.parametrize(
    ("args", "rows"),
    [
        (sized(None), 256),
        (sized(202), 202),
        (sized(None, 3), 384),
        (sized(None, 2, hetero_tensor_sizes=[2, 4, 1]), 512),
    ],
)
def test_the_embedding_is_padded_or_as_large_as_it_is_told(args, rows):
    assert embedding_rows(args, 200) == rows


@pytest.mark.parametrize(
    "args", [sized(199), sized(201, 2), sized(202, 2, hetero_tensor_sizes=[2, 4])]
)
def test_an_embedding_that_does_not_fit_is_refused(args):
    with pytest.raises(UserError, match=r"--padded-vocab-size .* must be at least the tokenizer's"):
        embedding_rows(args, 200)


def test_a_checkpoint_s_rows_are_padded_to_what_tensor_parallelism_divides():
    def rows(stored: int, ranks: int) -> int:
        return embedding_rows(sized(stored, ranks, use_checkpoint_args=True), 200)

    assert [rows(201, 1), rows(202, 2), rows(202, 3)] == [201, 202, 204]
    with pytest.raises(UserError, match=r"199 rows of vocabulary and the tokenizer 200 tokens"):
        rows(199, 1)
