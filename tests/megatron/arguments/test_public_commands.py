"""Public Megatron-LM command lines: how many of those that Megatron-LM accepts are accepted here.

How the collection was made is said in public_commands/README.md; `python -m bench.public_commands`
prints the table and the reasons.
"""

from __future__ import annotations

from bench.public_commands import (
    LEFT_OUT,
    by_source,
    load_commands,
    main,
    reasons,
    shares,
    verdicts,
)

# Raise these with what they have reached; they never fall.
LEAST = (0.93, 0.99, 0.79, 0.92)
"""Of dense models, all and without what is left out; of experts and latent attention likewise."""


def test_the_share_of_public_commands_that_is_accepted_does_not_fall() -> None:
    reached = [accepted / counted for accepted, counted in shares().values()]
    for share, least in zip(reached, LEAST, strict=True):
        assert share >= least, "\n".join(f"{count} {text}" for text, count in reasons())


def test_the_collection_is_broad() -> None:
    counted = [verdict.command for verdict in verdicts()]
    assert len(counted) >= 200
    assert len({command.repository for command in counted}) >= 10
    assert {feature for command in counted for feature in command.features} >= set(LEFT_OUT)
    assert len({command.words for command in load_commands()}) >= 0.9 * len(load_commands())


def test_a_refusal_names_a_flag_of_the_command_and_not_as_one_that_nobody_knows() -> None:
    for verdict in verdicts():
        if verdict.refusal is not None:
            assert any(flag in verdict.refusal for flag in verdict.command.flags), verdict
            assert "is not a flag of this program" not in verdict.refusal, verdict


def test_the_table_has_a_row_for_every_source_and_their_sum(capsys) -> None:
    assert main(["--refused"]) == 0
    printed = capsys.readouterr().out
    for row in by_source():
        assert row in printed
    assert by_source()[-1].startswith(f"| all | {len(load_commands())} |")
    numbers = [int(cell) for cell in by_source()[-1].split("|")[3:-1]]
    assert numbers[0] + numbers[2] == len(verdicts())
