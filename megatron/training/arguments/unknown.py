"""What to say about a flag that neither this program nor Megatron-LM's newer versions have."""

from collections.abc import Collection

from megatron.training.arguments.left_out import feature_of, left_out_flags, refuse

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
    "--layernorm-epsilon": "--norm-epsilon",
    "--num-key-value-heads": "--num-query-groups",
    "--num-kv-heads": "--num-query-groups",
    "--intermediate-size": "--ffn-hidden-size",
    "--rope-theta": "--rotary-base",
    "--rms-norm-eps": "--norm-epsilon",
}


def explain_unknown(flag: str, known: Collection[str]) -> str:
    """One sentence on why `flag` is refused and what to type instead, given the `known` flags."""
    if flag in REPLACED:
        return f"{flag} is not a flag of Megatron-LM today; use {REPLACED[flag]}"
    # The nearest name would be the opposite of what was meant.
    if f"--no-{flag[2:]}" in known:
        return f"{flag} is on unless --no-{flag[2:]} is given; remove it"
    if flag.startswith("--no-") and f"--{flag[5:]}" in known:
        return f"{flag} is not a flag of this program; leave --{flag[5:]} out instead"
    suggestion = nearest(flag, known)
    if suggestion is not None:
        return f"{flag} is not a flag of this program; did you mean {suggestion}?"
    if feature := feature_of(flag):
        return refuse(feature, [flag])
    suggestion = nearest(flag, tuple(left_out_flags()), slips=1)
    if suggestion is not None:
        return f"{flag} is not a flag of this program; Megatron-LM has {suggestion}; remove it"
    return f"{flag} is not a flag of this program; remove it, or see --help for those it has"


def meant_by(flag: str, known: Collection[str]) -> str | None:
    """The flag of this program that an unknown one most likely stands for."""
    return REPLACED.get(flag) or nearest(flag, known)


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
