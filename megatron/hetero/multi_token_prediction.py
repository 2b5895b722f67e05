"""Multi-token prediction (MTP): layers after the last one that predict the tokens after the next.

megatron-core shifts tokens and labels inside the model, where ranks that share sequences have to
send each other the tokens at their edges. Here they are shifted before a sequence is shared
(`shift_batch`). megatron-core takes the mean of the losses over a rank's own tokens, and over
process groups that meshes of different shapes do not have. Here they weigh what the loss of the
next token weighs (`PredictingGPT`), and are told through the statistics of a step
(`PredictionLosses`).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor

from megatron.hetero.core_private import mtp_layer_field

TOKENS, LABELS, LOSS_MASK = "mtp_tokens", "mtp_labels", "mtp_loss_mask"
WHOLE_TOKENS = "mtp_whole_tokens"


def shift_batch(batch: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """A micro-batch of whole sequences with what so many MTP layers see and predict.

    `mtp_tokens`, `mtp_labels` and `mtp_loss_mask` are (b, s, layers): layer k, counted from 0, has
    the tokens, labels and mask of the position k + 1 further on, and zeros after the last one.
    """
    if not layers:
        return batch
    names = {TOKENS: "tokens", LABELS: "labels", LOSS_MASK: "loss_mask"}
    return batch | {
        shifted: torch.stack([_shifted(batch[name], k + 1) for k in range(layers)], dim=-1)
        for shifted, name in names.items()
    }


def _shifted(rows: torch.Tensor, by: int) -> torch.Tensor:
    return F.pad(rows[:, by:], (0, min(by, rows.shape[1])))


@dataclass(frozen=True)
class Ahead:
    """What the MTP layers of a rank see and predict in one micro-batch, see `shift_batch`."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    whole_tokens: torch.Tensor | None
    """Of each layer, the number of the whole sequences' tokens that count; None: the rank's own."""
    weight: float
    """Factor of the differentiated losses, the same as of the next token's."""

    @classmethod
    def of(cls, batch: dict[str, torch.Tensor], *, weight: float) -> Ahead | None:
        """None where the batch says nothing of MTP layers."""
        if TOKENS not in batch:
            return None
        whole = batch.get(WHOLE_TOKENS)
        return cls(batch[TOKENS], batch[LABELS], batch[LOSS_MASK], whole, weight)


class PredictionLayer(MultiTokenPredictionLayer):
    """megatron-core's MTP layer, for tokens that have been shifted already."""

    def _get_embeddings(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        embedding: torch.nn.Module,
        hidden_states: torch.Tensor,
        packed_seq_params: Any = None,
        **further: Any,
    ) -> tuple[Any, ...]:
        decoder_input = embedding(input_ids=input_ids, position_ids=position_ids)
        hidden_states = make_viewless_tensor(hidden_states, requires_grad=True, keep_graph=True)
        # Newer releases shift a mask of padding as well, which no run here has.
        return input_ids, position_ids, *further.values(), decoder_input, hidden_states

    def _checkpointed_forward(self, *inputs: Any, **options: Any) -> torch.Tensor:
        # Release 0.18 gives its own function a mask that this does not take.
        if "padding_mask" in options and options["padding_mask"] is None:
            del options["padding_mask"]
        output: torch.Tensor = super()._checkpointed_forward(*inputs, **options)
        return output


def block_spec(
    transformer_layer: ModuleSpec, norm: type[torch.nn.Module], layers: int
) -> MultiTokenPredictionBlockSubmodules:
    """megatron-core's block of so many MTP layers with this layer and norm."""
    layer = ModuleSpec(
        module=PredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm,
            hnorm=norm,
            eh_proj=ColumnParallelLinear,
            layer_norm=norm,
            **{mtp_layer_field(): transformer_layer},
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * layers)


class PredictingGPT(GPTModel):
    """A last model chunk with MTP layers. They are computed in training alone.

    Attributes:
        sums: (layers, 2) float64, of each MTP layer the sum of its token losses and their number,
            since somebody has set them to zero.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        config: TransformerConfig = options["config"]
        self._layers = config.mtp_num_layers or 0
        self._scale = (config.mtp_loss_scaling_factor or 0.0) / self._layers
        self._ahead: Ahead | None = None
        self._per_token = config.calculate_per_token_loss
        self.sums = torch.zeros(self._layers, 2, dtype=torch.float64)
        # What megatron-core would do after the decoder is done here.
        self.config = copy.copy(config)
        self.config.mtp_num_layers = None
        self._share_embedding()

    def _share_embedding(self) -> None:
        """Make this stage's embedding the first one's copy, as a tied output layer is."""
        weight = self.embedding.word_embeddings.weight
        weight.is_embedding_or_output_parameter = True
        if self.share_embeddings_and_output_weights:
            # The embedding's gradient is added to what the output layer accumulates by itself.
            weight.zero_out_wgrad = True
            # megatron-core makes one that nothing reads.
            self.output_layer.weight = None

    def forward(self, *args: Any, ahead: Ahead | None = None, **options: Any) -> torch.Tensor:
        """As GPTModel's; without `ahead` the MTP layers are not computed."""
        self._ahead = ahead if self.training else None
        output: torch.Tensor = super().forward(*args, **options)
        return output

    def _postprocess(self, *, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            hidden_states = self._attach_losses(hidden_states, ahead, **options)
        options["mtp_in_postprocess"] = False
        output: torch.Tensor = super()._postprocess(hidden_states=hidden_states, **options)
        return output

    def _attach_losses(
        self,
        hidden_states: torch.Tensor,
        ahead: Ahead,
        *,
        attention_mask: torch.Tensor | None,
        rotary_pos_emb: torch.Tensor | None,
        **_: Any,
    ) -> torch.Tensor:
        """The decoder's output, with the MTP layers' losses in its backward pass."""
        output_weight = None
        if self.share_embeddings_and_output_weights:
            output_weight = self.shared_embedding_or_output_weight()
        predicting, summed = hidden_states, []
        for k, layer in enumerate(self.mtp.layers):
            predicting, *_ids = layer(
                input_ids=ahead.tokens[..., k],
                position_ids=None,
                hidden_states=predicting,
                attention_mask=attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                embedding=self.embedding,
            )
            logits, _bias = self.output_layer(predicting, weight=output_weight)
            losses = self.compute_language_model_loss(ahead.labels[..., k], logits)
            mask = ahead.loss_mask[..., k].float()
            losses, tokens = losses.float() * mask, mask.sum()
            summed.append(torch.stack([losses.detach().double().sum(), tokens.double()]))
            attached = losses * (self._scale * ahead.weight)
            if not self._per_token:
                counted = tokens if ahead.whole_tokens is None else ahead.whole_tokens[k]
                attached = attached / counted.clamp(min=1)
            hidden_states = MTPLossAutoScaler.apply(hidden_states, attached)
        self.sums = self.sums.to(summed[0].device) + torch.stack(summed)
        return hidden_states


def model_class(*, predicts: bool) -> type[GPTModel]:
    """The class of a model chunk, which `predicts` if MTP layers are on it."""
    return PredictingGPT if predicts else GPTModel


class PredictionLosses:
    """The losses of the MTP layers in a step, as Megatron names them, each the mean over tokens."""

    def __init__(self, args: argparse.Namespace, chunks: Iterable[torch.nn.Module]) -> None:
        self._layers: int = args.mtp_num_layers or 0
        found = (module for chunk in chunks for module in chunk.modules())
        self._model = next((m for m in found if isinstance(m, PredictingGPT)), None)
        self.size = 2 * self._layers
        if self._model is not None:
            self._model.sums.zero_()

    def take(self, micro_batches: int, device: torch.device) -> torch.Tensor:
        """This rank's summands of what `read` reads since the last call, float64 (size,).

        Tensor-parallel ranks count the same losses and tokens, which leaves the mean as it is.
        """
        taken = torch.zeros(self.size, dtype=torch.float64, device=device)
        if self._model is not None:
            taken += self._model.sums.reshape(-1)
            self._model.sums.zero_()
        return taken

    def read(self, summed: Sequence[float]) -> dict[str, float]:
        """By name, from the sum over all ranks."""
        return {
            f"mtp_{k + 1} loss": summed[2 * k] / summed[2 * k + 1] if summed[2 * k + 1] else 0.0
            for k in range(self._layers)
        }
