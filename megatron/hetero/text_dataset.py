"""megatron-core's GPT dataset of token files, with an index of samples that follows their contents.

megatron-core keeps the index of a dataset's samples in a cache that knows a token file by its path
alone. So text that was tokenized again to the same files would be read by the old text's index.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig


@dataclass
class TextDatasetConfig(GPTDatasetConfig):
    """Configuration of a `TextDataset`."""

    digests: Mapping[str, str] = field(default_factory=dict)
    """What the token files of each prefix hold."""
    digest: str = ""
    """The digest of one dataset, a part of the name of its index in the cache."""
    transform: Callable[[numpy.ndarray, int], numpy.ndarray] | None = None
    """(sample, its index) -> sample. Both are integer arrays of seq_length + 1 tokens."""


class TextDataset(GPTDataset):
    """Applies `config.transform` before a sample is cut into tokens and labels."""

    config: TextDatasetConfig

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str,
        indexed_indices: numpy.ndarray,
        num_samples: int | None,
        index_split: Any,
        config: TextDatasetConfig,
    ) -> None:
        own = copy.copy(config)
        own.digest = config.digests.get(dataset_path, "")
        super().__init__(
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, own
        )

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*GPTDataset._key_config_attributes(), "digest"]

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[numpy.ndarray, ...]:
        # Later releases also return the documents' lengths.
        sample, *others = super()._query_document_sample_shuffle_indices(idx)
        if self.config.transform is not None:
            sample = self.config.transform(sample, int(idx))
        return sample, *others
