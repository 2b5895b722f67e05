"""What a launch that names nothing gets, as validation decides it; docs/flags.md has the rest."""

import pytest

# As in Megatron-LM at core 0.16.1, after its own validation.
MEGATRON = {
    "apply_rope_fusion": False,  # positions are learned
    "add_qkv_bias": True,  # linear layers have a bias
    "start_weight_decay": 0.01,  # weight decay does not grow
    "end_weight_decay": 0.01,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "overlap_p2p_comm": False,  # nothing is interleaved
    "align_param_gather": False,
    "align_grad_reduce": True,
    "dataloader_type": "single",
    "split": None,  # mock data
    "no_load_optim": None,
    "consumed_train_samples": 0,
    "skipped_train_samples": 0,
    "consumed_valid_samples": 0,
    "variable_seq_lengths": False,
}
OURS = {
    "params_dtype": "float32",  # a torch.dtype there
    "hetero_pipeline_sizes": None,
    "ignored_flags": [],
}


def test_defaults(parse):
    expected = MEGATRON | OURS
    found = vars(parse())
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("flags", "dest", "value"),
    [
        ("--override-opt-param-scheduler", "override_opt_param_scheduler", True),
        ("--persistent-save-interval 5", "save_interval", 5),
        ("--lr=2e-3", "lr", 2e-3),
        ("--lr 1e-2 --lr 2e-3", "lr", 2e-3),
    ],
)
def test_flag_has_the_destination_of_megatron(parse, flags, dest, value):
    assert getattr(parse(flags), dest) == value
