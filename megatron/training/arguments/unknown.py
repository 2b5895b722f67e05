"""What to say about a flag that this program does not have.

A flag of Megatron-LM that belongs to a feature left out here is told apart from a slip of the
finger: the first has to go, the second has to be corrected.
"""

import difflib
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """A part of Megatron-LM that is left out, and how its flags are recognised."""

    name: str
    prefixes: tuple[str, ...] = ()
    flags: frozenset[str] = frozenset()

    def owns(self, flag: str) -> bool:
        return flag in self.flags or flag.startswith(self.prefixes)


def _flags(words: str) -> frozenset[str]:
    return frozenset(f"--{word}" for word in words.split())


# In order: the first feature that owns a flag names it.
FEATURES = (
    Feature(
        "mixture-of-experts models",
        ("--moe-", "--num-experts", "--expert-"),
        _flags("overlap-moe-expert-parallel-comm ep-overlap-early-attn-memory-release"),
    ),
    Feature(
        "reinforcement learning",
        ("--rl-", "--no-rl-", "--grpo-", "--langrl-", "--no-langrl-", "--perform-rl", "--refit-"),
    ),
    Feature(
        "hybrid and Mamba models",
        ("--mamba-", "--hybrid-", "--is-hybrid", "--disable-mamba-"),
    ),
    Feature("AMD's Lumen layers", ("--lumen-", "--linear-fp8")),
    Feature("linear-attention models", ("--linear-",), _flags("experimental-attention-variant")),
    Feature("sparse-attention models", ("--dsa-",)),
    Feature(
        "multi-latent attention",
        ("--mla-", "--q-lora-", "--kv-lora-", "--qk-head-", "--qk-pos-emb-", "--mscale"),
        _flags(
            "multi-latent-attention v-head-dim rotary-scaling-factor cache-mla-latents rope-type"
        ),
    ),
    Feature("multi-token prediction", ("--mtp-",)),
    Feature(
        "context parallelism",
        ("--cp-",),
        _flags("hierarchical-context-parallel-sizes max-seqlen-per-dp-cp-rank"),
    ),
    Feature(
        "8-bit and 4-bit training",
        (
            *("--fp8-", "--fp4-", "--no-fp8-", "--disable-fp8-", "--keep-fp8-"),
            *("--num-layers-at-", "--kitchen-"),
        ),
        _flags(
            "first-last-layers-bf16 te-precision-config-file use-kitchen-attention"
            " reuse-grad-buf-for-mxfp8-param-ag"
        ),
    ),
    Feature(
        "fully sharded data parallelism",
        (
            "--use-megatron-fsdp",
            "--use-custom-fsdp",
            "--use-torch-fsdp",
            "--torch-fsdp",
            "--fsdp-",
            "--megatron-fsdp-",
        ),
        _flags(
            "data-parallel-sharding-strategy outer-dp-sharding-strategy"
            " enable-full-sharding-in-hsdp suggested-communication-unit-size"
            " no-strict-fsdp-dtensor-load"
            " disable-strict-fsdp-dtensor-load init-model-with-meta-device"
            " no-gradient-reduce-div-fusion create-all-gather-group"
        ),
    ),
    Feature(
        "inference",
        ("--inference-", "--no-inference-", "--flash-decode", "--mlp-chunks-for-"),
        _flags(
            "max-tokens-to-oom use-legacy-static-engine decode-only-cuda-graphs"
            " nccl-all-reduce-for-prefill enable-chunked-prefill disable-chunked-prefill"
            " symmetric-ar-type batch-invariant-mode"
        ),
    ),
    Feature("CUDA graphs", ("--cuda-graph", "--enable-cuda-graph", "--external-cuda-graph")),
    Feature(
        "vision models",
        ("--vision-", "--img-", "--dino-", "--swin-", "--mask-type", "--mask-factor", "--mrope-"),
        _flags(
            "num-classes num-channels patch-dim classes-fraction data-per-class-fraction"
            " no-data-sharding head-lr-mult iter-per-epoch"
        ),
    ),
    Feature(
        "BERT, T5 and retrieval models",
        (
            *("--bert-", "--biencoder-", "--ict-", "--retriever-", "--retro-", "--indexer-"),
            "--encoder-",
        ),
        _flags(
            "decoder-num-layers decoder-seq-length output-bert-embeddings titles-data-path"
            " query-in-block-prob use-one-sent-docs evidence-data-path block-data-path"
            " embedding-path mask-prob short-seq-prob sample-rate relative-attention-num-buckets"
            " relative-attention-max-distance pipeline-model-parallel-split-rank"
        ),
    ),
    Feature("fill-in-the-middle data", ("--fim-",)),
    Feature("supervised fine-tuning", ("--sft",)),
    Feature("the Muon optimizer", ("--muon-",)),
    Feature("the Lion optimizer", ("--lion-",)),
    Feature("YaRN's positions", ("--yarn-", "--no-yarn-")),
    Feature("distillation", ("--logits-load-", "--logits-save-")),
    Feature("OpenTelemetry", ("--otel-",)),
    Feature(
        "offloading to the CPU",
        ("--cpu-offload", "--optimizer-cpu-", "--optimizer-offload-", "--fine-grained-activation-"),
        _flags(
            "use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads"
            " no-pin-cpu-params offload-modules min-offloaded-tensor-size"
        ),
    ),
    Feature(
        "restarting and fault injection",
        ("--inprocess-", "--ft-", "--error-injection-", "--adlr-autoresume"),
        _flags(
            "enable-ft-package calc-ft-timeouts check-for-spiky-loss"
            " check-for-large-grads result-rejected-tracker-filename iterations-to-skip"
        ),
    ),
    Feature(
        "straggler and workload inspection",
        ("--straggler-", "--log-straggler", "--disable-straggler-", "--run-workload-inspector"),
    ),
    Feature("memory snapshots", ("--record-memory-history", "--memory-snapshot-")),
    Feature(
        "Transformer Engine's communication overlap",
        ("--tp-comm-", "--no-tp-comm-", "--disable-tp-comm-"),
    ),
    Feature(
        "NCCL user buffers and SHARP",
        ("--use-nccl-ub", "--use-sharp", "--sharp-", "--nccl-communicator-"),
        _flags("disable-symmetric-registration ddp-pad-buckets-for-high-nccl-busbw"),
    ),
    Feature(
        "low-precision optimizer state",
        ("--main-grads-", "--main-params-", "--exp-avg-", "--use-precision-aware-"),
    ),
    Feature("layers that differ from each other", ("--heterogeneous-layers-",)),
    Feature(
        "other checkpoint kinds",
        ("--non-persistent-", "--replication", "--ckpt-convert-", "--dist-ckpt-", "--distrib-"),
        _flags(
            "use-persistent-ckpt-worker load-main-params-from-ckpt save-wgrads-interval"
            " save-dgrads-interval use-mp-args-from-checkpoint-args"
            " no-use-tokenizer-model-from-checkpoint-args"
            " disable-use-tokenizer-model-from-checkpoint-args"
        ),
    ),
    Feature("Megatron-LM's models from before megatron-core", (), _flags("use-legacy-models")),
)

# Single options of Megatron-LM that belong to no feature above.
NOT_OFFERED = _flags(
    "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split"
    " full-validation multiple-validation-sets test-mode per-dataset-sequences-path"
    " phase-transition-iterations object-storage-cache-path"
    " dataloader-fast-cache-load dataloader-defer-npy-index-mmap allow-ambiguous-pad-tokens"
    " decrease-batch-size-if-needed"
    " exit-signal-handler-for-dataloader check-weight-hash-across-dp-replicas-interval"
    " train-sync-interval log-energy log-max-attention-logit openai-gelu quick-geglu"
    " glu-linear-offset activation-func-clamp-value use-fused-weighted-squared-relu"
    " apply-residual-connection-post-layernorm qk-l2-norm qk-clip"
    " qk-clip-alpha qk-clip-threshold attention-output-gate softmax-type window-size"
    " window-attn-skip-freq no-rope-freq"
    " disable-bf16-reduced-precision-matmul use-ring-exchange-p2p delay-wgrad-compute"
    " defer-embedding-wgrad-compute wgrad-deferral-limit"
    " no-clone-scatter-output-in-embedding disable-clone-scatter-output-in-embedding"
    " config-logger-dir te-rng-tracker data-parallel-random-init disable-jit-fuser"
    " high-priority-stream-groups pipeline-model-parallel-comm-backend"
    " distributed-timeout-seconds-after-init ddp-reduce-scatter-with-fp32-accumulation"
    " overlap-param-gather-with-optimizer-step num-distributed-optimizer-instances"
    " use-tp-pp-dp-mapping fake-process-group enable-experimental spec"
    " apply-wd-to-qk-layernorm no-weight-decay-cond-type dump-param-to-param-group-map"
    " standalone-embedding-stage s3-cache-path delay-param-gather no-delay-grad-reduce"
    " override-ckpt-iteration freeze-all-layers renormalize-blend-weights output-logit-dtype"
    " use-same-sampling-seed-across-dp-ranks dataloader-inter-document-masking"
)

# Flags that older scripts carry, and the flag that took their place.
REPLACED = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--checkpoint-activations": "--recompute-activations",
    "--activations-checkpoint-method": "--recompute-method",
}

# Flags of a Megatron-LM newer than the megatron-core below, and what does the same here.
NEWER = {"--step-batch-size-schedule": "--rampup-batch-size"}

# Promised in the design, per mesh; each leaves this set with the change that brings it.
HETERO_LATER = _flags(
    "hetero-tensor-sizes hetero-data-sizes hetero-micro-batch-sizes hetero-recompute"
)


def explain_unknown(flag: str, known: Collection[str]) -> str:
    """One sentence on why `flag` is refused and what to type instead, given the `known` flags."""
    if flag in HETERO_LATER:
        return f"{flag} is not available yet; remove it"
    if flag in REPLACED:
        return f"{flag} is no longer a flag of Megatron-LM; use {REPLACED[flag]}"
    if flag in NEWER:
        return f"{flag} is a flag of a newer Megatron-LM; use {NEWER[flag]}"
    # The nearest name would be the opposite of what was meant.
    if f"--no-{flag[2:]}" in known:
        return f"{flag} is on unless --no-{flag[2:]} is given; remove it"
    if flag.startswith("--no-") and f"--{flag[5:]}" in known:
        return f"{flag} is not a flag of this program; leave --{flag[5:]} out instead"
    suggestion = nearest(flag, known)
    # A slip in a flag we do have must not be taken for a feature we lack: `--encoder-` and the
    # like are whole families, so a flag counts as one of theirs only when no flag of ours is
    # a keystroke or two away.
    if suggestion is None or not _is_slip(flag, suggestion):
        for feature in FEATURES:
            if feature.owns(flag):
                return (
                    f"{flag} is a flag of {feature.name}, which this program does not offer; "
                    "remove it"
                )
        if flag in NOT_OFFERED:
            return f"{flag} is a flag of Megatron-LM that this program does not offer; remove it"
    if suggestion is None:
        return f"{flag} is not a flag of this program; see --help for those it has"
    return f"{flag} is not a flag of this program; did you mean {suggestion}?"


def nearest(flag: str, known: Collection[str]) -> str | None:
    """The known flag closest to `flag`, or None where none resembles it."""
    # Underscores are how Python spells the same name; they must not count as a difference.
    spelled: dict[str, str] = {}
    for name in known:
        spelled.setdefault(name.replace("_", "-").lower(), name)
    matches = difflib.get_close_matches(flag.replace("_", "-").lower(), spelled, n=1, cutoff=0.6)
    return spelled[matches[0]] if matches else None


def _is_slip(flag: str, suggestion: str) -> bool:
    if flag in NOT_OFFERED or any(flag in feature.flags for feature in FEATURES):
        return False
    matcher = difflib.SequenceMatcher(a=flag, b=suggestion, autojunk=False)
    same = sum(block.size for block in matcher.get_matching_blocks())
    return max(len(flag), len(suggestion)) - same <= 2
