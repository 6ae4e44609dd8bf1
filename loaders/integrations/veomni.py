"""`register`: a loader of ours as a data loader of VeOmni's trainers.

Only this module imports veomni. VeOmni asks two registries, for a dataset and for a data loader, by
the names in its YAML. Ours gives a list of micro-batches per step, each through VeOmni's own
collator: so fields, Ulysses shards and a model's metadata are what that makes of samples.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from veomni.data.data_loader import DATALOADER_REGISTRY
from veomni.data.dataset import DATASET_REGISTRY
from veomni.distributed.parallel_state import get_parallel_state
from veomni.ops.config.singleton import get_ops_config

from isobatch.common.errors import ConfigError, DataError
from isobatch.common.types import LABEL_IGNORE
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.batch.model_inputs.inputs import config_of, has_media
from isobatch.loaders.batch.packed import IMAGE, VIDEO, packed_batch
from isobatch.loaders.integrations.adapter_checks import check_loss_weights, check_media
from isobatch.loaders.integrations.torch_dataset import StepDataset
from isobatch.loaders.step_stream import StepStream

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Model types whose samples VeOmni makes as `sample_features` does."""
IS_ADDED = {"sdpa": False, "eager": True}
"""Attention that reads no borders of samples; whether it adds its mask to scores."""
_READ_BORDERS = ("flash_attention", "veomni_flash", "veomni_flex", "veomni_magi")
"""Beginnings of the names of attention that reads `cu_seq_lens_q`."""
_MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")

Collator = Callable[[list[dict[str, Tensor]]], dict[str, Any]]


def register(
    make_loader: Callable[..., StepStream],
    model: Any = None,
    *,
    name: str = "isobatch",
    block_mask: bool | None = None,
) -> None:
    """Let `data.datasets_type` and `data.dataloader.type` of VeOmni's YAML be `name`.

    `make_loader`: takes a loader's options of ranks, micro-batches per step, seed and `remainder`
    (unfull steps are dropped), which come from VeOmni. For example
    `functools.partial(StreamingLoader, "packed")`, or of a `BalancedLoader`.

    `model`: a model of transformers or its config, of `FAMILIES`; None for text alone.

    `block_mask`: the attention mask keeps samples of a group apart. It takes T * T bytes for T
    tokens, 4 times as many for `eager`. By default it is there for `sdpa` and `eager`, which read
    no borders, and not for attention that does. False: samples see those before them.

    Registering a name again replaces it. ConfigError for a model of another family; when VeOmni
    builds the loader, for settings of its that do not fit.
    """
    config = None if model is None else config_of(model)
    if config is not None and config.model_type not in FAMILIES:
        raise ConfigError(
            f"model type {config.model_type!r}: VeOmni is given samples of {', '.join(FAMILIES)}"
        )

    def data_loader(
        dataset: Any,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        collate_fn: Collator,
        dyn_bsz: bool = True,
        seed: int = 0,
        **_: Any,
    ) -> "VeOmniLoader":
        if not isinstance(dataset, _Groups):
            raise ConfigError(f"data.datasets_type of VeOmni must be {name!r} too")
        if dyn_bsz or micro_batch_size != 1:
            raise ConfigError(
                f"VeOmni has dyn_bsz={dyn_bsz}, micro_batch_size={micro_batch_size}; a group is a "
                "micro-batch: set train.dyn_bsz to false and train.micro_batch_size to 1"
            )
        micro_batches, rest = divmod(global_batch_size, get_parallel_state().dp_size)
        if rest or not micro_batches:
            raise ConfigError(
                f"train.global_batch_size is {global_batch_size} micro-batches on all ranks; it "
                f"must be a multiple of the {get_parallel_state().dp_size} data-parallel ranks"
            )
        collate = _apart(collate_fn, block_mask)
        loader = make_loader(micro_batches_per_step=micro_batches, seed=seed, **_options())
        return VeOmniLoader(loader, collate, config)

    DATASET_REGISTRY.register(name, lambda **_: _Groups(make_loader))
    DATALOADER_REGISTRY.register(name, data_loader)


class VeOmniLoader:
    """Steps without end as lists of micro-batches that `collate` has made; VeOmni's trainers count.

    Its state is the loader's, the same on all ranks and for any number of them.
    """

    def __init__(self, loader: StepStream, collate: Collator, model: Any = None) -> None:
        check_loss_weights(loader, "VeOmni")
        if loader.is_evaluation:
            raise ConfigError("the loader has shuffle=False; VeOmni trains on it: leave that out")
        self.loader, self._collate, self._model = loader, collate, model

    def __len__(self) -> int:
        """Steps of an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for step in StepDataset(self.loader):
            yield [
                self._collate(sample_features(batch, self._model)) for batch in step.micro_batches
            ]

    def state_dict(self) -> dict[str, Any]:
        """Position after the last step that was taken."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after a position, on any number of ranks."""
        self.loader.load_state_dict(state)


def _apart(collate: Collator, block_mask: bool | None) -> Collator:
    """A collator whose samples do not see one another, by the attention that VeOmni has."""
    name = getattr(get_ops_config(), "attn_implementation", None)
    reads_borders = str(name).startswith(_READ_BORDERS)
    if block_mask is None and not (name in IS_ADDED or reads_borders):
        raise ConfigError(
            f"VeOmni's attn_implementation is {name!r}: it is not known whether that keeps samples "
            "of a group apart; give register block_mask=True, a bool mask, or False"
        )
    if block_mask and reads_borders:
        raise ConfigError(f"block_mask is True, but {name} takes no mask; leave it out")
    if block_mask is False or reads_borders:
        return collate
    if get_parallel_state().sp_enabled:
        raise ConfigError(
            f"VeOmni's attn_implementation is {name!r}, which has no Ulysses shards; give it one "
            "of flash attention"
        )
    return with_block_mask(collate, is_added=IS_ADDED.get(str(name), False))


def with_block_mask(collate: Collator, *, is_added: bool = False) -> Collator:
    """A collator whose `attention_mask`, (1, 1, T, T), keeps samples apart.

    Bool; if `is_added`, float32, the lowest number where a token is not seen.
    """

    def masked(features: list[dict[str, Tensor]]) -> dict[str, Any]:
        batch = collate(features)
        lengths: Tensor = batch["cu_seq_lens_q"].diff()
        sample = torch.repeat_interleave(lengths)
        mask = (sample[:, None] == sample).tril()[None, None]
        if is_added:
            mask = (~mask).float() * torch.finfo(torch.float32).min
        return batch | {"attention_mask": mask}

    return masked


def sample_features(batch: MicroBatch, model: Any = None) -> list[dict[str, Tensor]]:
    """What VeOmni's collator takes: a dict per sample, as VeOmni's own transforms make them.

    `input_ids` int64 (n,), 0 at images and videos, `labels`, which the model shifts,
    `attention_mask` of ones, `position_ids` (n,) or (3, n); `image_mask` and `video_mask` bool and
    `mm_token_type_ids` with `model`. The first has the pixels and grids of all, which are joined
    anyway. A micro-batch without images gets a blank one, as by `model_inputs`. DataError for one
    without labels: VeOmni's loss of it is NaN. ConfigError for images without `model`.
    """
    if not (batch.labels != LABEL_IGNORE).any():
        names = ", ".join(batch.sample_ids) or "none"
        raise DataError(f"a micro-batch has no labels (samples: {names}); leave such samples out")
    if model is None and has_media(batch):
        raise ConfigError("a micro-batch has images or clips; give register the model")
    packed = packed_batch(batch, model)
    check_media(packed.media, _MEDIA, "VeOmni")
    values: dict[str, Tensor] = {
        "input_ids": packed.input_ids,
        "labels": packed.samples.labels,
        "attention_mask": torch.ones_like(packed.input_ids),
        "position_ids": packed.position_ids,
    }
    if packed.mrope_positions is not None:
        values["position_ids"] = packed.mrope_positions
    if (types := packed.mm_token_type_ids) is not None:
        masks = {"image_mask": types == IMAGE, "video_mask": types == VIDEO}
        ids = packed.input_ids.masked_fill(masks["image_mask"] | masks["video_mask"], 0)
        values |= {"input_ids": ids, "mm_token_type_ids": types, **masks}
    lengths: list[int] = packed.cu_seqlens.diff().tolist()
    split = {name: torch.split(value, lengths, dim=-1) for name, value in values.items()}
    # clones: the collator writes into labels
    features = [
        {name: parts[number].clone() for name, parts in split.items()}
        for number in range(packed.num_samples)
    ]
    for feature in features:
        feature["labels"][0] = LABEL_IGNORE  # that of no token, as after a shift
    features[0] |= {name: packed.media[name] for name in _MEDIA if name in packed.media}
    return features


class _Groups:
    """VeOmni's dataset: its length is all that is asked of it."""

    def __init__(self, make_loader: Callable[..., StepStream]) -> None:
        self._make_loader = make_loader

    def __len__(self) -> int:
        """Micro-batches of a rank in an epoch, of which VeOmni computes its steps."""
        loader = self._make_loader(micro_batches_per_step=1, **_options())
        try:
            return len(loader)
        finally:
            loader.close()


def _options() -> dict[str, Any]:
    """Options of a loader for this rank of VeOmni's: Ulysses peers have the same data.

    Empty micro-batches, which fill up an epoch's last step, have a loss of NaN there.
    """
    options: dict[str, Any] = {"remainder": "drop"}
    mesh = get_parallel_state().device_mesh
    if mesh is None:
        return options | {"dp_rank": 0, "dp_world_size": 1}
    names = mesh.mesh_dim_names or ()
    return options | {
        "device_mesh": mesh,
        "dp_dims": [name for name in names if name.startswith("dp_")],
    }
