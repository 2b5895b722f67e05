"""What `tools/text_input.py` promises: every document of a file once, packed or not."""

import bz2
import errno
import gzip
import io
import lzma
import subprocess
import sys

import pytest
import zstandard

from hetero.errors import UserError
from hetero.tools.text_input import iconv_hint, naming, open_inputs
from tests.sentences import sentence_of

TEXT = b"".join(b"document %d\nsecond line\n\n" % number for number in range(5000))
PACKERS = {
    ".txt": lambda text: text,
    ".txt.gz": gzip.compress,
    ".txt.zst": zstandard.ZstdCompressor().compress,
}


def texts(path) -> list[bytes]:
    (file,) = open_inputs([str(path)], "auto")
    return [document.data for document in file.documents("blank-line")]


@pytest.fixture(params=PACKERS)
def packed(request, tmp_path):
    path = tmp_path / f"text{request.param}"
    path.write_bytes(PACKERS[request.param](TEXT))
    return path


def test_packed_text_reads_as_plain_text_does(packed):
    whole = texts(packed)
    assert whole == TEXT.rstrip(b"\n").split(b"\n\n")
    (file,) = open_inputs([str(packed)], "auto")
    documents = file.documents("blank-line")
    for _ in range(2500):
        document = next(documents)
    assert document.line == 3 * 2499 + 1
    # The position is that of the documents, and not of what is buffered.
    assert file.position == pytest.approx(file.size / 2, rel=0.1)
    assert [document.data for document in documents] == whole[2500:]
    assert file.position == file.size


def test_zstd_frames_follow_one_another(tmp_path):
    """As `cat a.zst b.zst` and parallel compressors make them; a frame may be empty."""
    pack = zstandard.ZstdCompressor().compress
    path = tmp_path / "text.txt.zst"
    path.write_bytes(pack(b"one\n\nt") + pack(b"") + pack(b"wo") + b"")
    assert texts(path) == [b"one", b"two"]
    # JSON lines are told by the name under the packing.
    lines = path.rename(tmp_path / "records.jsonl.zst")
    assert open_inputs([str(lines)], "auto")[0].format == "jsonl"


def test_a_window_as_wide_as_zstd_allows_is_read(tmp_path):
    """`zstd --long=28` and more is beyond the library's own limit."""
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    packed = io.BytesIO()
    with zstandard.ZstdCompressor(compression_params=parameters).stream_writer(
        packed, closefd=False
    ) as writer:
        writer.write(b"wide")
    path = tmp_path / "text.txt.zst"
    path.write_bytes(packed.getvalue())
    assert texts(path) == [b"wide"]


@pytest.mark.parametrize("suffix", [".txt.gz", ".txt.zst"])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.999, None])
def test_what_is_no_whole_packed_file_is_never_taken_for_one(tmp_path, suffix, share):
    packed = PACKERS[suffix](TEXT)
    path = tmp_path / f"text{suffix}"
    path.write_bytes(packed[: int(len(packed) * share)] if share else b"not packed at all")
    with pytest.raises(UserError, match=r"is a damaged (gzip|zstd) file"):
        texts(path)


@pytest.mark.parametrize(
    ("pack", "words"),
    [
        (gzip.compress, "is a gzip file; let its name end in .gz"),
        (PACKERS[".txt.zst"], "is a zstd file; let its name end in .zst"),
        (bz2.compress, "is a bzip2 file; unpack it"),
        (lzma.compress, "is an xz file; unpack it"),
        (lambda text: b"PAR1\x15" + text, "is a Parquet file; convert it"),
    ],
)
def test_a_packed_file_of_another_name_is_not_taken_for_text(tmp_path, pack, words):
    path = tmp_path / "text.jsonl"
    path.write_bytes(pack(TEXT))
    with pytest.raises(UserError, match=words):
        texts(path)


@pytest.mark.parametrize("suffix", PACKERS)
def test_only_a_zstd_file_needs_the_package_that_reads_it(tmp_path, monkeypatch, suffix):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = tmp_path / f"text{suffix}"
    path.write_bytes(PACKERS[suffix](TEXT))
    if suffix != ".txt.zst":
        assert len(texts(path)) == 5000
        return
    assert sentence_of(texts, path) == (
        f"{path} is a zstd file and the package zstandard is not installed; "
        "run: pip install zstandard"
    )


GERMAN = "Grüße aus Köln\n\nund “mehr”\n"


@pytest.mark.parametrize(
    ("name", "encoding", "pack"),
    [
        ("it's here.txt", "windows-1252", None),
        ("wide.txt", "utf-16", None),
        ("packed.txt.gz", "windows-1252", gzip.compress),
        ("lines.jsonl", "windows-1252", None),
        ("no_suffix", "windows-1252", None),
    ],
)
def test_the_command_that_a_refusal_names_makes_the_file_readable(tmp_path, name, encoding, pack):
    path = tmp_path / name
    data = GERMAN.encode(encoding)
    path.write_bytes(pack(data) if pack else data)
    documents = next(iter(open_inputs([str(path)], "text"))).documents("blank-line")
    command = sentence_of(lambda: [one.text() for one in documents]).split("`")[1]
    subprocess.run(["bash", "-c", command], check=True, capture_output=True)
    (written,) = set(tmp_path.iterdir()) - {path}
    assert written.read_bytes() == GERMAN.encode()


def test_a_packed_zstd_file_is_unpacked_on_the_way():
    command = iconv_hint("a b.txt.zst", b"").split("`")[1]
    assert command == "zstd -dc 'a b.txt.zst' | iconv -f WINDOWS-1252 -t UTF-8 > 'a b.utf8.txt'"


def test_a_disk_that_is_full_is_named_by_the_file_that_was_written() -> None:
    with pytest.raises(OSError, match=r"tok\.model"), naming("tok.model"):
        raise OSError(errno.ENOSPC, "No space left on device")
