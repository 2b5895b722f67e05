"""Error messages for flags and words that the parser does not have, with what to type instead."""

import difflib
from collections.abc import Collection

from megatron.hetero.arguments.segments import Segment
from megatron.hetero.arguments.unsupported_flags import all_unsupported_flags, feature_of, refusal

# Flags of older scripts and names of Hugging Face's settings, and the flags to use instead.
REPLACED = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--checkpoint-activations": "--recompute-activations",
    "--activations-checkpoint-method": "--recompute-method",
    "--activations-checkpoint-num-layers": "--recompute-num-layers",
    "--checkpoint-num-layers": "--recompute-num-layers",
    "--distribute-checkpointed-activations": "--distribute-saved-activations",
    "--no-delay-grad-reduce": "--no-align-grad-reduce",
    "--layernorm-epsilon": "--norm-epsilon",
    "--num-key-value-heads": "--num-query-groups",
    "--num-kv-heads": "--num-query-groups",
    "--intermediate-size": "--ffn-hidden-size",
    "--rope-theta": "--rotary-base",
    "--rms-norm-eps": "--norm-epsilon",
}

# Prefixes of flags that switch something off.
OFF = ("no-", "disable-")
MOST_ABBREVIATED = 4
DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2212"
BOOLEANS = {"true": True, "yes": True, "on": True, "1": True}
BOOLEANS |= {"false": False, "no": False, "off": False, "0": False}


def explain_unknown(flag: str, known: Collection[str]) -> str:
    """Why `flag` is refused and what to type instead, given the `known` flags."""
    if flag in REPLACED:
        return f"{flag} is not a flag of Megatron-LM today; use {REPLACED[flag]}"
    # The most similar flag would do the opposite.
    if (
        switch_off := _opposite(flag, known, typed=("", "enable-", "use-"), offered=OFF)
    ) is not None:
        return f"{flag} is on unless {switch_off} is given; remove it"
    if (switch_on := _opposite(flag, known, typed=OFF, offered=("", "use-"))) is not None:
        return f"{flag} is not a flag of this program; leave {switch_on} out instead"
    suggestion = nearest(flag, known)
    if suggestion is not None:
        return f"{flag} is not a flag of this program; did you mean {suggestion}?"
    if feature := feature_of(flag):
        return refusal(feature, [flag])
    if longer := abbreviated(flag, known):
        return f"{flag} is not a flag of this program; did you mean {' or '.join(longer)}?"
    suggestion = nearest(flag, tuple(all_unsupported_flags()), likeness=0.92)
    if suggestion is not None:
        return f"{flag} is not a flag of this program; Megatron-LM has {suggestion}; remove it"
    return f"{flag} is not a flag of this program; remove it, or see --help for those it has"


def explain_stray(word: str, after: Segment, known: Collection[str]) -> str:
    """Why a word is refused that no flag takes; it was typed in the segment `after`."""
    # A word processor replaces two hyphens by a long dash.
    flag = f"--{word.lstrip(DASHES)}"
    if word[:1] in DASHES and flag in known:
        return f"{word!r} is not a flag of this program; did you mean {flag}?"
    if after.values[:1] == (word,) and word.lower() in BOOLEANS:
        remedy = "remove the word" if BOOLEANS[word.lower()] else "leave the flag out"
        return f"{after.flag} takes no value, so not {word!r}; {remedy}"
    return (
        f"{word!r} belongs to no flag; put a flag before it, or quotes around a value with spaces"
    )


def _opposite(
    flag: str, known: Collection[str], *, typed: tuple[str, ...], offered: tuple[str, ...]
) -> str | None:
    """The known flag that has a prefix of `offered` in place of one of `typed`."""
    name = flag[2:].replace("_", "-")
    stems = [name.removeprefix(prefix) for prefix in typed if name.startswith(prefix)]
    candidates = (f"--{prefix}{stem}" for stem in stems for prefix in offered)
    return next((candidate for candidate in candidates if candidate in known), None)


def intended_flags(flag: str, known: Collection[str]) -> tuple[str, ...]:
    """The known flags that an unknown one most likely means, the likeliest first."""
    if similar := REPLACED.get(flag) or nearest(flag, known):
        return (similar,)
    return () if feature_of(flag) is not None else abbreviated(flag, known)


def abbreviated(flag: str, known: Collection[str]) -> tuple[str, ...]:
    """The known flags that `flag` abbreviates, shortest first; none where there are too many."""
    typed = flag.replace("_", "-").lower()
    longer = sorted((name for name in known if name.startswith(typed)), key=len)
    return tuple(longer) if len(longer) <= MOST_ABBREVIATED else ()


def nearest(flag: str, known: Collection[str], *, likeness: float = 0.87) -> str | None:
    """The known flag most like this one, where - and _ are equal; None if none is alike."""
    spelled = {name.replace("_", "-").lower(): name for name in sorted(known, reverse=True)}
    typed = flag.replace("_", "-").lower()
    found = difflib.get_close_matches(typed, spelled, n=1, cutoff=likeness)
    return spelled[found[0]] if found else None
