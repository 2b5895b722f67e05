"""Flags of the data: token files, how they are split and mixed, and the tokenizer."""

import argparse

from hetero.text import integer, number, text

# The types, and the destinations of the flags that each needs.
TOKENIZERS = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "ByteLevelTokenizer": (),
    "NullTokenizer": ("vocab_size",),
}


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    _add_source_flags(parser.add_argument_group("data"))
    _add_sample_flags(parser.add_argument_group("samples"))
    _add_fill_in_middle_flags(parser.add_argument_group("fill in the middle"))
    add_tokenizer_flags(parser.add_argument_group("tokenizer"))


def _add_source_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data-path", nargs="*", help="prefixes of token files, or weight prefix weight prefix ..."
    )
    for split in ("train", "valid", "test"):
        group.add_argument(f"--{split}-data-path", nargs="*", help=f"the same, for {split} only")
    group.add_argument("--data-args-path", type=text, help="file with the words of --data-path")
    group.add_argument(
        "--per-split-data-args-path",
        type=text,
        help="JSON file with such a list under each of train, valid and test",
    )
    group.add_argument(
        "--split", help="shares of train, valid and test; left out with --data-path: 969, 30, 1"
    )
    group.add_argument("--mock-data", action="store_true", help="made-up tokens, no files")
    group.add_argument("--data-cache-path", type=text, help="folder for the sample indexes")
    group.add_argument(
        "--no-mmap-bin-files",
        dest="mmap_bin_files",
        action="store_false",
        help="read token files instead of mapping them",
    )
    group.add_argument(
        "--num-dataset-builder-threads",
        type=integer(1),
        default=1,
        help="threads that build indexes",
    )
    group.add_argument(
        "--mid-level-dataset-surplus",
        type=number(minimum=0),
        default=0.005,
        help="extra samples drawn from each part of a mixture",
    )


def _add_sample_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--seq-length",
        "--encoder-seq-length",
        dest="seq_length",
        type=integer(1),
        help="tokens of one sample",
    )
    group.add_argument(
        "--num-workers", type=integer(0), default=2, help="loader processes on each rank"
    )
    group.add_argument(
        "--dataloader-type",
        choices=("single", "cyclic"),
        help="one pass in order, or shuffled passes without end; default: single",
    )
    group.add_argument(
        "--reset-position-ids", action="store_true", help="restart positions in every document"
    )
    group.add_argument(
        "--reset-attention-mask", action="store_true", help="no attention across documents"
    )
    group.add_argument("--eod-mask-loss", action="store_true", help="no loss on end of document")
    group.add_argument(
        "--allow-ambiguous-pad-tokens",
        action="store_true",
        help="no loss on the padding token, even if it is another special token too",
    )


def _add_fill_in_middle_flags(group: argparse._ArgumentGroup) -> None:
    probability = number(minimum=0, maximum=1)
    group.add_argument(
        "--fim-data", action="store_true", help="reorder documents: the middle after the suffix"
    )
    group.add_argument(
        "--fim-rate", type=probability, default=0.5, help="probability that a document is reordered"
    )
    group.add_argument(
        "--fim-spm-rate",
        type=probability,
        default=0.5,
        help="probability that its suffix comes before its prefix",
    )
    group.add_argument(
        "--fim-split-sample",
        type=text,
        help="token at which a document is cut into fragments, such as the files of a repository",
    )
    group.add_argument(
        "--fim-fragment-rate", type=probability, help="probability that a fragment is reordered"
    )
    group.add_argument(
        "--fim-no-prefix", type=text, help="do not reorder text that begins with this"
    )
    for part, default, use in (
        ("prefix", "<fim_prefix>", "before the prefix"),
        ("middle", "<fim_middle>", "before the middle"),
        ("suffix", "<fim_suffix>", "before the suffix"),
        ("pad", "<fim_pad>", "fills a sample that has become shorter"),
        ("eod", "<|endoftext|>", "ends a document, as the tokenizer's own end token does"),
    ):
        group.add_argument(f"--fim-{part}-token", type=text, default=default, help=f"token: {use}")


def add_tokenizer_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tokenizer-type", choices=tuple(TOKENIZERS), help="kind of tokenizer; default: GPT2BPE"
    )
    group.add_argument(
        "--tokenizer-model", type=text, help="file of the tokenizer, or its name on Hugging Face"
    )
    group.add_argument(
        "--vocab-size", type=integer(1), help="size of the vocabulary before padding"
    )
    group.add_argument(
        "--vocab-file", type=text, help="vocabulary of GPT2BPETokenizer or BertWordPiece*"
    )
    group.add_argument("--merge-file", type=text, help="merges of GPT2BPETokenizer")
    group.add_argument(
        "--tokenizer-metadata", type=text, help="JSON file that describes the tokenizer"
    )
    group.add_argument("--tokenizer-special-tokens", nargs="+", help="special tokens to add")
    group.add_argument("--tiktoken-pattern", help="TikTokenizer: v1, v2 or a regular expression")
    group.add_argument(
        "--tiktoken-num-special-tokens",
        type=integer(0),
        default=1000,
        help="TikTokenizer: number of special tokens, which are its first",
    )
    group.add_argument(
        "--tiktoken-special-tokens", nargs="+", help="TikTokenizer: names of special tokens"
    )
    group.add_argument(
        "--tokenizer-sentencepiece-legacy", action="store_true", help="older SentencePiece rules"
    )
    group.add_argument(
        "--tokenizer-bos",
        choices=("auto", "on", "off"),
        default="auto",
        help="SentencePiece: begin each document and prompt with <s>; auto: with Llama2Tokenizer, "
        "as Megatron-LM's class of that name does",
    )
    group.add_argument(
        "--tokenizer-hf-use-fast",
        action="store_true",
        help="Hugging Face: use the Rust implementation",
    )
    group.add_argument(
        "--tokenizer-hf-include-special-tokens",
        action="store_true",
        help="Hugging Face: add special tokens while encoding",
    )
    group.add_argument(
        "--trust-remote-code", action="store_true", help="Hugging Face: run a repository's code"
    )
