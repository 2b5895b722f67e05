"""What `tools/train_tokenizer.py` promises: a Llama 2-like tokenizer, or a sentence and no file."""

import gzip
import json
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
import sentencepiece

from hetero.tools.train_tokenizer import SENTENCE_BYTES, cut_sentences, main
from tests.commands import ROOT
from tests.distributed.harness import wait_for

TOOL = ROOT / "tools" / "train_tokenizer.py"


def made_up_lines(count: int = 300) -> list[str]:
    source = random.Random(0)
    words = ["".join(source.choices("abcdefghij", k=source.randint(2, 7))) for _ in range(200)]
    return [" ".join(source.choices(words, k=10)) for _ in range(count)]


@pytest.fixture
def text_file(tmp_path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(made_up_lines()))
    return path


def words_for(output: Path, *inputs: Path, vocab_size: int = 320) -> list[str]:
    paths = ["--input", *map(str, inputs), "--output-prefix", str(output)]
    return [*paths, "--vocab-size", str(vocab_size)]


def train(output: Path, *inputs: Path, flags: tuple[str, ...] = ()) -> int:
    return main([*words_for(output, *inputs), *flags])


def files_beside(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_it_writes_a_model_like_llama_2s_and_its_vocabulary(
    tmp_path, text_file, capsys, model_type
):
    assert train(tmp_path / "tok", text_file, flags=("--model-type", model_type)) == 0
    model = sentencepiece.SentencePieceProcessor(model_file=f"{tmp_path}/tok.model")
    assert [model.unk_id(), model.bos_id(), model.eos_id(), model.pad_id()] == [0, 1, 2, -1]
    assert [model.id_to_piece(id) for id in (1, 2, 3, 258)] == ["<s>", "</s>", "<0x00>", "<0xFF>"]
    assert len(model) == 320
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == f"wrote {tmp_path}/tok.model and {tmp_path}/tok.vocab: " + (
        "vocabulary of 320 tokens"
    )
    assert files_beside(tmp_path) == ["corpus.txt", "tok.model", "tok.vocab"]
    rows = [line.split("\t") for line in (tmp_path / "tok.vocab").read_text().splitlines()]
    assert [piece for piece, _ in rows] == [model.id_to_piece(id) for id in range(320)]
    scores = [float(score) for _, score in rows]
    assert scores == pytest.approx([model.get_score(id) for id in range(320)], rel=1e-5)
    for text in ("  two  spaces ", "a\r\n\n\tb", "漢字🙂 \x00", "ａ１ ﬁ", ""):
        assert model.decode(model.encode(text)) == text


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_the_same_text_gives_the_same_model_under_any_name(tmp_path, text_file, model_type):
    for name in ("one", "another"):
        flags = ("--model-type", model_type, "--input-sentence-size", "200")
        assert train(tmp_path / name, text_file, flags=flags) == 0
    assert (tmp_path / "one.model").read_bytes() == (tmp_path / "another.model").read_bytes()


def test_packed_json_lines_give_the_model_of_the_same_plain_text(tmp_path, text_file):
    lines = text_file.read_text().splitlines()
    records = tmp_path / "corpus.jsonl.gz"
    text = "".join(json.dumps({"body": line}) + "\n" for line in lines)
    records.write_bytes(gzip.compress(text.encode()))
    assert train(tmp_path / "plain", text_file) == 0
    assert train(tmp_path / "json", records, flags=("--json-key", "body")) == 0
    assert (tmp_path / "json.model").read_bytes() == (tmp_path / "plain.model").read_bytes()


def test_a_line_too_long_for_sentencepiece_is_cut_between_words():
    line = " ".join(["wörd"] * 5000)
    parts = list(cut_sentences(line))
    assert "".join(parts) == line
    assert all(len(part.encode()) <= SENTENCE_BYTES for part in parts)
    assert all(part.split() == ["wörd"] * len(part.split()) for part in parts)
    assert "".join(cut_sentences("漢" * 5000)) == "漢" * 5000


@pytest.mark.parametrize("vocab_size", [100_000, 10])
def test_an_impossible_vocabulary_size_is_answered_with_one_that_works(
    tmp_path, text_file, capsys, refused, vocab_size
):
    words = words_for(tmp_path / "tok", text_file, vocab_size=vocab_size)
    message = refused(main, words)
    assert message.startswith(f"error: --vocab-size {vocab_size} is too ")
    suggested = int(message.split("use at ")[1].split()[1].rstrip(",;"))
    assert main([*words, "--nearest-size"]) == 0
    assert f"vocabulary of {suggested} tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.txt", b" \n\n", "holds no text to train on"),
        ("latin.txt", b"good\nna\xefve\n", "latin.txt:2: byte 0xef is not UTF-8"),
    ],
)
def test_bad_text_ends_in_one_sentence_and_leaves_no_file(
    tmp_path, refused, name, content, sentence
):
    (tmp_path / name).write_bytes(content)
    assert sentence in refused(main, words_for(tmp_path / "tok", tmp_path / name))
    assert files_beside(tmp_path) == [name]


def test_an_existing_model_is_kept_unless_told_otherwise(tmp_path, text_file, refused):
    (tmp_path / "tok.model").write_text("mine")
    assert "tok.model exists" in refused(main, words_for(tmp_path / "tok", text_file))
    assert (tmp_path / "tok.model").read_text() == "mine"
    assert train(tmp_path / "tok", text_file, flags=("--overwrite",)) == 0


def test_ctrl_c_ends_it_while_sentencepiece_is_working(tmp_path):
    text = tmp_path / "long.txt"
    source = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    text.write_text("\n".join("".join(source.choices(letters, k=3000)) for _ in range(2000)))
    command = [sys.executable, str(TOOL), "--input", str(text), "--output-prefix"]
    process = subprocess.Popen(
        [*command, str(tmp_path / "tok"), "--vocab-size", "20000", "--model-type", "unigram"],
        stderr=subprocess.PIPE,
        # A shell that runs the tests in the background has them, and so this, ignore SIGINT.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    # Once it has started threads of its own, Python has long been waiting for it.
    threads = psutil.Process(process.pid).num_threads
    wait_for(lambda: threads() > 8, seconds=120, what="SentencePiece's work")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert said == b"error: interrupted; nothing was written\n"
    assert files_beside(tmp_path) == ["long.txt"]
