"""`BalancedDataloaderConfig`: our steps in the VLM recipes of NeMo Automodel.

Only this module imports nemo_automodel. A recipe builds its dataloader by a config, and ours has
balanced groups where Automodel's samples, tokenizes and packs. A micro-batch becomes what
Automodel calls a pack, and its own collators make the batch, so names and types are theirs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar

import torch
from nemo_automodel.components.datasets.packing import DEFAULT_PACKED_SEQUENCE_CONTRACT
from nemo_automodel.components.datasets.vlm.collate_fns import (
    neat_packed_vlm_collater,
    packed_sequence_thd_vlm_collater,
)
from nemo_automodel.components.datasets.vlm.loader import VlmDataloaderBuild, VlmDataloaderConfig
from nemo_automodel.components.datasets.vlm.neat_packing_vlm import MEDIA_KEYS, NeatPackConfig
from nemo_automodel.components.datasets.vlm.pp_media import wrap_vlm_collate_for_pp
from nemo_automodel.recipes.vlm.finetune import FinetuneRecipeForVLM
from transformers.models.auto.configuration_auto import AutoConfig

from isobatch.common.errors import ConfigError
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.batch.model_inputs.inputs import config_of
from isobatch.loaders.batch.packed import packed_batch
from isobatch.loaders.integrations.adapter_checks import (
    check_loss_weights,
    check_whole_step,
    with_ranks,
)
from isobatch.loaders.loader import StreamingLoader
from isobatch.loaders.online.loader import BalancedLoader
from isobatch.loaders.step_stream import StepStream

TESTED = "0.7.0"
Pack = dict[str, Any]

_FROM_RECIPE = {"dataset_build_context", "get_rope_index", "packing_attn_implementation"}
_FROM_RECIPE |= {"packing_contract", "pp_n_microbatches", "cp_size"}
_READ = {"dataset_config", "processor_config", "packing", "model_config", "packing_format"}
_READ |= {"collate_max_length", "pack_size", "balance_media_tokens"}
"""Fields of both configs that are read, or that our groups make needless. Others are refused."""


@dataclass
class BalancedDataset:
    """The data of a recipe: a build, or any dataset, which the ranks then group as they read it."""

    url: Any = None
    """Build, or builds, as of `StreamingLoader`."""
    dataset: Any = None
    """Dataset, as of `BalancedLoader`; instead of `url`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The loader's: `model`, `max_tokens`, `seed`, `shuffle`, ... The recipe gives the ranks."""
    builds_with_data_parallel_rank: ClassVar[bool] = True

    def build(self, *, rank: int, world_size: int) -> StreamingLoader | BalancedLoader:
        """The loader of a data-parallel rank. ConfigError as of the loaders."""
        if (self.url is None) == (self.dataset is None):
            raise ConfigError("give BalancedDataset either url=, a build, or dataset=")
        options = with_ranks(self.options, rank, world_size)
        if self.url is not None:
            return StreamingLoader(self.url, **options)
        return BalancedLoader(self.dataset, **options)


@dataclass
class BalancedDataloaderConfig(VlmDataloaderConfig):  # type: ignore[misc]
    """For `recipe.cfg.vlm_dataloader`, with a `BalancedDataset` as `dataset_config`.

    Of `packing` the format ("neat" or "thd") and `collate_max_length` count; caps are the loader's.
    """

    packing: Any = None
    model_config: Any = None
    """Config of the model; by default read from the recipe's model name."""

    def __post_init__(self) -> None:
        if self.packing is None:  # then the recipe asks the model which attention mask it takes
            self.packing = NeatPackConfig()
        for config in (self, self.packing):
            for each in fields(config):
                value = getattr(config, each.name)
                if each.name not in _READ and value != each.default:
                    raise ConfigError(
                        f"{each.name} is {value!r}; groups are packed and tokenized already: leave "
                        "it out, and give the loader's options to BalancedDataset"
                    )

    def build(
        self,
        *,
        pretrained_model_name_or_path: str,
        dp_rank: int,
        dp_world_size: int,
        batch_size: int,
        **runtime: Any,
    ) -> VlmDataloaderBuild:
        """The dataloader and the processor; a recipe calls it, with Automodel's arguments.

        ConfigError as of the loaders, and for what this loader's batches cannot be trained with.
        """
        if unknown := runtime.keys() - _FROM_RECIPE:
            raise ConfigError(
                f"Automodel gives {', '.join(sorted(unknown))}, which is not known here; tested "
                f"with nemo-automodel {TESTED}"
            )
        name, cp_size = pretrained_model_name_or_path, runtime.get("cp_size", 1)
        get_rope_index = runtime.get("get_rope_index")
        is_thd = self.packing.packing_format == "thd"
        alignment = 2 * cp_size if is_thd and cp_size > 1 else 1
        if alignment > 1 and get_rope_index is not None:
            raise ConfigError(
                f"Automodel does not cut M-RoPE positions for THD with cp_size={cp_size}; use "
                "cp_size=1, or packing_format='neat'"
            )
        with runtime.get("dataset_build_context") or nullcontext():
            processor_config = self.processor_config
            if processor_config.factory is None:  # else the recipe's own function is called
                kwargs = {"trust_remote_code": False} | processor_config.kwargs
                processor_config = replace(processor_config, kwargs=kwargs)
            processor = processor_config.build(pretrained_model_name_or_path=name)
        config = self.model_config
        if config is None:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        # outside of that context, in which ranks wait for the first: loaders wait for each other
        loader = self.dataset_config.build(rank=dp_rank, world_size=dp_world_size)
        _check_loader(loader, alignment)
        padding_id = getattr(getattr(processor, "tokenizer", None), "pad_token_id", 0) or 0
        options = {"padding_idx": padding_id, "max_length": self.packing.collate_max_length}
        if is_thd:
            collater = partial(packed_sequence_thd_vlm_collater, **options)
        else:
            contract = runtime.get("packing_contract", DEFAULT_PACKED_SEQUENCE_CONTRACT)
            options |= {"packing": contract, "materialize_4d_mask": cp_size <= 1}
            collater = partial(neat_packed_vlm_collater, **options)
        collate_fn: Callable[[Sequence[Pack]], Pack] = partial(_with_other_media, collater)
        if (num_parts := runtime.get("pp_n_microbatches")) is not None:
            collate_fn = wrap_vlm_collate_for_pp(collate_fn, n_microbatches=num_parts)
        make_pack = partial(
            automodel_pack,
            model=config,
            pad_each_to=alignment,
            pad_token_id=padding_id,
            with_mrope=get_rope_index is not None,
        )
        loading = BalancedDataloader(loader, make_pack, collate_fn, batch_size)
        return VlmDataloaderBuild(dataloader=loading, processor=processor)


class BalancedDataloader:
    """Batches of `batch_size` micro-batches each, for a recipe's StepScheduler.

    Its state is that of the loader, equal on all ranks. So it is no StatefulDataLoader, of which a
    recipe saves a state per rank, and resumes on any number of ranks.
    """

    def __init__(
        self,
        loader: StepStream,
        make_pack: Callable[[MicroBatch], Pack],
        collate_fn: Callable[[Sequence[Pack]], Pack],
        batch_size: int = 1,
    ) -> None:
        self.loader = loader
        self.collate_fn, self.batch_size = collate_fn, batch_size
        self._make_pack = make_pack
        self._epoch: int | None = None
        self._is_resumed = self._is_spent = False
        self._num_left = 0
        """Micro-batches of the loader's last step that are not in a batch yet."""

    @property
    def sampler(self) -> "BalancedDataloader":
        """Itself: what `set_epoch` of a StepScheduler looks for."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """As `StepStream.set_epoch`; an epoch that was resumed at its end has no batches left.

        A StepScheduler trains an epoch's last batches, if they are fewer than it accumulates, when
        the loader has come to the next epoch already, and saves its own epoch with them.
        """
        self._is_spent = self._is_resumed and epoch == self.loader.epoch - 1
        if not self._is_spent:
            self.loader.set_epoch(epoch)
        self._epoch = epoch

    def __iter__(self) -> Iterator[Pack]:
        self._is_resumed = False
        if self._is_spent or (self._epoch == self.loader.epoch and self.loader.is_at_end):
            self._is_spent = False
            return
        packs: list[Pack] = []
        for step in self.loader:
            for number, batch in enumerate(step, start=1):
                packs.append(self._make_pack(batch))
                self._num_left = len(step) - number
                if len(packs) == self.batch_size:
                    yield self.collate_fn(packs)
                    packs = []
        self._num_left = 0
        if packs:
            yield self.collate_fn(packs)

    def __len__(self) -> int:
        """Batches of an epoch. TypeError where epochs have no common length, as of BalancedLoader.

        A recipe then needs `max_steps`.
        """
        if self.loader.epochs_vary:
            raise TypeError("epochs of this loader vary in length; give the recipe max_steps")
        count = len(self.loader) * self.loader.config.micro_batches_per_step
        return (count + self.batch_size - 1) // self.batch_size

    def state_dict(self) -> dict[str, Any]:
        """State of the loader: plain JSON. ConfigError in the middle of one of its steps."""
        check_whole_step(
            self._num_left,
            "global_batch_size must be a multiple of its micro_batches_per_step times ranks",
        )
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume on any number of ranks; ConfigError as of the loaders."""
        self.loader.load_state_dict(state)
        self._num_left = 0
        self._is_resumed = True


class BalancedRecipe(FinetuneRecipeForVLM):  # type: ignore[misc]
    """Automodel's recipe, with a `BalancedDataset` as `dataset` in its YAML."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        for name in ("vlm_dataloader", "vlm_validation_dataloader"):
            config = getattr(self.cfg, name)
            if config is not None and isinstance(config.dataset_config, BalancedDataset):
                # that of a YAML that says how to pack, though nothing is left to tokenize
                values = {each.name: getattr(config, each.name) for each in fields(config)}
                values["pretokenization"] = None
                setattr(self.cfg, name, BalancedDataloaderConfig(**values))


def automodel_pack(
    batch: MicroBatch,
    model: Any,
    *,
    pad_each_to: int = 1,
    pad_token_id: int | None = None,
    with_mrope: bool = True,
) -> Pack:
    """What Automodel's packed collators take, of a micro-batch and a model or its config.

    `input_ids`, `labels` (shifted), `attention_mask` (number of the sample, from 1) and
    `mm_token_type_ids`, int64, (tokens,); `position_ids` (tokens,), or (3, tokens) with M-RoPE;
    lengths with and without padding, media by their names in transformers, and their numbers.
    Each sample has its last token too, which Automodel's packs leave out: it predicts nothing.
    Blank samples and errors are those of `packed_batch`.
    """
    row = packed_batch(batch, model, pad_each_to=pad_each_to, pad_token_id=pad_token_id)
    slots = row.cu_seqlens_padded.diff().long()
    has_mrope = with_mrope and row.mrope_positions is not None
    media, seconds = dict(row.media), row.samples.video_seconds
    if seconds is not None and hasattr(config_of(model).vision_config, "tokens_per_second"):
        # of Qwen2.5-VL's processor; the positions have it already
        media["second_per_grid_ts"] = seconds[seconds > 0].float()
    return {
        "input_ids": row.input_ids,
        "labels": row.labels,
        "attention_mask": torch.arange(1, len(slots) + 1).repeat_interleave(slots),
        "mm_token_type_ids": row.mm_token_type_ids,
        "position_ids": row.mrope_positions if has_mrope else row.position_ids,
        "seq_lens": row.cu_seqlens.diff().tolist(),
        "seq_lens_padded": slots.tolist(),
        "n_images": len(media.get("image_grid_thw", ())),
        "n_videos": len(media.get("video_grid_thw", ())),
        "media": media,
    } | {name: media.get(name) for name in MEDIA_KEYS}


def _with_other_media(collater: Callable[[Sequence[Pack]], Pack], packs: Sequence[Pack]) -> Pack:
    """Automodel's batch, and the media that its packs have no place for."""
    batch = collater(packs)
    for name in {name: None for pack in packs for name in pack["media"]}:
        if name not in batch:
            batch[name] = torch.cat([pack["media"][name] for pack in packs])
    return batch


def _check_loader(loader: StreamingLoader | BalancedLoader, alignment: int) -> None:
    check_loss_weights(loader, "Automodel")
    if loader.pad_each_to % alignment:
        raise ConfigError(
            f"with this cp_size samples are padded to multiples of {alignment}, and the loader's "
            f"caps are for {loader.pad_each_to}: packer build --pad-each-to {alignment}, or "
            f"pad_each_to={alignment} of BalancedLoader"
        )
