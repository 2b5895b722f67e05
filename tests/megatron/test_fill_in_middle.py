"""Fill-in-the-middle: the same text in another order, drawn by seed and sample index alone."""

from __future__ import annotations

import shlex
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import UserError
from megatron.hetero.arguments import build_parser
from megatron.hetero.data import FillInMiddle, build_datasets, fill_in_middle
from megatron.hetero.dataset_checks import require_same_data
from megatron.hetero.tokenizer.build import build_tokenizer
from tests.megatron.launches import parsed
from tests.megatron.token_files import build
from tests.megatron.tokenizer.tiny_tokenizers import train_gpt2, train_sentencepiece
from tests.sentences import sentence_of

NAMES = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<|endoftext|>", "<file>"]
FLAGS = vars(build_parser().parse_args("--fim-data --fim-rate 1".split()))
BYTES = {"tokenizer_type": "ByteLevelTokenizer", "tokenizer_special_tokens": NAMES}


def gpt2_flags(folder: Path) -> dict[str, object]:
    """A byte-level BPE of Hugging Face, whose tokens are several letters long."""
    pytest.importorskip("transformers")
    files = train_gpt2(folder, ["abba baab 漢字 abba\n baab"] * 9, vocab_size=290)
    return {"tokenizer_type": "GPT2BPETokenizer", "tokenizer_special_tokens": NAMES, **files}


@pytest.fixture(scope="module", params=["bytes", "gpt2"])
def reorder(request, tmp_path_factory) -> FillInMiddle:
    """Every document reordered, half of them with the suffix first."""
    kind = BYTES if request.param == "bytes" else gpt2_flags(tmp_path_factory.mktemp("gpt2"))
    return made(**kind)


def made(**flags) -> FillInMiddle:
    args = Namespace(**{**FLAGS, **flags})
    found = fill_in_middle(args, build_tokenizer(args))
    assert found is not None
    return found


def end_of(by: FillInMiddle) -> int:
    return by.tokenizer.eod


def joined(by: FillInMiddle, documents: list[str], room: int = 0) -> numpy.ndarray:
    """Documents and their end tokens; `room` more of these, to be cut off in their place."""
    ids = [id for text in documents for id in [*by.tokenizer.tokenize(text), end_of(by)]]
    return numpy.array(ids + [end_of(by)] * room, dtype=numpy.uint16)


def cut(ids: list[int], at: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for id in ids:
        if id == at:
            parts.append([])
        else:
            parts[-1].append(id)
    return parts


def restored(by: FillInMiddle, document: list[int]) -> str:
    """A document's text in its own order again. Middles follow prefixes in both orders."""
    if not document or document[0] != by.prefix:
        return by.tokenizer.detokenize(document)
    prefix, rest = (
        document[1 : document.index(by.suffix)],
        document[document.index(by.suffix) + 1 :],
    )
    suffix, middle = cut(rest, by.middle)
    return "".join(by.tokenizer.detokenize(part) for part in (prefix, middle, suffix))


TEXTS = st.lists(st.text(alphabet="ab \n漢é", min_size=1, max_size=30), min_size=1, max_size=4)


@given(texts=TEXTS, index=st.integers(0, 10**9), rate=st.sampled_from([0.5, 1.0]))
def test_in_its_own_order_the_text_is_what_it_was(reorder, texts, index, rate) -> None:
    by = replace(reorder, rate=rate)
    sample = joined(by, texts, room=60)
    found = by.reorder(sample, index)
    assert found.dtype == numpy.int64
    assert len(found) == len(sample)
    documents = cut(found.tolist(), end_of(by))
    assert [restored(by, document) for document in documents[: len(texts)]] == texts
    assert not any(documents[len(texts) :])
    if rate == 1:
        assert {document[0] for document in documents[: len(texts)]} == {by.prefix}


@given(ids=st.lists(st.integers(0, 255) | st.just(256), max_size=40), index=st.integers(0, 99))
def test_at_rate_0_nothing_moves(ids, index) -> None:
    by = made(**BYTES, fim_rate=0.0)
    sample = numpy.array([end_of(by) if id == 256 else id for id in ids], dtype=numpy.uint16)
    assert by.reorder(sample, index).tolist() == sample.tolist()


def test_documents_are_reordered_as_often_as_asked_for() -> None:
    by = made(**BYTES, fim_rate=0.3)
    sample = joined(by, ["some text"], room=3)
    moved = sum(by.reorder(sample, index)[0] == by.prefix for index in range(1000))
    assert 250 < moved < 350


def test_the_order_is_drawn_by_seed_and_index_alone(reorder) -> None:
    sample = joined(reorder, ["abba baab" * 3, "baab abba" * 3], room=9)
    first = [reorder.reorder(sample, index).tolist() for index in range(20)]
    again = replace(reorder)
    assert [again.reorder(sample, index).tolist() for index in reversed(range(20))] == first[::-1]
    assert len({tuple(ids) for ids in first}) > 15
    assert replace(reorder, seed=1).reorder(sample, 0).tolist() != first[0]


def test_the_draws_are_the_same_in_every_version_of_every_library() -> None:
    """Two installations would read one text as tokens and another as labels."""
    by = made(**BYTES)
    names = {by.prefix: "P", by.middle: "M", by.suffix: "S"}
    seen = []
    for index in range(4):
        ids = by.reorder(joined(by, ["0123456789"], room=3), index).tolist()
        seen.append("".join(names.get(id, chr(id)) for id in ids[:13]))
    assert seen == ["P0123S9M45678", "PSM0123456789", "P0123S9M45678", "P012345S789M6"]


@pytest.mark.parametrize(("rate", "first"), [(0.0, False), (1.0, True)])
def test_the_suffix_comes_first_as_often_as_asked_for(reorder, rate, first) -> None:
    by = replace(reorder, spm_rate=rate)
    sample = joined(by, ["abbabaab" * 20], room=3)
    seen = [by.reorder(sample, index).tolist() for index in range(40)]
    # With an empty prefix both orders begin in the same way.
    share = sum(ids[1] == by.suffix for ids in seen) / len(seen)
    assert share == 1 if first else share < 0.1


def test_what_does_not_fit_is_cut_off_and_what_is_missing_is_padding() -> None:
    by = made(**BYTES)
    longer = joined(by, ["text"])
    assert len(by.reorder(longer, 0)) == len(longer)
    # Tokens without a text vanish from a text that is written anew.
    special = numpy.array([*b"text", *[by.tokenizer.pad] * 10], dtype=numpy.uint16)
    found = by.reorder(special, 0).tolist()
    assert len(found) == len(special)
    assert found[-7:] == [by.pad] * 7
    assert by.pad not in found[:-7]


@pytest.mark.parametrize(("rate", "moved"), [("1", True), ("0", False)])
def test_a_document_is_cut_into_fragments_that_move_by_themselves(rate, moved) -> None:
    by = made(**BYTES, fim_split_sample="<file>", fim_fragment_rate=float(rate))
    file = by.separator
    sample = numpy.array(
        [file, *b"first", file, *b"second", end_of(by), *b"whole", *[end_of(by)] * 12],
        dtype=numpy.uint16,
    )
    document, whole = cut(by.reorder(sample, 3).tolist(), end_of(by))[:2]
    empty, first, second = cut(document, file)
    assert empty == []
    assert (restored(by, first), restored(by, second)) == ("first", "second")
    assert (first[0] == by.prefix, second[0] == by.prefix) == (moved, moved)
    # Without a separator a document moves as it does where none is named.
    assert whole[0] == by.prefix
    assert restored(by, whole) == "whole"


def test_text_with_a_certain_beginning_stays_as_it_is() -> None:
    by = made(**BYTES, fim_no_prefix="#!")
    sample = joined(by, ["#! stays", "moves", "moves #! too"], room=9)
    for index in range(5):
        stays, *moving = cut(by.reorder(sample, index).tolist(), end_of(by))[:3]
        assert stays == list(b"#! stays")
        assert all(document[0] == by.prefix for document in moving)


def test_tokens_that_the_tokenizer_lacks_are_named_together(tmp_path) -> None:
    model = train_sentencepiece(tmp_path / "tiny")
    kind = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": model}
    text = sentence_of(made, **kind, fim_prefix_token="<0x01>", fim_split_sample="no such")
    for flag in ("middle-token", "suffix-token", "pad-token", "eod-token", "split-sample"):
        assert f"(--fim-{flag})" in text
    assert "--fim-prefix-token" not in text
    assert text.endswith("or name tokens that it has; its documents end with </s>")
    # Bytes that no text holds do well where none can be added.
    parts = {f"fim_{part}_token": f"<0x0{number}>" for number, part in enumerate(PARTS, start=1)}
    by = made(**kind, **parts, fim_eod_token="</s>")
    texts = ["hello world", "hello text"]
    sample = joined(by, texts, room=40)
    documents = cut(by.reorder(sample, 0).tolist(), 2)[:2]
    assert [restored(by, document) for document in documents] == texts


PARTS = ("prefix", "middle", "suffix", "pad")


def test_the_tokenizers_own_end_of_a_document_is_one_too() -> None:
    """Token files end documents with it, whatever --fim-eod-token says."""
    by = made(**BYTES)
    named = by.tokenizer.library_tokenizer.tokens_to_ids(["<|endoftext|>"])[0]
    assert by.ends == {by.tokenizer.eod, named}
    assert by.tokenizer.eod != named
    with pytest.raises(UserError, match="turns tokens into text and back, and --tokenizer-type N"):
        made(tokenizer_type="NullTokenizer", vocab_size=100)


def test_nodes_whose_tokenizers_number_the_tokens_otherwise_do_not_train_together() -> None:
    ids = made(**BYTES).ids
    other = made(**{**BYTES, "tokenizer_special_tokens": NAMES[::-1]}).ids
    assert ids != other
    records = [
        {"host": host, "tokenizer": [264, ["digest", found]], "data": []}
        for host, found in (("a", ids), ("b", other))
    ]
    require_same_data([records[0], records[0]])
    with pytest.raises(UserError, match="rank 1 on b reads another tokenizer than rank 0 on a"):
        require_same_data(records)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    """Token files of bytes: documents of all lengths."""
    tokenizer = build_tokenizer(Namespace(**BYTES))
    texts = [f"document {number} " * (number % 7 + 1) for number in range(60)]
    documents = [[[*tokenizer.tokenize(text), tokenizer.eod]] for text in texts]
    return build(tmp_path_factory.mktemp("files") / "data", documents)


def train_set(prefix: str, flags: str):
    tokens = shlex.join(NAMES)
    args = parsed(
        f"--data-path 1 {prefix} 2 {prefix} --split 1 --eval-iters 0 --tokenizer-type "
        f"ByteLevelTokenizer --tokenizer-special-tokens {tokens} {flags}",
        without="--mock-data --tokenizer-type --vocab-size",
    )
    train, _, _ = build_datasets(
        args, tokenizer=build_tokenizer(args), empty_splits=frozenset({"valid", "test"})
    )
    return train


def test_every_process_reads_the_same_samples_in_any_order(prefix) -> None:
    first, last = (train_set(prefix, "--fim-data --fim-rate 1") for _ in range(2))
    indexes = list(range(12))
    loader = torch.utils.data.DataLoader(last, batch_sampler=[[i] for i in indexes], num_workers=2)
    by_workers = [batch["labels"][0] for batch in loader]
    for index in reversed(indexes):
        sample = first[index]
        assert sample["tokens"].shape == (32,)
        assert torch.equal(sample["labels"], by_workers[index])
        assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
    plain = train_set(prefix, "")
    assert not torch.equal(plain[0]["tokens"], first[0]["tokens"])
    still = train_set(prefix, "--fim-data --fim-rate 0")
    for index in indexes:
        assert torch.equal(plain[index]["tokens"], still[index]["tokens"])
        assert torch.equal(plain[index]["labels"], still[index]["labels"])
