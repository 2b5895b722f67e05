"""Which checkpoint a run starts from, and which it refuses."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.errors import UserError
from megatron.hetero.checkpoint import folder
from megatron.hetero.checkpoint.compatibility import require_same_schedule
from megatron.hetero.checkpoint.find_checkpoint import (
    FoundCheckpoint,
    NoCheckpoint,
    find_checkpoint,
)
from megatron.hetero.checkpoint.index import INDEX_FILE
from megatron.hetero.checkpoint.safetensors_writer import WriteItem
from megatron.hetero.checkpoint.tensor_names import EMBEDDING, OUTPUT_LAYER
from megatron.hetero.lr_schedule import LrSchedule
from tests.megatron.checkpoint.test_conversion import NAMES
from tests.megatron.checkpoint.test_model_flags import SIZES, run, written_by
from tests.megatron.checkpoint.written_checkpoints import write
from tests.sentences import sentence_of

MODEL = f"{SIZES} --num-layers 1 --position-embedding-type rope"


def flags(load: Path | None, **changed: Any) -> Namespace:
    known = {"load": None if load is None else str(load), **changed}
    return Namespace(**vars(run(MODEL)) | known)


def checkpoint(save: Path, iteration: int, **about: Any) -> Path:
    path = save / folder.folder_name(iteration)
    items = [WriteItem.whole(name, torch.ones(2, 2)) for name in NAMES]
    run = {
        "iteration": iteration,
        "holds": {"optimizer": True, "random states": True},
        "scheduler": {**asdict(LrSchedule.of_flags(flags(None))), "num_steps": 8 * iteration},
        **about,
    }
    write(path, {"rank_00000.safetensors": items}, args=written_by(MODEL), **run)
    folder.write_tracker(save, str(iteration))
    return path


def alone(phase: str, *, payload: Any = None, error: Exception | None = None) -> list[Any]:
    """What one rank hears of itself, as JobExchanges.exchange tells it."""
    if error is not None:
        raise UserError(str(error), known_to_all=True)
    return [payload]


def choose(args: Namespace) -> FoundCheckpoint | NoCheckpoint:
    return find_checkpoint(args, alone, rank=0, world_size=1)


def chosen(args: Namespace) -> FoundCheckpoint:
    found = choose(args)
    assert isinstance(found, FoundCheckpoint)
    return found


def refusal(args: Namespace) -> str:
    return sentence_of(choose, args, error=UserError)


def test_the_newest_is_used_and_what_is_passed_over_is_said(tmp_path: Path) -> None:
    older, newest = checkpoint(tmp_path, 10), checkpoint(tmp_path, 20)
    found = chosen(flags(tmp_path))
    assert (found.folder, found.notes, found.sources.is_new_run) == (newest, (), False)
    folder.write_tracker(tmp_path, "10")
    found = chosen(flags(tmp_path))
    assert found.folder == older
    (note,) = found.notes
    assert "iter_0000020" in note
    assert chosen(flags(tmp_path, ckpt_step=10)).notes == ()
    folder.write_tracker(tmp_path, "20")
    (newest / "rank_00000.safetensors").write_bytes(b"x")
    found = chosen(flags(tmp_path))
    assert found.folder == older
    (note,) = found.notes
    assert note.startswith(f"checkpoint {newest} is not used: rank_00000.safetensors has 1 bytes")


def test_rows_that_pad_a_longer_vocabulary_are_not_in_it(tmp_path: Path) -> None:
    checkpoint(tmp_path, 10)
    found = chosen(flags(tmp_path))
    rows = found.index.tensors[EMBEDDING].shape[0]
    layer = "decoder.layers.0.mlp.linear_fc1.weight"
    assert all(found.covers(name, rows=rows) for name in (EMBEDDING, OUTPUT_LAYER, layer))
    assert not any(found.covers(name, rows=rows + 1) for name in (EMBEDDING, OUTPUT_LAYER))
    assert found.covers(layer, rows=rows + 1)
    nothing = choose(flags(None))
    assert isinstance(nothing, NoCheckpoint)
    assert not nothing.covers(layer, rows=rows)


def test_what_would_pass_for_an_empty_folder_is_refused_with_its_remedy(tmp_path: Path) -> None:
    """Else a run that should go on begins anew, with one line in its log to say so."""
    own = checkpoint(tmp_path / "run", 10)
    said = f"{own} is one checkpoint; name the folder it is in: {tmp_path / 'run'} --ckpt-step 10"
    assert refusal(flags(own)) == said
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text("{}")
    assert "hf-to-megatron" in refusal(flags(tmp_path / "llama"))
    theirs = tmp_path / "theirs" / "iter_0000010"
    (theirs / "mp_rank_00").mkdir(parents=True)
    assert f"import-megatron {theirs} NEW_FOLDER" in refusal(flags(theirs))
    pretrained = flags(None, pretrained_checkpoint=str(theirs.parent))
    said = f"--pretrained-checkpoint {theirs.parent} holds no checkpoint that can be used: "
    assert refusal(pretrained).startswith(said)


def test_one_that_was_asked_for_is_used_or_refused(tmp_path: Path) -> None:
    older, newer = checkpoint(tmp_path, 10), checkpoint(tmp_path, 20)
    assert chosen(flags(tmp_path, ckpt_step=10)).folder == older
    (newer / INDEX_FILE).write_text("{")
    assert "--ckpt-step 20" in refusal(flags(tmp_path, ckpt_step=20))
    assert "it does not exist" in refusal(flags(tmp_path, ckpt_step=30))


def test_when_all_are_damaged_one_sentence_says_so(tmp_path: Path) -> None:
    for iteration in (10, 20):
        (checkpoint(tmp_path, iteration) / INDEX_FILE).unlink()
    said = refusal(flags(tmp_path))
    for words in ("no checkpoint that can be used", "iter_0000020", "iter_0000010"):
        assert words in said
    (tmp_path / "thesis").touch()
    said = refusal(flags(tmp_path / "thesis"))
    assert said == f"{tmp_path / 'thesis'} is a file; name the folder that --save named"


def test_an_empty_folder_means_a_new_run_unless_told_otherwise(tmp_path: Path) -> None:
    found = choose(flags(tmp_path / "none"))
    assert isinstance(found, NoCheckpoint)
    assert "initial weights" in found.notes[0]
    assert "--exit-on-missing" in refusal(flags(tmp_path, exit_on_missing_checkpoint=True))
    assert choose(flags(None)) == NoCheckpoint(LrSchedule.of_flags(flags(None)))


def test_a_pretrained_checkpoint_is_for_the_first_start_only(tmp_path: Path) -> None:
    checkpoint(tmp_path / "base", 10)
    args = flags(tmp_path / "run", pretrained_checkpoint=str(tmp_path / "base"))
    assert chosen(args).sources.is_new_run
    checkpoint(tmp_path / "run", 30)
    args = flags(tmp_path / "run", pretrained_checkpoint=str(tmp_path / "base"))
    assert not chosen(args).sources.is_new_run
    assert "--pretrained-checkpoint" in refusal(flags(None, pretrained_checkpoint=str(tmp_path)))


def test_what_was_not_saved_has_to_be_given_up(tmp_path: Path) -> None:
    checkpoint(tmp_path, 10, holds={"optimizer": False, "random states": True})
    assert "without optimizer; add --no-load-optim" in refusal(flags(tmp_path))
    assert chosen(flags(tmp_path, no_load_optim=True)).index.iteration == 10
    assert chosen(flags(tmp_path, finetune=True)).sources.is_new_run


def test_what_differs_and_may_is_told(tmp_path: Path) -> None:
    checkpoint(tmp_path, 10)
    typed = {"typed_flags": ("--rotary-base",), "rotary_base": 500000}
    assert "--rotary-base is 10000 there and 500000 here" in refusal(flags(tmp_path, **typed))
    (line,) = chosen(flags(tmp_path, finetune=True, **typed)).notes
    assert (
        line
        == "as typed, not as in the checkpoint: --rotary-base is 500000, in the checkpoint 10000"
    )


def test_a_rank_that_does_not_see_the_checkpoint_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, 10)

    def exchange(phase: str, payload: dict, error: Exception | None = None) -> list[dict]:
        blind = {"problem": "it does not exist", "visible": False, "host": "b"}
        return [payload, payload | blind if "visible" in payload else payload]

    with pytest.raises(UserError, match=r"rank 1 on b cannot see .* all ranks share"):
        find_checkpoint(flags(tmp_path), exchange, rank=0, world_size=2)


def test_another_schedule_is_refused_with_all_that_differs_and_both_ways_out() -> None:
    own = LrSchedule.of_flags(flags(None))
    require_same_schedule(own, own, folder=Path("runs"))
    stored = replace(own, max_lr=0.1, lr_warmup_steps=8, init_lr=0.01)
    said = sentence_of(require_same_schedule, own, stored, folder=Path("runs"))
    for words in (
        *(f"--lr is 0.1 there and {own.max_lr} here", "--lr-warmup-iters", "is 8 there and 0 here"),
        *("--lr-warmup-init is 0.01", "--override-opt_param", "--use-checkpoint-opt_param"),
    ):
        assert words in said
    assert "--min-lr" not in said


SCHEDULE = {"lr": 0.5, "lr_decay_style": "constant", "lr_warmup_iters": 1}


@pytest.mark.parametrize("without", [{}, {"no_load_optim": True}])
def test_the_whole_schedule_of_the_checkpoint_is_used_or_none_of_it(
    tmp_path: Path, without: dict[str, Any]
) -> None:
    checkpoint(tmp_path, 10)
    there = LrSchedule.of_flags(flags(None))
    args = flags(tmp_path, use_checkpoint_opt_param_scheduler=True, **SCHEDULE, **without)
    found = chosen(args)
    assert (found.schedule, found.schedule_position, args.lr) == (there, 80, there.max_lr)
    args = flags(tmp_path, override_opt_param_scheduler=True, **SCHEDULE, **without)
    found = chosen(args)
    assert found.schedule == LrSchedule.of_flags(args) != there
    assert found.schedule_position == (0 if without else 80)


def test_a_schedule_is_compared_before_a_model_is_built(tmp_path: Path) -> None:
    checkpoint(tmp_path, 10)
    assert "--lr-decay-style is linear there and constant here" in refusal(
        flags(tmp_path, **SCHEDULE)
    )
    found = chosen(flags(tmp_path, no_load_optim=True, **SCHEDULE))
    assert (found.schedule.max_lr, found.schedule_position) == (0.5, 0)


def test_what_an_older_record_lacks_is_taken_from_the_flags_of_its_run(tmp_path: Path) -> None:
    there = flags(None, lr_decay_style="WSD", lr_wsd_decay_iters=3, lr_warmup_init=1e-6)
    older = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")
    whole = LrSchedule.of_flags(there)
    record = {name: value for name, value in asdict(whole).items() if name not in older}
    assert LrSchedule.of_flags(flags(None)).stored(record, vars(there)) == whole
    own = LrSchedule.of_flags(flags(None))
    assert own.stored(record, {}).init_lr == own.init_lr


def test_a_checkpoint_without_a_schedule_is_refused_where_it_is_needed(tmp_path: Path) -> None:
    checkpoint(tmp_path, 10, scheduler=None)
    assert "without schedule; add --no-load-optim" in refusal(flags(tmp_path))
    assert chosen(flags(tmp_path, no_load_optim=True)).schedule_position == 0


def test_a_step_is_of_the_pretrained_checkpoint_while_there_is_no_other(tmp_path: Path) -> None:
    older, newer = checkpoint(tmp_path / "base", 10), checkpoint(tmp_path / "base", 20)
    both = {"pretrained_checkpoint": str(tmp_path / "base"), "ckpt_step": 10}
    assert chosen(flags(tmp_path / "run", **both)).folder == older != newer
    checkpoint(tmp_path / "run", 30)
    assert "--ckpt-step 10" in refusal(flags(tmp_path / "run", **both))
