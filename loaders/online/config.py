"""How a dataset without a build is measured and packed: `PackingConfig`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from isobatch.common.config import check_names, check_types
from isobatch.common.errors import ConfigError
from isobatch.common.types import require_multiple
from isobatch.loaders.config import LoaderConfig, LoaderOptions
from isobatch.loaders.online.encoded import Encode
from isobatch.loaders.online.records import Transform

BALANCE = 0.9
"""Of `balance`: groups are others in every epoch, so steps do not repeat as a build's would."""
_OF_BUILDS = (
    *("split", "filter", "limit", "mixing_weights", "regroup", "image_root"),
    *("storage", "regroup_window", "validation_fraction"),
)
"""Options of `LoaderConfig` that need a build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingConfig:
    """How a dataset without a build is measured and packed."""

    model: str | None = None
    """Preset, folder or Hub id, as `packer build --model` takes it."""
    processor: Any = None
    """Instead: a processor or tokenizer of transformers. With a processor, `model` is the folder or
    Hub id of its config, by default where it was loaded from. A tokenizer alone is for text.
    """
    encode: Encode | None = None
    """Function record -> `loaders.Encoded`, by which samples are tokenised; called again where a
    sample is read. With `model` (or `processor`) images are counted and decoded by its rule.
    """
    cache_key: str | None = None
    """Name of what `encode` does, which `lengths_cache` needs then; change it with the function."""
    tokenizer: str | None = None
    """Folder or Hub id; by default the model's."""
    chat_template: str | None = None
    """Name of one of the tokenizer's templates, a .jinja file, or a template."""
    template_date: str | None = None
    """Day (YYYY-MM-DD) that a template writes which asks for today's, as of `packer build`."""
    data_root: str | None = None
    """Folder that relative paths of images and audio files begin at. By default the current one;
    of a dataset that is named by its place, as of `packer build --data-root`.
    """
    keep_columns: tuple[str, ...] = ()
    """Columns of the records that micro-batches give as `extras`."""
    choices: Literal["report", "letters"] = "report"
    """Of `options` or `choices` next to a question: "report": not read; "letters": lettered lines
    after it, and an answer that is a number becomes a letter.
    """
    answers: Literal["first", "drawn", "all"] = "first"
    """Of a list of answers or captions: the first, or one "drawn" by the seed and the id. "all" is
    for `packer build`: here a record is one sample.
    """
    unknown_marks: Literal["reject", "text"] = "reject"
    """Marks such as `<image3>` that match no file: reject the sample, or keep them as text."""
    columns: dict[str, str] | None = None
    """Names that the packer reads -> those of the records: `{"messages": "my_conv"}`, as of
    `packer build --columns`. Of records in memory, after `transform`.
    """
    transform: Transform | None = None
    """Function record -> record, called for each record before it is measured or read; it must give
    the same each time.
    """
    measure: Literal["together", "own"] = "together"
    """"own": each rank packs what it has loaded itself, for IterableDatasets, and where items are
    samples already, with `input_ids`, and so have a length only once they are loaded.
    """
    is_sharded: bool | None = None
    """With `measure="own"`, whether each rank's dataset has items of its own, as those of libraries
    that shard by themselves; None: as the ranks' first items tell.
    """
    max_tokens: int | None = None
    """LLM tokens of a micro-batch at most; None: chosen by the first window (`explained`)."""
    max_vision: int | None = None
    """Image patches of a micro-batch at most, or ViT tokens at native resolution; None: chosen by
    the first window with images. A later sample that is larger than a chosen cap is a micro-batch
    of its own.
    """
    packing: bool = True
    """False, for models without varlen attention: a micro-batch is of samples of similar length,
    each padded to the longest (`model_inputs`, `MicroBatch.padded`). `max_tokens` counts padding.
    """
    pad_each_to: int = 1
    """Multiple of tokens that your trainer pads each sample to (`loaders.packed_batch`).

    Samples count with that padding, so that caps hold after it; order and report have it too.
    """
    window: int = 2048
    """Samples that are planned together. More make steps more even, and cost time before the first
    one if a cap is chosen.
    """
    max_rejected: float = 0.05
    """Share of unusable samples above which training stops, with a DataError on all ranks."""
    lengths_cache: str | Path | None = None
    """Folder where lengths are kept for later runs on the same dataset, model and tokenizer."""
    processes: int = 0
    """Worker processes that read, transform and measure records which cost time in Python, and
    decode where there is an `image_transform` or `batch_transform`; 0: the threads of this process.
    Order and states are the same with any number.
    """
    epochs: int | None = None
    """Epochs that an iterator gives; None: one at a time, as `StreamingLoader` does."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("max_tokens", "max_vision", "window", "processes", "epochs"):
            value = getattr(self, name)
            lowest = 0 if name in ("max_vision", "processes") else 1
            if value is not None and value < lowest:
                raise ConfigError(f"{name} is {value}; it must be at least {lowest}")
        require_multiple(self.pad_each_to, self.max_tokens, "max_tokens")
        if self.pad_each_to > 1 and not self.packing:
            raise ConfigError(
                "pad_each_to is for packed samples, and packing=False pads each to the longest;"
                " leave out one"
            )
        if self.answers == "all":
            raise ConfigError(
                "answers='all' makes several samples of a record, and here each is one; use 'first'"
                " or 'drawn', or packer build --answers all"
            )
        if not 0 <= self.max_rejected <= 1:
            raise ConfigError(f"max_rejected is {self.max_rejected}; it must be in 0..1")


class PackingOptions(LoaderOptions, total=False):
    """The fields of `PackingConfig` and `LoaderConfig`, as keywords of `BalancedLoader`."""

    processor: Any
    encode: Encode | None
    cache_key: str | None
    tokenizer: str | Path | None
    chat_template: str | Path | None
    template_date: str | None
    data_root: str | Path | None
    keep_columns: tuple[str, ...]
    choices: Literal["report", "letters"]
    answers: Literal["first", "drawn", "all"]
    unknown_marks: Literal["reject", "text"]
    columns: dict[str, str] | None
    transform: Transform | None
    measure: Literal["together", "own"]
    is_sharded: bool | None
    max_tokens: int | None
    max_vision: int | None
    packing: bool
    pad_each_to: int
    window: int
    max_rejected: float
    lengths_cache: str | Path | None
    processes: int
    epochs: int | None


def checked_options(
    loading: dict[str, Any], packing: dict[str, Any]
) -> tuple[LoaderConfig, PackingConfig]:
    """The configs of options. ConfigError for wrong ones, and those that exclude one another."""
    if wrong := [name for name in _OF_BUILDS if name in loading]:
        raise ConfigError(f"{wrong[0]} needs a build; leave it out, or use a StreamingLoader")
    check_names(LoaderConfig, loading, also={field.name for field in fields(PackingConfig)})
    on_error = "raise" if loading.get("images") == "encoded" else "skip"
    config = LoaderConfig(**{"on_error": on_error, "balance": BALANCE, **loading})
    how = PackingConfig(**packing)
    if config.planner is not None and not how.packing:
        raise ConfigError("a planner packs steps again; leave it out, or packing=False")
    if how.epochs is not None and not config.shuffle:
        raise ConfigError("with shuffle=False each iterator gives one epoch; leave out epochs")
    return config, how
