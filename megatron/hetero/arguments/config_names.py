"""Keys that are valid in a configuration file but are no flags.

Besides this program's own files two kinds are read: Megatron-LM's, whose keys are fields of
megatron-core's configuration classes, and Primus', which adds settings of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# megatron-core's fields whose flags have other names.
RENAMED: Mapping[str, str] = {
    "num_moe_experts": "num_experts",
    "fp8": "fp8_format",
    "fp4": "fp4_format",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "fp8_param": "fp8_param_gather",
    "bias_activation_fusion": "bias_gelu_fusion",
    "delay_grad_reduce": "align_grad_reduce",
    "delay_param_gather": "align_param_gather",
    "barrier_with_L1_time": "barrier_with_level_1_timing",
    "enable_gloo_process_groups": "gloo_process_groups",
    "perform_initialization": "initialization",
    "deprecated_use_mcore_models": "use_mcore_models",
    "use_dist_ckpt_deprecated": "use_dist_ckpt",
    "dist_ckpt_format_deprecated": "dist_ckpt_format",
}

# The flag for each activation that Megatron-LM's files can name.
ACTIVATIONS: Mapping[str, str | None] = {
    "gelu": None,
    "swiglu": "--swiglu",
    "squaredrelu": "--squared-relu",
}


# Primus' tokenizer types that are a Hugging Face folder's.
TOKENIZER = "HuggingFaceTokenizer"
TOKENIZERS = frozenset(
    f"{model}Tokenizer"
    for model in "Llama3 Llama4 Mixtral DeepSeekV2 DeepSeekV3 DeepSeekV4 Lfm2 KimiK2".split()
)


@dataclass(frozen=True)
class Group:
    """Settings of one feature that are no flags."""

    name: str
    switches: frozenset[str] = frozenset()
    """Keys that turn it on. One that is on is refused, or logged with `note` if there is one."""
    others: frozenset[str] = frozenset()
    """Keys of details, which are accepted. One that ends in _ stands for all that begin with it."""
    note: str | None = None
    off_values: frozenset[object] = frozenset()
    """Values of a switch that do not turn it on, beside those of `is_nothing`."""

    def has_key(self, key: str) -> bool:
        return key in self.switches or any(
            key == name or (name.endswith("_") and key.startswith(name)) for name in self.others
        )

    def is_asked_for(self, key: str, value: Any) -> bool:
        """Whether this key turns the feature on."""
        if key not in self.switches or is_nothing(value):
            return False
        return isinstance(value, list) or value not in self.off_values


def is_nothing(value: Any) -> bool:
    """Whether a value means that an option is not used."""
    return value is None or value is False or value in (0, "", [], "null", "none")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


GROUPS = (
    Group(
        "megatron-core's internals, which this program sets itself",
        _names(
            "init_method output_layer_init_method embedding_init_method timers params_dtype"
            " pipeline_dtype autocast_dtype enable_autocast finalize_model_grads_func"
            " grad_scale_func no_sync_func grad_sync_func param_sync_func variable_seq_lengths"
            " num_microbatches_with_partial_activation_checkpoints memory_efficient_layer_norm"
            " moe_token_dropping cpu_offloading cpu_offloading_num_layers _cpu_offloading_context"
            " gated_linear_unit"
        ),
        _names(
            "batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs cpu_offloading_weights"
            " cpu_offloading_activations cpu_offloading_double_ tp_comm_split_ tp_comm_atomic_"
            " tp_comm_bulk_ bert_binary_head original_max_position_embeddings muon_split_qkv"
            " muon_use_nesterov data_parallel_replicate_degree retro_verify_neighbor_count"
        ),
    ),
    Group(
        "Primus' kernels",
        _names(
            "enable_primus_turbo use_turbo_attention use_turbo_gemm use_turbo_grouped_gemm"
            " use_turbo_grouped_mlp use_turbo_rms_norm use_turbo_autotune use_turbo_deepep"
            " use_turbo_fused_act_with_probs moe_use_fused_router_with_aux_score"
            " turbo_sync_free_moe_stage use_turbo_parallel_linear"
            " use_turbo_token_dispatcher_fp8_alltoall use_turbo_permute_padding"
        ),
        _names("turbo_"),
        note="Primus' kernels are not used; this program's own compute the same",
    ),
    Group("Primus' FP8 attention", _names("enable_turbo_attention_float8")),
    Group(
        "Primus' sliding window and attention sinks",
        _names("use_sink_attention sink_sliding_window"),
        _names("sink_window_"),
    ),
    Group(
        "Primus' zero-bubble pipeline",
        _names("patch_zero_bubble"),
        _names(
            "zero_bubble_ enable_zero_bubble enable_zb_runtime enable_1f1b_v"
            " pre_communication_optimization enable_optimizer_post_validation"
            " enable_exactly_numeric_match allow_padding_num_layers profile_memory_iter"
            " interleave_group_size offload_chunk_num offload_time auto_offload_time"
            " offload_overlap_sr num_seq_splits cpu_offload debug_scheduler_table"
        ),
    ),
    Group(
        "Primus' pipeline schedules",
        _names("patch_primus_pipeline dump_pp_data"),
        _names("pp_algorithm communication_method offload offload_ops pp_max_mem pp_cost_"),
    ),
    Group("Primus' on-demand communication", _names("enable_odc use_odc"), _names("odc_")),
    Group(
        "Primus' changes of a model",
        _names(
            "final_logit_softcapping attn_logit_softcapping router_logit_softcapping"
            " lfm_layer_types recompute_layer_ids decoder_pipeline_manual_split_list"
            " use_deprecated_20241209_moe_layer disable_primus_topk_router"
        ),
        _names("conv_L_cache conv_bias moe_router_force_load_balancing_type"),
    ),
    Group("the models that are no GPT", _names("model_type"), off_values=frozenset({"gpt"})),
    Group(
        "continuing from --save by itself",
        _names("auto_continue_train"),
        note="give --load with the folder of --save to go on from it",
    ),
    Group(
        "Primus' own way of working",
        frozenset(),
        _names(
            "trainable sink_level file_sink_level stderr_sink_level disable_tensorboard"
            " disable_wandb disable_mlflow mlflow_ generate_tracelens_"
            " disable_compile_dependencies use_rocm_mem_info use_rocm_mem_info_"
            " disable_profiler_activity_cpu torch_profiler_ disable_last_saving"
            " no_fp8_weight_transpose_cache patch_moe_overlap pp_warmup dataloader_mp_context"
            " log_avg_ wall_clock_step_timer disable_delayed_scaling_patches"
        ),
    ),
)

# Settings of Primus that disable all keys with a prefix.
SWITCHED_OFF: Mapping[str, str] = {"disable_wandb": "wandb_", "disable_tensorboard": "tensorboard_"}
# Headings whose keys count only if the named one is set.
OPTIONAL_HEADINGS: Mapping[str, str] = {"torch_compile": "enable", "mock_dataset": "class"}


def group_of(key: str) -> Group | None:
    """The group of a key; None if it belongs to none."""
    return next((group for group in GROUPS if group.has_key(key)), None)
