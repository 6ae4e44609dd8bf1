"""Options of `packer build`: command line over TOML file over defaults."""

from __future__ import annotations

from dataclasses import dataclass, field

from balance.errors import ConfigError
from balance.grouping.activation_memory import ActivationBudget
from balance.grouping.caps import GroupOptions
from balance.presets import load_model
from packer.count.pool import default_workers
from packer.sources.dataset import DEMO
from shards.manifest import SHARD_FORMATS, ShardFormat

DEMO_MODEL = "tiny"
DEMO_MAX_SEQ_LEN = 2048
"""Twice the longest demo sample: with the data's own cap, long samples would share no group."""

CHOICES: dict[str, tuple[str, ...]] = {
    "format": SHARD_FORMATS,
    "check_images": ("headers", "decode"),
    "executor": ("local", "ray"),
}
MOST_TOKENS = 2**31 - 1
"""Counts are int32 in every artefact."""
RANGES: dict[str, tuple[int, int]] = {
    "workers": (1, 4096),
    "seed": (0, 2**63 - 1),
    "max_seq_len": (1, MOST_TOKENS),
    "max_vision": (0, MOST_TOKENS),
    "isf_iterations": (1, 1000),
    "shard_mb": (1, 1 << 20),
    "chunk_records": (1, 1 << 20),
    "memory_gpus": (1, 1024),
    "limit": (1, 2**63 - 1),
    "max_rejected": (0, 1),
}
"""Option -> least and greatest value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """One build; every field is also a key of the TOML file given with --config."""

    dataset: str
    out: str
    """Folder or URI."""
    work_dir: str | None = None
    """Folder where a build to a URI is prepared; by default under the user's cache folder."""
    data_root: str | None = None
    model: str = ""
    tokenizer: str = ""
    chat_template: str | None = None
    format: ShardFormat = "arrow"
    executor: str = "local"
    """`local`: processes of this machine; `ray`: Ray Data, on the cluster that `ray.init` finds."""
    workers: int = field(default_factory=default_workers)
    seed: int = 0
    max_seq_len: int | None = None
    max_vision: int | None = None
    memory_gib: float | None = None
    """Memory for a micro-batch's activations, which bounds both caps."""
    memory_gpus: int = 1
    """GPUs that share a micro-batch's activations (tensor parallelism)."""
    grouping: str = "fit"
    """`fit` (fewest groups) or `isf` (OmniBal, Algorithm 1)."""
    isf_iterations: int = 10
    shard_mb: int = 128
    """Approximate size of a shard in MiB."""
    chunk_records: int = 1024
    """Records per counting task, and per unit of work that a stopped build keeps."""
    check_images: str = "headers"
    """`headers`: header and end of each file; `decode`: every image, which finds flipped bits."""
    fetch_annotations: bool = False
    follow_links: bool = False
    """Read images and audio files through links that lead out of the data root."""
    limit: int | None = None
    """Most records to read, for a quick look."""
    max_rejected: float = 0.05
    """Share of the records that may be unusable; above it the build stops."""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}: use one of {', '.join(choices)}"
                )
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} is {value}; it must be in {least:,}..{most:,}")
        hints = {"model": "for example internvl_1_5", "tokenizer": "a folder, or a Hub id"}
        for name, hint in hints.items():
            if not self.is_demo and not getattr(self, name):
                raise ConfigError(
                    f"--{name} is missing: name the {name} that will be trained with ({hint})"
                )

    @property
    def is_demo(self) -> bool:
        """The generated dataset, with a model and a tokenizer of its own."""
        return self.dataset == DEMO

    @property
    def group_options(self) -> GroupOptions:
        """The part that decides the groups."""
        max_seq_len, memory = self.max_seq_len, None
        if max_seq_len is None and self.is_demo:
            max_seq_len = DEMO_MAX_SEQ_LEN
        if self.memory_gib is not None:
            model = load_model(self.model or DEMO_MODEL)
            memory = ActivationBudget.of(model, self.memory_gib * 2**30, gpus=self.memory_gpus)
        return GroupOptions(
            seed=self.seed,
            max_seq_len=max_seq_len,
            max_vision=self.max_vision,
            memory=memory,
            grouping=self.grouping,
            isf_iterations=self.isf_iterations,
        )
