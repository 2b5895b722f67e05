"""Samples of token files that were made again under their old names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.harness import launch_well
from tests.megatron.token_files import build

SMALL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 4 --lr 1e-3 --eval-iters 0 "
    "--num-workers 0 --log-interval 1 --tokenizer-type NullTokenizer --vocab-size 40 "
    "--split 100,0,0"
).split()


@pytest.mark.parametrize("named", [("{}",), ("1", "{}", "2", "{}")], ids=["alone", "blended"])
def test_an_index_of_other_text_is_not_taken_from_the_cache(
    named: tuple[str, ...], tmp_path: Path
) -> None:
    losses = []
    for cache, length in (("kept", 60), ("kept", 2), ("new", 2)):
        documents = [[[i % 40] * length] for i in range(9 * 60 // length)]
        prefix = build(tmp_path / "data", documents)
        flags = [*SMALL, "--data-path", *(word.format(prefix) for word in named)]
        (said,) = launch_well([*flags, "--data-cache-path", str(tmp_path / cache)], 1)
        losses.append(
            [line.split("lm loss: ")[1][:12] for line in said.splitlines() if "lm loss: " in line]
        )
    assert len(losses[0]) == 4
    assert losses[1] == losses[2] != losses[0]
