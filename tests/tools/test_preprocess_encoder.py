"""Many texts at once give the ids that megatron-core gives for each."""

from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.tools.preprocessing.encoder import tokenize_many
from megatron.hetero.tokenizer.build import Tokenizer, build_tokenizer
from tests.megatron.tokenizer.tiny_tokenizers import train_sentencepiece, trained_bpe

CORPUS = "one small step for a man\n\none giant leap for mankind 1969, don't you know?\n"
any_text = st.text(st.characters(exclude_categories=["Cs"]))
texts = st.lists(any_text | st.sampled_from([CORPUS, "<|end|>", " <|end|>x", "</s>"]), max_size=9)


def sentencepiece(folder: Path) -> Tokenizer:
    model = train_sentencepiece(folder / "tok")
    return build_tokenizer(
        Namespace(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model)
    )


def huggingface(folder: Path) -> Tokenizer:
    """A fast tokenizer whose file asks for truncation and padding, which is not for corpora."""
    from transformers import PreTrainedTokenizerFast

    bpe = trained_bpe([CORPUS], vocab_size=300, end="<|end|>")
    bpe.enable_truncation(4)
    bpe.enable_padding(length=4)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")
    fast.save_pretrained(folder / "fast")
    return build_tokenizer(
        Namespace(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=f"{folder}/fast")
    )


@pytest.fixture(scope="module", params=[sentencepiece, huggingface])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    return request.param(tmp_path_factory.mktemp("tokenizer"))


@settings(max_examples=60, deadline=None)
@given(texts=texts)
def test_together_as_one_by_one(tokenizer, texts):
    together = [ids.tolist() for ids in tokenize_many(tokenizer)(texts)]
    assert together == [tokenizer.text_ids(text) for text in texts]


def test_the_library_takes_them_together(tokenizer, monkeypatch):
    """Otherwise the line above compares megatron-core with itself."""
    together = tokenize_many(tokenizer)
    expected = [tokenizer.text_ids(CORPUS)] * 2
    monkeypatch.setattr(Tokenizer, "text_ids", None)
    assert [ids.tolist() for ids in together([CORPUS, CORPUS])] == expected


def test_a_library_that_answers_otherwise_is_not_asked(tokenizer, monkeypatch):
    monkeypatch.setattr(Tokenizer, "text_ids", lambda self, text: [7])
    ids = tokenize_many(tokenizer)([CORPUS, CORPUS, ""])
    assert [each.tolist() for each in ids] == [[7], [7], []]
