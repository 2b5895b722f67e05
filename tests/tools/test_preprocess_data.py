"""What `tools/preprocess_data.py` promises: text as token files, or one sentence and no file."""

import contextlib
import gzip
import json
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

from hetero.tools import preprocess_data, text_input
from hetero.tools.preprocess_data import main
from hetero.tools.preprocessing import batches
from hetero.tools.preprocessing.encoder import Encoder
from hetero.tools.preprocessing.workers import BATCHES_AHEAD, encoded_in_order
from megatron.hetero.dataset_description import read_description, tokenizer_mismatch
from tests import preloaded
from tests.commands import ROOT
from tests.distributed.harness import wait_for
from tests.megatron.tokenizer.tiny_tokenizers import train_sentencepiece, trained_bpe
from tests.tools.refusals import refusal

TOOL = ROOT / "tools" / "preprocess_data.py"
CORPUS = "one small step\nfor a man\n\n\none giant leap\n\nfor mankind 1969\n"
PARAGRAPHS = ["one small step\nfor a man", "one giant leap", "for mankind 1969"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    """Of the whole module, for training one is the slowest step here."""
    return train_sentencepiece(tmp_path_factory.mktemp("tokenizer") / "tok")


@pytest.fixture
def corpus(tmp_path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(CORPUS)
    return path


def flags_for(tokenizer: str, prefix: Path, *inputs: Path, workers: int = 1) -> list[str]:
    return [
        *("--input", *map(str, inputs), "--output-prefix", str(prefix)),
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tokenizer),
        *("--workers", str(workers)),
    ]


def texts_in(tokenizer: str, prefix: Path, key: str = "text") -> list[str]:
    model = sentencepiece.SentencePieceProcessor(model_file=tokenizer)
    dataset = IndexedDataset(f"{prefix}_{key}_document")
    assert len(dataset.document_indices) - 1 == len(dataset)
    return [model.decode(dataset[index].tolist()) for index in range(len(dataset))]


def files_in(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_plain_text_is_cut_at_blank_lines_and_what_was_written_is_told(
    tmp_path, corpus, tokenizer, capsys
):
    assert main([*flags_for(tokenizer, tmp_path / "out", corpus), "--log-interval", "2"]) == 0
    assert texts_in(tokenizer, tmp_path / "out") == PARAGRAPHS
    written = [f"out_text_document.{suffix}" for suffix in ("bin", "idx", "json")]
    assert files_in(tmp_path) == ["corpus.txt", *written]
    # Named, because megatron-core unmaps the file when the dataset goes, views or not.
    dataset = IndexedDataset(f"{tmp_path}/out_text_document")
    said = capsys.readouterr()
    last = said.out.splitlines()[-1]
    assert last.startswith(f"wrote 3 documents, {sum(dataset.sequence_lengths)} tokens in ")
    assert last.endswith(f"{tmp_path}/out_text_document.bin, {tmp_path}/out_text_document.idx")
    # Not a terminal, so a line tells the progress.
    assert said.err.startswith("processed 3 documents (")


def test_append_eod_ends_every_document_and_is_written_down_beside_them(
    tmp_path, corpus, tokenizer
):
    flags = [*flags_for(tokenizer, tmp_path / "out", corpus), "--append-eod"]
    assert main(flags) == 0
    dataset = IndexedDataset(f"{tmp_path}/out_text_document")
    assert [sequence[-1] for sequence in dataset[0 : len(dataset)]] == [2, 2, 2]
    found = read_description(f"{tmp_path}/out_text_document")
    assert (found.tokenizer.type, found.append_eod) == ("SentencePieceTokenizer", True)
    assert found.tokenizer.digest is not None
    assert found.made["inputs"][0][0] == str(corpus)
    assert main([*flags[:-1], "--overwrite"]) == 0
    assert read_description(f"{tmp_path}/out_text_document").append_eod is False


@pytest.mark.parametrize(
    ("unit", "documents"),
    [("line", [line for line in CORPUS.splitlines() if line]), ("file", [CORPUS])],
)
def test_plain_text_can_be_cut_by_line_or_by_file(tmp_path, corpus, tokenizer, unit, documents):
    flags = flags_for(tokenizer, tmp_path / "out", corpus)
    assert main([*flags, "--text-documents", unit]) == 0
    assert texts_in(tokenizer, tmp_path / "out") == documents


def test_every_json_key_gets_a_pair_of_files(tmp_path, tokenizer):
    records = tmp_path / "records.jsonl"
    rows = [{"title": "leap", "body": "giant\n\nleap"}, {"title": "step", "body": "a 漢字"}]
    records.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    flags = flags_for(tokenizer, tmp_path / "out", records)
    assert main([*flags, "--json-keys", "title", "body"]) == 0
    for key in ("title", "body"):
        assert texts_in(tokenizer, tmp_path / "out", key) == [row[key] for row in rows]


def test_inputs_keep_their_order_and_globs_go_by_name(tmp_path, tokenizer):
    for name in ("b.txt", "a.txt", "c.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "unnamed").write_text('{"text": "by content"}\n')
    inputs = [tmp_path / name for name in ("packed.txt.gz", "[ab].txt", "unnamed")]
    assert main(flags_for(tokenizer, tmp_path / "out", *inputs)) == 0
    assert texts_in(tokenizer, tmp_path / "out") == ["packed", "a.txt", "b.txt", "by content"]


def test_a_byte_order_mark_and_empty_documents_are_left_out(tmp_path, tokenizer, capsys):
    records = tmp_path / "marked.jsonl"
    records.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": ""}\n{"text": "b"}\n')
    assert main([*flags_for(tokenizer, tmp_path / "out", records), "--append-eod"]) == 0
    assert "wrote 2 documents" in (last := capsys.readouterr().out.splitlines()[-1])
    assert "1 empty ones left out" in last
    assert texts_in(tokenizer, tmp_path / "out") == ["a", "b"]


# U+2581 is SentencePiece's own sign for a space and reads back as one; surrogates are not UTF-8.
any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"))


@settings(max_examples=8, deadline=None)
@given(documents=st.lists(any_text, min_size=1, max_size=40).filter(any), batch=st.integers(1, 9))
def test_text_comes_back_from_the_files_whatever_the_workers(tokenizer, documents, batch):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "BATCH_DOCUMENTS", batch)
        directory = Path(name)
        records = directory / "records.jsonl"
        records.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        for workers in (1, 2):
            prefix = directory / f"with{workers}"
            assert main(flags_for(tokenizer, prefix, records, workers=workers)) == 0
        assert texts_in(tokenizer, directory / "with1") == [text for text in documents if text]
        for suffix in ("bin", "idx"):
            one, two = (directory / f"with{n}_text_document.{suffix}" for n in (1, 2))
            assert one.read_bytes() == two.read_bytes()


BAD_INPUT = [
    ("empty.txt", b"\n \n", "holds no text"),
    ("latin.txt", b"fine\n\ntwo\nna\xefve\n", "latin.txt:4: byte 0xef is not UTF-8"),
    ("broken.jsonl", b'{"text": "a"}\n\n{"text"\n', "broken.jsonl:3: broken JSON"),
    ("list.json", b'[\n{"text": "a"}\n]\n', "list.json:1: broken JSON"),
    ("number.jsonl", b"7\n", "number.jsonl:1: is not a JSON object"),
    ("other.jsonl", b'{"a": 1, "b": 2}\n', "other.jsonl:1: has no key 'text' (its keys: a, b)"),
    ("typed.jsonl", b'{"text": ["a"]}\n', "typed.jsonl:1: holds an array under 'text' where a"),
    ("null.jsonl", b'{"text": null}\n', "null.jsonl:1: holds null under 'text' where a string"),
    ("count.jsonl", b'{"text": 17}\n', "count.jsonl:1: holds a number under 'text' where a"),
    ("key.jsonl", b'{"\\ud83d": "a"}\n', "key.jsonl:1: has no key 'text' (its keys: \\ud83d)"),
    ("long.jsonl", b'{"text": "a", "n": ' + b"1" * 5000 + b"}\n", "long.jsonl:1: JSON that cannot"),
    ("cesu.jsonl", b'{"text": "\xed\xa0\xbd"}\n', "cesu.jsonl:1: byte 0xed is not UTF-8"),
    ("deep.jsonl", b"[" * 200_000 + b"\n", "deep.jsonl:1: JSON nested too deeply"),
    ("cut.txt.gz", gzip.compress(b"text " * 99, mtime=0)[:20], "cut.txt.gz is a damaged gzip file"),
]


ODD_TEXTS = {
    '"cut \\ud83d here"': "cut \ufffd here",
    '"\\udc00\\ud800 \\ud83d\\ude00"': "\ufffd\ufffd \U0001f600",
    '"nul\\u0000 inside"': "nul\0 inside",
    '""': None,
    '"\\ufeffmarked"': "\ufeffmarked",
}


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_no_character_becomes_the_replacement_character(
    tmp_path, tokenizer, capsys, workers
):
    """As tiktoken does it; other libraries refuse the text."""
    records = tmp_path / "odd.jsonl"
    lines = [f'{{"text": {text}, "nested": {{"\\ud800": ["\\udfff"]}}}}' for text in ODD_TEXTS]
    # Files that were joined, each with a byte order mark.
    records.write_bytes(b"".join(b"\xef\xbb\xbf" + line.encode() + b"\n" for line in lines))
    assert main(flags_for(tokenizer, tmp_path / "out", records, workers=workers)) == 0
    assert texts_in(tokenizer, tmp_path / "out") == [text for text in ODD_TEXTS.values() if text]
    said = capsys.readouterr().out
    assert "U+FFFD in place of unpaired surrogates in 2 documents" in said
    assert "1 empty ones left out" in said


def saved_bpe(folder: Path) -> str:
    from transformers import PreTrainedTokenizerFast

    bpe = trained_bpe([CORPUS], vocab_size=300, end="<|end|>")
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")
    fast.save_pretrained(folder / "fast")
    return str(folder / "fast")


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface", "bytes"])
def test_every_library_gets_text_that_it_takes(tmp_path, tokenizer, kind):
    records = tmp_path / "odd.jsonl"
    records.write_text("".join(f'{{"text": {text}}}\n' for text in ODD_TEXTS))
    given = {
        "sentencepiece": lambda: ["SentencePieceTokenizer", "--tokenizer-model", tokenizer],
        "huggingface": lambda: ["HuggingFaceTokenizer", "--tokenizer-model", saved_bpe(tmp_path)],
        "bytes": lambda: ["ByteLevelTokenizer"],
    }[kind]()
    flags = ["--input", str(records), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    assert main([*flags, "--tokenizer-type", *given]) == 0
    assert read_description(str(tmp_path / "out_text_document")) is not None


@pytest.mark.parametrize(
    ("kind", "flags", "begins"),
    [
        ("Llama2Tokenizer", [], True),
        ("Llama2Tokenizer", ["--tokenizer-bos", "off"], False),
        ("SentencePieceTokenizer", [], False),
        ("GPTSentencePieceTokenizer", ["--tokenizer-bos", "on"], True),
    ],
)
def test_documents_begin_with_the_token_of_the_type_and_the_files_say_so(
    tmp_path, tokenizer, kind, flags, begins
):
    records = tmp_path / "a.jsonl"
    records.write_text('{"text": "hello"}\n{"text": ""}\n{"text": "text"}\n')
    flags = ["--tokenizer-type", kind, *flags]
    given = flags_for(tokenizer, tmp_path / "out", records)
    given = [*given, "--append-eod", *flags]
    assert main(given) == 0
    prefix = str(tmp_path / "out_text_document")
    model = sentencepiece.SentencePieceProcessor(model_file=tokenizer)
    bos = [model.bos_id()] if begins else []
    expected = [[*bos, *model.encode(text), model.eos_id()] for text in ("hello", "text")]
    assert [document.tolist() for document in IndexedDataset(prefix)] == expected
    found = read_description(prefix)
    assert found.tokenizer.begin == tuple(bos)
    assert ("each document after token" in str(found.tokenizer)) is begins
    other = replace(found.tokenizer, begin=() if begins else (1,))
    assert f"--tokenizer-bos {'on' if begins else 'off'}" in tokenizer_mismatch(prefix, other)
    assert tokenizer_mismatch(prefix, found.tokenizer) is None


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("name", "content", "sentence"), BAD_INPUT)
def test_bad_input_ends_in_one_sentence_and_leaves_no_file(
    tmp_path, tokenizer, capfd, name, content, sentence, workers
):
    """Workers add no word of their own."""
    (tmp_path / name).write_bytes(content)
    flags = flags_for(tokenizer, tmp_path / "out", tmp_path / name, workers=workers)
    assert sentence in refusal(capfd, main, flags)
    assert files_in(tmp_path) == [name]


def test_the_first_bad_line_is_told_whatever_the_workers(tmp_path, tokenizer, refused, monkeypatch):
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 1)
    lines = ['{"text": "fine"}'] * 50
    lines[20] = lines[40] = "{"
    (tmp_path / "many.jsonl").write_text("\n".join(lines))
    for workers in (1, 2):
        flags = flags_for(tokenizer, tmp_path / "out", tmp_path / "many.jsonl", workers=workers)
        assert "many.jsonl:21: broken JSON" in refused(main, [*flags, "--log-interval", "1000"])


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(65_000, "uint16"), (66_000, "int32"), (100, None)]
)
def test_tokens_take_two_bytes_where_the_vocabulary_lets_them(tmp_path, refused, vocab_size, dtype):
    (tmp_path / "ids.txt").write_text("1 2\n\n3 64999\n")
    flags = ["--input", f"{tmp_path}/ids.txt", "--output-prefix", f"{tmp_path}/deep/out"]
    flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size)]
    flags += ["--append-eod", "--workers", "1"]
    if dtype is None:
        assert "ids.txt:3: gives token id 64999, outside" in refused(main, flags)
        return
    assert main(flags) == 0
    dataset = IndexedDataset(f"{tmp_path}/deep/out_text_document")
    assert dataset[1].tolist() == [3, 64999, vocab_size]
    assert dataset.index.dtype is getattr(numpy, dtype)


def test_every_file_that_cannot_be_read_is_told_at_once(tmp_path, corpus, tokenizer, refused):
    words = flags_for(tokenizer, tmp_path / "out", corpus)
    words += ["--input", corpus, f"{tmp_path}/no.txt", tmp_path, "--tokenizer-model", "/no/such"]
    told = refused(main, words, several=True).splitlines()[1:]
    for sentence, line in zip(
        ("no.txt does not exist", "is a directory", "/no/such"), told, strict=True
    ):
        assert sentence in line
    assert files_in(tmp_path) == ["corpus.txt"]


def test_existing_files_are_kept_unless_told_otherwise_and_overwritten_whole(
    tmp_path, corpus, tokenizer, refused
):
    kept = tmp_path / "out_text_document.idx"
    kept.write_text("mine")
    flags = flags_for(tokenizer, tmp_path / "out", corpus)
    assert f"{kept} exists" in refused(main, flags)
    assert kept.read_text() == "mine"
    assert main([*flags, "--overwrite"]) == 0
    assert texts_in(tokenizer, tmp_path / "out") == PARAGRAPHS
    corpus.write_bytes(b"fine\n\n\xff")
    assert main([*flags, "--overwrite"]) == 2
    assert texts_in(tokenizer, tmp_path / "out") == PARAGRAPHS


def test_reading_stays_a_fixed_number_of_batches_ahead(tmp_path, tokenizer, monkeypatch):
    """Memory would otherwise grow with the input whenever reading is faster than tokenizing."""
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 1)
    (tmp_path / "many.txt").write_text("a\n\n" * 200)
    flags = flags_for(tokenizer, tmp_path / "out", tmp_path / "many.txt", workers=2)
    args = preprocess_data.build_parser().parse_args(flags)
    read = 0

    def counted():
        nonlocal read
        files = text_input.open_inputs(args.input, "auto")
        for batch in batches.cut_batches(files, "blank-line"):
            read += 1
            yield batch

    encoder = Encoder(args)
    with encoded_in_order(counted(), encoder, args) as encoded:
        for done, _ in enumerate(encoded):
            assert read - done <= 2 * BATCHES_AHEAD
    assert read == 200


def command(*flags: str) -> preloaded.Started:
    with contextlib.chdir("/"):
        return preloaded.start(TOOL, flags, environ=os.environ | {"OMP_NUM_THREADS": "1"})


def test_as_a_command_it_prints_nothing_but_its_own_lines(tmp_path, corpus, tokenizer):
    process = command(*flags_for(tokenizer, tmp_path / "out", corpus, workers=2))
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    assert output.startswith("wrote 3 documents")


@pytest.mark.parametrize(
    ("victim", "number", "code", "sentence"),
    [
        ("parent", signal.SIGINT, 130, "error: interrupted; nothing was written"),
        ("parent", signal.SIGTERM, 143, ""),
        ("worker", signal.SIGKILL, 2, "error: a worker process died"),
    ],
)
def test_when_killed_it_ends_at_once_and_leaves_no_file(
    tmp_path, tokenizer, victim, number, code, sentence
):
    text = tmp_path / "long.txt"
    text.write_text(CORPUS * 200_000)
    flags = flags_for(tokenizer, tmp_path / "out", text, workers=2)
    process = command(*flags, "--log-interval", "1")
    assert process.stderr.readline().startswith("processed ")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    # Python's own helper for shared resources is one of them, and ends when its pipe does.
    workers = [
        child
        for child in children
        if "resource_tracker" not in Path(f"/proc/{child}/cmdline").read_text()
    ]
    os.kill(process.pid if victim == "parent" else int(workers[0]), number)
    _, errors = process.communicate(timeout=120)
    own_lines = [line for line in errors.splitlines() if not line.startswith("processed ")]
    assert process.returncode == code
    assert "".join(own_lines).startswith(sentence)
    assert len(own_lines) <= 1
    assert files_in(tmp_path) == ["long.txt"]
    # Who has no parent any more is there until another process has collected its exit code.
    wait_for(
        lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers),
        seconds=60,
        what="the end of its workers",
    )
