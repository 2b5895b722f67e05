"""The demo: what it refuses, how its steps end, and one real run from text to report."""

from __future__ import annotations

import fcntl
import html
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from examples.quickstart import source_text, steps
from examples.quickstart.demo import main
from examples.quickstart.outcome import MetricsFile
from tests import terminals
from tests.preloaded import INTERPRETER
from tests.tools.refusals import refusal

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

DEMO = steps.ROOT / "examples" / "quickstart" / "demo.py"
ITERATIONS = 6
PAGE = "\n\n".join(
    f"The {animal} number {number} walked over the hill and saw {number + 1} others."
    for animal in ("fox", "hare", "crow", "toad")
    for number in range(30)
)


def refused(capsys, out: Path, *arguments: object) -> str:
    """The one sentence with which the demo refuses its input."""
    return refusal(capsys, main, ["--out", out, *arguments], silent=False)


@pytest.mark.parametrize("number", ["0", "-3", "many", "1.5"])
def test_iterations_must_be_a_number(tmp_path, capsys, number):
    said = refused(capsys, tmp_path, f"--iterations={number}")
    assert "is not a whole number of at least 1" in said


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "--text {text} is empty"),
        (b" \n\n\t", "--text {text} is empty"),
        (b"\xff\xfe\x00text", "--text {text} is not text in UTF-8 (its byte 0"),
        (b"plain\x00zero", "--text {text} is a binary file"),
        ("Grüße".encode("latin-1") + b" and more", "{text} is not text in UTF-8 (its byte 2"),
        (None, "--text {text} cannot be read (No such file or directory)"),
        (b"hi", "the text is too small to train on"),
        (b"A few words only.\n", "the text is too small to train on"),
    ],
)
def test_unusable_text_is_one_sentence_and_leaves_an_earlier_demo_alone(
    tmp_path, capsys, content, reason
):
    text, out = tmp_path / "my.txt", tmp_path / "out"
    if content is not None:
        text.write_bytes(content)
    assert reason.format(text=text) in refused(capsys, out, "--text", text)
    assert not out.exists()
    out.mkdir()
    (out / ".hetero-demo").touch()
    (out / "report.json").write_text("{}")
    refused(capsys, out, "--text", text)
    assert sorted(p.name for p in out.iterdir()) == [".hetero-demo", "report.json"]


def test_output_must_be_a_folder_of_ours(tmp_path, capsys):
    mine = tmp_path / "thesis.txt"
    mine.write_text("years of work")
    assert "is a file; give a folder" in refused(capsys, mine)
    assert "holds files that no demo wrote" in refused(capsys, tmp_path)
    line = refused(capsys, tmp_path / "out", "--text", tmp_path)
    assert "is a directory; give a text file inside it" in line
    assert list(tmp_path.iterdir()) == [mine]


def test_builtin_text_is_there_and_has_paragraphs():
    text = source_text.builtin_text().text
    assert len(text) > 400_000
    assert "\n\n" in text


def test_a_large_text_is_cut_between_letters_and_a_byte_order_mark_is_none(tmp_path, monkeypatch):
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbfhello")
    assert source_text.read_text(str(file)).text == "hello"
    monkeypatch.setattr(source_text, "LARGEST_BYTES", 6)
    file.write_text("ab€€€€€€", encoding="utf-8")
    read = source_text.read_text(str(file))
    assert (read.text, read.is_cut) == ("ab€", True)


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("\n  Once upon\ta time there was", "Once upon a time"),
        ("one", "one"),
        ("狐" * 3000, "狐" * 40),
        (" " * 3000 + "far in", "far in"),
    ],
    ids=["words", "a word", "no spaces", "spaces"],
)
def test_the_model_is_asked_to_go_on_from_the_text_s_beginning(tmp_path, text, prompt):
    file = tmp_path / "text.txt"
    file.write_text(text)
    assert source_text.read_text(str(file)).prompt == prompt


def test_a_text_with_more_letters_than_the_vocabulary_gets_a_larger_one(tmp_path):
    text = "\n".join(
        "".join(chr(0x4E00 + (40 * line + n) % 2000) for n in range(40)) for line in range(200)
    )
    data = steps.prepare_data(text, tmp_path, lambda _: None)
    assert data.vocabulary > 2000
    assert data.tokens > steps.SEQUENCE_LENGTH


def test_metrics_are_read_while_they_are_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    assert metrics.read_new() == []
    path.write_text('{"loss": 1}\n{"loss"')
    assert metrics.read_new() == [{"loss": 1}]
    with path.open("a") as stream:
        stream.write(": 2}\n")
    assert metrics.read_new() == [{"loss": 2}]
    assert metrics.records == [{"loss": 1}, {"loss": 2}]


SHOWS = """
from examples.quickstart.demo import Progress

with Progress(8) as progress:
    progress.announce("tokenizing")
    records = [{"iteration": n, "loss": 3.0 - n / 4} for n in range(1, 9)]
    progress.advance("homogeneous", records, of=8)
"""
LOG = ["tokenizing", *(f"homogeneous: iteration {n}/8, loss {3 - n / 4:.4f}" for n in (2, 4, 6, 8))]


@pytest.mark.parametrize(
    ("on_terminal", "size"),
    [
        ([], (0, 0)),
        (["stderr"], (30, 100)),
        (["stdout", "stderr"], (0, 0)),
        (["stdout", "stderr"], (30, 100)),
    ],
    ids=str,
)
def test_a_terminal_of_any_size_has_one_bar_with_the_loss_and_a_log_has_lines(
    tmp_path, on_terminal, size
):
    shown = terminals.run(
        [sys.executable, "-c", SHOWS],
        tmp_path,
        on_terminal=on_terminal,
        size=size,
        environ={"PYTHONPATH": str(steps.ROOT)},
    )
    assert shown.code == 0, shown.stderr
    assert shown.stdout.splitlines() == ([] if "stdout" in on_terminal else LOG)
    assert ("iteration" in shown.screen + shown.stdout) is ("stdout" not in on_terminal)
    assert ("homogeneous: 100%" in shown.screen) is ("stderr" in on_terminal)
    assert ("loss 1.0000" in shown.screen.partition("100%")[2]) is ("stderr" in on_terminal)


def start_demo(
    tmp_path: Path, text: Path, iterations: int, *, interpreter: str
) -> subprocess.Popen[str]:
    command = [interpreter, str(DEMO), "--text", str(text), "--out", str(tmp_path / "out")]
    return subprocess.Popen(
        [*command, "--iterations", str(iterations)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def page(tmp_path) -> Path:
    text = tmp_path / "my text.txt"
    text.write_text(PAGE)
    return text


def test_demo_from_text_to_report(tmp_path, page):
    process = start_demo(tmp_path, page, ITERATIONS, interpreter=sys.executable)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    out = tmp_path / "out"
    report = json.loads((out / "report.json").read_text())

    losses = report["hetero"]["loss"]
    assert len(losses) == ITERATIONS
    assert losses == report["homogeneous"]["loss"]
    assert losses[-1] < losses[0] < 1.2 * math.log(steps.VOCABULARY)
    assert report["bit_identical"] is True
    assert report["weights_identical"] is True
    assert report["max_abs_loss_difference"] == 0
    assert report["simulated"] is True
    assert report["hetero"]["tokens_per_s"] > 0
    assert report["homogeneous"]["tokens_per_s"] > 0

    # Every sample's activations cross once in fp32, and their gradients once.
    activations = ITERATIONS * 16 * 128 * 128 * 4
    assert report["link"]["bytes"] == report["link"]["expected_bytes"] == 2 * activations
    assert report["link"]["bytes_per_iteration"] == 2 * activations / ITERATIONS
    assert report["link"]["messages"] == ITERATIONS * 2 * 2 * 2
    assert report["link"]["transport"] == "shm"  # what cpu-forward is within a host
    hetero_ranks = report["hetero"]["ranks"]
    assert [rank["vendor"] for rank in hetero_ranks] == ["amd", "amd", "nvidia", "nvidia"]
    assert {rank["vendor"] for rank in report["homogeneous"]["ranks"]} == {"cpu"}

    prompt, completion = report["facts"]["prompt"], report["facts"]["completion"]
    assert prompt == "The fox number 0"
    assert completion.startswith(prompt)
    assert len(completion) > len(prompt)
    assert f"the amd + nvidia model goes on from '{prompt}':\n\n    {prompt}" in stdout
    assert html.escape(completion) in (out / "report.html").read_text()

    assert "bit-identical: yes" in stdout
    assert "simulated" in stdout
    assert "<strong>yes</strong>" in (out / "report.html").read_text()
    assert sorted(p.name for p in out.iterdir()) == [
        ".hetero-demo",
        "data",
        "hetero",
        "homogeneous",
        "report.html",
        "report.json",
    ]


@pytest.mark.slow
def test_ctrl_c_ends_every_process(tmp_path, page):
    process = start_demo(tmp_path, page, 100_000, interpreter=INTERPRETER)
    metrics = tmp_path / "out" / "hetero" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 1 + steps.PROCESSES
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert stderr.splitlines()[-1].startswith("error: interrupted")
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_two_demos_do_not_share_a_folder(tmp_path, page, capsys):
    out = tmp_path / "out"
    out.mkdir()
    with (out / ".hetero-demo").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another demo is writing" in refused(capsys, out, "--text", page)
