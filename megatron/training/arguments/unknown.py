"""What to say about a flag that neither this program nor Megatron-LM's newer versions have."""

from collections.abc import Collection

from megatron.training.arguments.segments import Segment
from megatron.training.arguments.unsupported_flags import all_unsupported_flags, feature_of, refuse

# Flags that older scripts carry, or Hugging Face's names, and the flag that stands for them.
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

# The first words of a flag that switches something off.
OFF = ("no-", "disable-")
MOST_ABBREVIATED = 4
DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2212"
ANSWERS = {"true": True, "yes": True, "on": True, "1": True}
ANSWERS |= {"false": False, "no": False, "off": False, "0": False}


def explain_unknown(flag: str, known: Collection[str]) -> str:
    """One sentence on why `flag` is refused and what to type instead, given the `known` flags."""
    if flag in REPLACED:
        return f"{flag} is not a flag of Megatron-LM today; use {REPLACED[flag]}"
    # The nearest name would be the opposite of what was meant.
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
        return refuse(feature, [flag])
    if longer := begun(flag, known):
        return f"{flag} is not a flag of this program; did you mean {' or '.join(longer)}?"
    suggestion = nearest(flag, tuple(all_unsupported_flags()), slips=1)
    if suggestion is not None:
        return f"{flag} is not a flag of this program; Megatron-LM has {suggestion}; remove it"
    return f"{flag} is not a flag of this program; remove it, or see --help for those it has"


def explain_stray(word: str, after: Segment, known: Collection[str]) -> str:
    """One sentence on a word that no flag takes, which was typed among the values `after` one."""
    # A word processor makes one long dash of two.
    meant = f"--{word.lstrip(DASHES)}"
    if word[:1] in DASHES and meant in known:
        return f"{word!r} is not a flag of this program; did you mean {meant}?"
    if after.values[:1] == (word,) and word.lower() in ANSWERS:
        remedy = "remove the word" if ANSWERS[word.lower()] else "leave the flag out"
        return f"{after.flag} takes no value, so not {word!r}; {remedy}"
    return (
        f"{word!r} belongs to no flag; put a flag before it, or quotes around a value with spaces"
    )


def _opposite(
    flag: str, known: Collection[str], *, typed: tuple[str, ...], offered: tuple[str, ...]
) -> str | None:
    """The known flag of the same thing with one of the first words `offered`, not `typed`."""
    words = flag[2:].replace("_", "-")
    things = [words.removeprefix(first) for first in typed if words.startswith(first)]
    names = (f"--{first}{thing}" for thing in things for first in offered)
    return next((name for name in names if name in known), None)


def meant_by(flag: str, known: Collection[str]) -> tuple[str, ...]:
    """The flags of this program that an unknown one most likely stands for."""
    one = REPLACED.get(flag) or nearest(flag, known)
    return begun(flag, known) if one is None and feature_of(flag) is None else (one,) if one else ()


def begun(flag: str, known: Collection[str]) -> tuple[str, ...]:
    """The known flags that `flag` abbreviates, shortest first; none where there are too many."""
    typed = flag.replace("_", "-").lower()
    longer = sorted((name for name in known if name.startswith(typed)), key=len)
    return tuple(longer) if len(longer) <= MOST_ABBREVIATED else ()


def nearest(flag: str, known: Collection[str], *, slips: int | None = None) -> str | None:
    """The known flag closest to `flag`, or None where none is a few letters away."""
    # Underscores are how Python spells the same name; they must not count as a difference.
    spelled: dict[str, str] = {}
    for name in sorted(known):
        spelled.setdefault(name.replace("_", "-").lower(), name)
    typed = flag.replace("_", "-").lower()
    limit = slips or (1 if len(typed) < 8 else 2 if len(typed) < 24 else 3)
    apart = {
        name: _letters_apart(typed, name)
        for name in spelled
        if abs(len(name) - len(typed)) <= limit
    }
    best = min(apart, key=apart.__getitem__, default=None)
    return spelled[best] if best is not None and apart[best] <= limit else None


def _letters_apart(one: str, other: str) -> int:
    """Letters to take away, put in or exchange to get from one word to the other."""
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        above, row[0] = row[0], i
        for j, opposite in enumerate(other, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (letter != opposite))
    return row[-1]
