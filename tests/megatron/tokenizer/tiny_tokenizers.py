"""Tokenizers of a few tokens, trained on a few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def train_sentencepiece(prefix: Path, **options: Any) -> str:
    """A model with a token for every byte; its file."""
    import sentencepiece

    with open(f"{prefix}.model", "wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["hello world, hello text"] * 5),
            model_writer=model,
            vocab_size=280,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
            **options,
        )
    return f"{prefix}.model"


def trained_bpe(texts: list[str], *, vocab_size: int, end: str = "<|endoftext|>") -> Any:
    """A byte-level BPE of the library of Hugging Face."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[end],
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def train_gpt2(folder: Path, texts: list[str], *, vocab_size: int) -> dict[str, str]:
    """The flags that name GPT-2's two files of such a BPE."""
    trained_bpe(texts, vocab_size=vocab_size).model.save(str(folder))
    return {"vocab_file": f"{folder}/vocab.json", "merge_file": f"{folder}/merges.txt"}
