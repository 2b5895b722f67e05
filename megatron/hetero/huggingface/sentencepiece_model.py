"""Writes a SentencePiece model as tokenizer.json, which transformers loads without sentencepiece.

Before it is written, the new tokenizer is compared with SentencePiece on a set of texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from hetero.errors import UserError

_SPACE = "▁"
_UNIGRAM, _BPE = 1, 2
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_TEXTS = (
    "The quick brown fox jumps over the lazy dog, 1234567890 times.",
    "  def f(x):\n\n\treturn [x  for x in range(10)]   # two  spaces ",
    "Zwölf Boxkämpfer; 漢字かな交じり文, кириллица, عربي, ქართული 🙂👩‍👩‍👧 \x00\x7f\u00a0½ﬁ",
    " leading", "trailing ", "", " ", "\n",
)  # fmt: skip


def write_sentencepiece(
    model: Path, target: Path, *, special_tokens: Sequence[str] = ()
) -> str | None:
    """Write tokenizer.json, tokenizer_config.json and the model itself into a folder.

    `special_tokens` follow the model's own. Returns None, or why the model cannot be written, in
    which case nothing was. Raises UserError for a damaged model, and if the library `tokenizers` is
    missing.
    """
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.Load(str(model))
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"the tokenizer {model} is not a SentencePiece model or is damaged; name another with "
            "--tokenizer"
        ) from error
    try:
        from sentencepiece import sentencepiece_model_pb2
        from tokenizers import AddedToken
    except ImportError as error:
        raise UserError(
            "to write the tokenizer in Hugging Face's format, run: pip install '.[hf]'"
        ) from error
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(processor.serialized_model_proto())
    if proto.trainer_spec.model_type not in (_UNIGRAM, _BPE):
        return "transformers has no tokenizer of SentencePiece's models of words or characters"
    tokenizer = _tokenizer(proto)
    for piece in proto.pieces:
        if piece.type in (_UNKNOWN, _CONTROL):
            tokenizer.add_special_tokens([AddedToken(piece.piece, special=True, normalized=False)])
        elif piece.type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(piece.piece, special=False, normalized=False)])
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in special_tokens]
    )
    if (differing := _difference(tokenizer, processor)) is not None:
        shown = differing if len(differing) <= 60 else f"{differing[:60]}..."
        return f"written as tokenizer.json, it would split {shown!r} into other tokens"
    (target / "tokenizer.json").write_text(tokenizer.to_str(pretty=True))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **_named_tokens(processor),
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (target / "tokenizer.model").write_bytes(processor.serialized_model_proto())
    return None


def _tokenizer(proto: Any) -> Any:
    """The tokenizer of the library `tokenizers`, without special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers

    spec = proto.normalizer_spec
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    byte_fallback = bool(proto.trainer_spec.byte_fallback)
    if proto.trainer_spec.model_type == _UNIGRAM:
        unknown = next(i for i, piece in enumerate(proto.pieces) if piece.type == _UNKNOWN)
        model: Any = models.Unigram(pieces, unk_id=unknown, byte_fallback=byte_fallback)
    else:
        vocabulary = {piece: number for number, (piece, _) in enumerate(pieces)}
        model = models.BPE(
            vocabulary,
            _merges(proto, vocabulary),
            unk_token=next(piece.piece for piece in proto.pieces if piece.type == _UNKNOWN),
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    tokenizer = Tokenizer(model)
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", _SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    read_back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        read_back.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(read_back)
    return tokenizer


def _merges(proto: Any, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of pieces that form another piece, in the order in which SentencePiece merges."""
    found = []
    for piece in proto.pieces:
        text = piece.piece
        for cut in range(1, len(text)):
            left, right = vocabulary.get(text[:cut]), vocabulary.get(text[cut:])
            if left is not None and right is not None:
                found.append((-piece.score, left, right, (text[:cut], text[cut:])))
    return [pair for *_, pair in sorted(found)]


def _difference(tokenizer: Any, processor: Any) -> str | None:
    """The first text that SentencePiece splits into other tokens; None if there is none."""
    pieces = [
        processor.id_to_piece(i).replace(_SPACE, " ")
        for i in range(processor.vocab_size())
        if not processor.is_control(i) and not processor.is_unknown(i) and not processor.is_byte(i)
    ]
    texts = [*_TEXTS]
    # All pieces, 100 in a text: neighbours are often of one language.
    texts += ["".join(pieces[i : i + 100]) for i in range(0, len(pieces), 100)]
    return next((t for t in texts if tokenizer.encode(t).ids != processor.encode(t)), None)


def _named_tokens(processor: Any) -> dict[str, str]:
    ids = {
        "bos_token": processor.bos_id(),
        "eos_token": processor.eos_id(),
        "unk_token": processor.unk_id(),
        "pad_token": processor.pad_id(),
    }
    return {name: processor.id_to_piece(number) for name, number in ids.items() if number >= 0}
