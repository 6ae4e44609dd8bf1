"""`BalancedDataLoader`: our steps in the trainer of TorchTitan 0.3.

Only this module imports torchtitan. The trainer builds its dataloader from a nested `Config`; ours
gives the batches of its `MultiModalCollator`, of groups that are packed and balanced already. Ranks
have equally many, so that epochs may end, and a state fits any number of them.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchtitan.components.dataloader import BaseDataLoader
from transformers.models.auto.configuration_auto import AutoConfig

from isobatch.common.errors import ConfigError
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.batch.packed import PackedBatch, packed_batch
from isobatch.loaders.integrations.adapter_checks import (
    check_loss_weights,
    check_media,
    check_whole_step,
    with_ranks,
)
from isobatch.loaders.loader import StreamingLoader
from isobatch.loaders.online.loader import BalancedLoader

TitanBatch = tuple[dict[str, Any], Tensor]
_TOKENS = {"image": "image_token_id", "video": "video_token_id"}
"""TorchTitan's names of tokens, and those of transformers' configs."""
_MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


class BalancedDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Batches of `local_batch_size` rows of `seq_len` tokens; a row is a micro-batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """`dataset_path` is a build, as of `StreamingLoader`."""

        model: str = ""
        """Folder or Hub id of the model in transformers, whose config names tokens and M-RoPE."""
        records: Annotated[Any, tyro.conf.Suppress] = None
        """Dataset, as of `BalancedLoader`; instead of `dataset_path`."""
        epochs: int | None = None
        """Passes over the data; then the trainer ends, on all ranks at the same step."""
        options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Of the loader: `max_tokens`, `seed`, ... The trainer gives the ranks, unless there is a
        `device_mesh`. `micro_batches_per_step` is by default `local_batch_size`; times the
        trainer's gradient accumulation steps the last step of an epoch is whole.
        """

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **trainer: Any,
    ) -> None:
        if (config.dataset_path is None) == (config.records is None):
            raise ConfigError("give either dataset_path, a build, or records, a dataset")
        if not config.model:
            raise ConfigError("give model, the folder or Hub id of the model in transformers")
        if "epochs" in config.options:
            raise ConfigError("options has epochs; give epochs of BalancedDataLoader.Config")
        options = with_ranks(config.options, dp_rank, dp_world_size)
        options = {"micro_batches_per_step": local_batch_size} | options
        if (per_step := options["micro_batches_per_step"]) % local_batch_size:
            raise ConfigError(
                f"micro_batches_per_step is {per_step}; use a multiple of local_batch_size, "
                f"{local_batch_size}"
            )
        self.model_config = AutoConfig.from_pretrained(config.model, trust_remote_code=False)
        self.loader: StreamingLoader | BalancedLoader
        if config.records is None:
            self.loader = StreamingLoader(config.dataset_path, **options)
        else:
            self.loader = BalancedLoader(config.records, model=config.model, **options)
        check_loss_weights(self.loader, "TorchTitan")
        self._seq_len, self._batch_size, self._epochs = seq_len, local_batch_size, config.epochs
        self._special = special_tokens(self.model_config, trainer.get("tokenizer"))
        self._num_left = 0
        """Micro-batches of the loader's last step that are not in a batch yet."""

    def __iter__(self) -> Iterator[TitanBatch]:
        """Batches, epoch after epoch, until `epochs` are over."""
        loader, size = self.loader, self._batch_size
        while self._epochs is None or loader.epoch < self._epochs:
            if self._epochs == loader.epoch + 1 and loader.is_at_end:
                return  # resumed after the last step of all
            num_steps = 0
            for step in loader:
                num_steps += 1
                for start in range(0, len(step), size):
                    self._num_left = len(step) - start - size
                    yield titan_batch(
                        step[start : start + size],
                        self.model_config,
                        seq_len=self._seq_len,
                        special=self._special,
                    )
            if not num_steps:
                return  # as StepDataset

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, equal on all ranks. ConfigError in the middle of one of its steps."""
        check_whole_step(
            self._num_left,
            "give micro_batches_per_step a divisor of local_batch_size times accumulation steps",
        )
        return {"loader": json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume on any number of ranks; ConfigError as of the loaders. An empty state is none."""
        if state_dict:
            self.loader.load_state_dict(json.loads(state_dict["loader"]))
            self._num_left = 0

    def close(self) -> None:
        """End the loader's threads; TorchTitan's main branch calls it."""
        self.loader.close()


def titan_batch(
    batches: Sequence[MicroBatch], model: Any, *, seq_len: int, special: dict[str, int]
) -> TitanBatch:
    """(inputs, labels) of micro-batches as `MultiModalCollator` of TorchTitan 0.3 has them.

    `input`, `positions` and labels (shifted) int64, (rows, seq_len); `mrope_positions` (rows,
    seq_len, 3) for models with M-RoPE; `pixel_values` float32 (images of all rows, most patches,
    values of a patch), zeros after an image's patches, and `grid_thw` (images, 3), both None
    without images, and the same of videos. What fills up a row has positions 0, as TorchTitan's.
    ConfigError as of `packed_batch`, for models whose images have no grids, and for audio.
    """
    rows = [packed_batch(batch, model, pad_total_to=seq_len) for batch in batches]
    for row in rows:
        check_media(row.media, _MEDIA, "TorchTitan")
    inputs: dict[str, Any] = {
        "input": torch.stack([row.input_ids for row in rows]),
        "positions": torch.stack([row.position_ids * row.is_token for row in rows]),
        "special_tokens": dict(special),
    }
    for suffix, grids_name in (("", "image_grid_thw"), ("_videos", "video_grid_thw")):
        parts = [row.media for row in rows if f"pixel_values{suffix}" in row.media]
        if any(grids_name not in media for media in parts):
            raise ConfigError(f"{type(model).__name__} has images without grids; TorchTitan's have")
        grids = torch.cat([media[grids_name] for media in parts]) if parts else None
        pixels = None
        if grids is not None:
            patches = torch.cat([media[f"pixel_values{suffix}"] for media in parts]).float()
            images = list(torch.split(patches, grids.prod(dim=1).tolist()))
            pixels = pad_sequence(images, batch_first=True)
        inputs |= {f"pixel_values{suffix}": pixels, f"grid_thw{suffix}": grids}
    if rows[0].mrope_positions is not None:
        inputs["mrope_positions"] = torch.stack([_mrope(row) for row in rows])
    return inputs, torch.stack([row.labels for row in rows])


def special_tokens(model: Any, tokenizer: Any) -> dict[str, int]:
    """Ids by TorchTitan's names: of its `MultiModalTokenizer`, else of the model's config.

    ConfigError if both have an id and they differ.
    """
    names = getattr(tokenizer, "TOKEN_FIELDS", _TOKENS)
    special = {}
    for name in names:
        wanted = getattr(model, _TOKENS.get(name, f"{name}_token_id"), None)
        token_id = getattr(tokenizer, f"{name}_id", wanted)
        if name in _TOKENS and wanted is not None and token_id != wanted:
            raise ConfigError(
                f"the {name} token is {token_id} in TorchTitan's tokenizer and {wanted} in the "
                "model's config; give both of one model"
            )
        if token_id is not None:
            special[f"{name}_id"] = token_id
    return special


def _mrope(row: PackedBatch) -> Tensor:
    """(tokens, 3); what fills up the row is a text of its own.

    But after a sample of one token, of which TorchTitan cannot tell it.
    """
    assert row.mrope_positions is not None
    if row.cu_seqlens[-1] - row.cu_seqlens[-2] == 1:
        return row.mrope_positions.T
    filling = _is_filling(row)
    text = torch.arange(len(filling)) - int((~filling).sum())
    return torch.where(filling, text, row.mrope_positions).T


def _is_filling(row: PackedBatch) -> Tensor:
    """Whether a place is after the last sample's tokens; samples are not padded themselves."""
    return ~row.is_token
