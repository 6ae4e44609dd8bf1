"""`BalancedDataLoader`: our steps in TorchTitan's trainer, 0.3 and main.

Only this module imports torchtitan. The trainer builds its dataloader from a nested `Config`; ours
gives the batches of its `MultiModalCollator`, of groups that are packed and balanced already. Ranks
have equally many, so that epochs may end, and a state fits any number of them. Which of the two
dialects it has follows from the base class that the installed TorchTitan has.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from importlib.util import find_spec
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.models.auto.configuration_auto import AutoConfig

from isobatch.common.errors import ConfigError
from isobatch.common.types import LABEL_IGNORE
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

IS_MAIN = find_spec("torchtitan.components.data") is not None
"""Whether the installed TorchTitan is main, and not 0.3."""
if IS_MAIN:
    from torchtitan.components.data import types as titan_types
    from torchtitan.components.data.loader import BaseDataLoader
else:
    from torchtitan.components.dataloader import BaseDataLoader

TitanBatch = tuple[dict[str, Any], Tensor]
_TOKENS = {"image": "image_token_id", "video": "video_token_id"}
"""TorchTitan's names of tokens, and those of transformers' configs."""
_MAIN_FIELDS = {
    *("input", "labels", "positions", "padding_mask", "num_valid_tokens"),
    *("loss_token_counts", "routing_token_counts"),
}
"""Of main's microbatch; those without a default."""
_MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


class BalancedDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Batches of the trainer's rows; a row of T tokens is a micro-batch of ours.

    0.3: `local_batch_size` rows of `seq_len` tokens. Main: a microbatch of
    `num_tokens_per_microbatch`, one row.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """Where the data and the model are; its base's fields of batches have no effect."""

        dataset_path: str | None = None
        """Build, as of `StreamingLoader`."""
        model: str = ""
        """Folder or Hub id of the model in transformers, whose config names tokens and M-RoPE."""
        records: Annotated[Any, tyro.conf.Suppress] = None
        """Dataset, as of `BalancedLoader`; instead of `dataset_path`."""
        epochs: int | None = None
        """Passes over the data; then the trainer ends, on all ranks at the same step."""
        options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Of the loader: `max_tokens`, `seed`, ... The trainer gives the ranks, unless there is a
        `device_mesh`. `micro_batches_per_step` is by default the rows of a batch; times the
        trainer's gradient accumulation steps the last step of an epoch is whole.
        """

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        **trainer: Any,
    ) -> None:
        if IS_MAIN:
            check_main(trainer)
            self._row_tokens, self._num_rows = trainer["num_tokens_per_microbatch"], 1
        else:
            self._row_tokens, self._num_rows = trainer["seq_len"], trainer["local_batch_size"]
        if (config.dataset_path is None) == (config.records is None):
            raise ConfigError("give either dataset_path, a build, or records, a dataset")
        if not config.model:
            raise ConfigError("give model, the folder or Hub id of the model in transformers")
        if "epochs" in config.options:
            raise ConfigError("options has epochs; give epochs of BalancedDataLoader.Config")
        options = with_ranks(config.options, dp_rank, dp_world_size)
        options = {"micro_batches_per_step": self._num_rows} | options
        if (per_step := options["micro_batches_per_step"]) % self._num_rows:
            raise ConfigError(
                f"micro_batches_per_step is {per_step}; use a multiple of local_batch_size, "
                f"{self._num_rows}"
            )
        self.model_config = AutoConfig.from_pretrained(config.model, trust_remote_code=False)
        self.loader: StreamingLoader | BalancedLoader
        if config.dataset_path is not None:
            self.loader = StreamingLoader(config.dataset_path, **options)
        else:
            self.loader = BalancedLoader(config.records, model=config.model, **options)
        check_loss_weights(self.loader, "TorchTitan")
        self._epochs = config.epochs
        self._max_context: int = trainer.get("max_context_length", self._row_tokens)
        self.max_num_documents = getattr(config, "max_num_documents", None)
        self._special = special_tokens(self.model_config, trainer.get("tokenizer"))
        self._num_left = 0
        """Micro-batches of the loader's last step that are not in a batch yet."""

    def __iter__(self) -> Iterator[Any]:
        """Batches, epoch after epoch, until `epochs` are over."""
        loader, size = self.loader, self._num_rows
        while self._epochs is None or loader.epoch < self._epochs:
            if self._epochs == loader.epoch + 1 and loader.is_at_end:
                return  # resumed after the last step of all
            num_steps = 0
            for step in loader:
                num_steps += 1
                for start in range(0, len(step), size):
                    self._num_left = len(step) - start - size
                    yield self._batch(step[start : start + size])
            if not num_steps:
                return  # as StepDataset

    def _batch(self, batches: Sequence[MicroBatch]) -> Any:
        model, special = self.model_config, self._special
        if not IS_MAIN:
            return titan_batch(batches, model, seq_len=self._row_tokens, special=special)
        values = titan_microbatch(
            batches[0],
            model,
            num_tokens=self._row_tokens,
            max_context=self._max_context,
            max_documents=self.max_num_documents,
            special=special,
        )
        kind = titan_types.TokenizedTrainingMicrobatch
        return kind(
            **{part.name: values[part.name] for part in fields(kind) if part.name in values}
        )

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, equal on all ranks. ConfigError in the middle of one of its steps."""
        check_whole_step(
            self._num_left,
            "give micro_batches_per_step a divisor of a batch's rows times accumulation steps",
        )
        return {"loader": json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume on any number of ranks; ConfigError as of the loaders. An empty state is none."""
        if state_dict:
            self.loader.load_state_dict(json.loads(state_dict["loader"]))
            self._num_left = 0

    def close(self) -> None:
        """End the loader's threads; main calls it."""
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
    inputs: dict[str, Any] = {
        "input": torch.stack([row.input_ids for row in rows]),
        "positions": torch.stack([row.position_ids * row.is_token for row in rows]),
        "special_tokens": dict(special),
    }
    media = _media(rows, model)
    for suffix in ("", "_videos"):
        if (grids := media[f"grid_thw{suffix}"]) is not None:
            images = torch.split(media[f"pixel_values{suffix}"], grids.prod(dim=1).tolist())
            media[f"pixel_values{suffix}"] = pad_sequence(list(images), batch_first=True)
    inputs |= media
    if rows[0].mrope_positions is not None:
        inputs["mrope_positions"] = torch.stack([_mrope(row) for row in rows])
    return inputs, torch.stack([row.labels for row in rows])


def titan_microbatch(
    batch: MicroBatch,
    model: Any,
    *,
    num_tokens: int,
    max_context: int,
    special: dict[str, int],
    max_documents: int | None = None,
) -> dict[str, Any]:
    """Values of main's `TokenizedTrainingMicrobatch` by name, as its `MultiModalCollator` has them.

    `input`, `labels` (shifted) and `positions` int64, (num_tokens,); `padding_mask` bool, true
    after the last sample, where positions begin again after `max_context` tokens. `model_kwargs`
    has `pixel_values` float32 (patches of all images, values of a patch), `grid_thw` (images, 3),
    the same of videos, `special_tokens` and `mrope_positions` (num_tokens, 3). The labels' number
    is there by each of the names that main has had. ConfigError as of `titan_batch`; for a sample
    longer than `max_context`, and more than `max_documents` samples.
    """
    row = packed_batch(batch, model, pad_total_to=num_tokens)
    if (longest := int(row.cu_seqlens.diff().max())) > max_context:
        raise ConfigError(
            f"a sample has {longest:,} tokens, more than max_context_length {max_context:,}; raise "
            "training.max_context_length, or leave out longer samples"
        )
    if max_documents is not None and row.num_samples > max_documents:
        raise ConfigError(
            f"a micro-batch has {row.num_samples} samples, blank ones among them, more than "
            f"max_num_documents {max_documents} of BalancedDataLoader.Config; raise it"
        )
    padding = torch.arange(num_tokens) - int(row.is_token.sum())
    positions = torch.where(row.is_token, row.position_ids, padding % max_context)
    kwargs = {"special_tokens": dict(special), **_media([row], model)}
    if row.mrope_positions is not None:
        kwargs["mrope_positions"] = torch.where(row.is_token, row.mrope_positions, positions).T
    num_labels = (row.labels != LABEL_IGNORE).sum()
    return {
        "input": row.input_ids,
        "labels": row.labels,
        "positions": positions,
        "padding_mask": ~row.is_token,
        "model_kwargs": kwargs,
        "num_valid_tokens": int(num_labels),
        "loss_token_counts": num_labels,
        "routing_token_counts": row.is_token.sum()[None],
    }


def check_main(trainer: Mapping[str, Any]) -> None:
    """ConfigError for a main that builds dataloaders, or takes batches, in a way not known here."""
    kind = getattr(titan_types, "TokenizedTrainingMicrobatch", None)
    parts = () if kind is None else fields(kind)
    needed = {part.name for part in parts if part.default is part.default_factory is MISSING}
    is_known = "num_tokens_per_microbatch" in trainer and not trainer.get("num_mtp_layers")
    if not parts or needed - _MAIN_FIELDS or not is_known:
        raise ConfigError(
            "this torchtitan's batches are not known here: install 0.3.0, or main as of commit "
            f"dcaa2828 (September 2026), without MTP layers; it has fields {sorted(needed)} and "
            f"builds dataloaders with {sorted(trainer)}"
        )


def _media(rows: Sequence[PackedBatch], model: Any) -> dict[str, Any]:
    """Patches, float32, and grids of all rows' images and videos; None where there are none."""
    values: dict[str, Any] = {}
    for row in rows:
        check_media(row.media, _MEDIA, "TorchTitan")
    for suffix, grids in (("", "image_grid_thw"), ("_videos", "video_grid_thw")):
        pixels = f"pixel_values{suffix}"
        parts = [row.media for row in rows if pixels in row.media]
        if any(grids not in part for part in parts):
            raise ConfigError(f"{type(model).__name__} has images without grids; TorchTitan's have")
        values[pixels] = torch.cat([part[pixels] for part in parts]).float() if parts else None
        values[f"grid_thw{suffix}"] = torch.cat([part[grids] for part in parts]) if parts else None
    return values


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
    text = torch.arange(len(row.is_token)) - int(row.is_token.sum())
    return torch.where(row.is_token, row.mrope_positions, text).T
