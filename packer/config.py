"""What `packer build` is asked to do: command line over TOML file over defaults."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from balance.errors import ConfigError
from balance.presets import build_config
from packer.executor import default_workers
from packer.group import GroupOptions
from packer.sources.dataset import DEMO
from packer.write import SHARD_FORMATS, ShardFormat

DEMO_MODEL = "tiny"
DEMO_MAX_SEQ_LEN = 2048
"""Twice the longest demo sample: the cap from the data alone would leave long samples nothing to share a group with."""

IMAGE_CHECKS = ("headers", "decode")
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
}
"""Option -> least and greatest value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """One build; every field is also a key of the TOML file given with --config."""

    dataset: str
    out: str
    data_root: str | None = None
    model: str = ""
    tokenizer: str = ""
    chat_template: str | None = None
    format: ShardFormat = "arrow"
    workers: int = field(default_factory=default_workers)
    seed: int = 0
    max_seq_len: int | None = None
    max_vision: int | None = None
    grouping: str = "fit"
    """`fit` (fewest groups) or `isf` (OmniBal, Algorithm 1)."""
    isf_iterations: int = 10
    shard_mb: int = 128
    """Size of a shard in MiB, about."""
    chunk_records: int = 1024
    """Records per counting task, and per unit of work that a stopped build keeps."""
    check_images: str = "headers"
    """`headers`: header and end of each file; `decode`: decode every image once, which finds flipped bits too."""
    fetch_annotations: bool = False

    def __post_init__(self) -> None:
        if self.format not in SHARD_FORMATS:
            raise ConfigError(f"--format {self.format}: use one of {', '.join(SHARD_FORMATS)}")
        if self.check_images not in IMAGE_CHECKS:
            raise ConfigError(f"check_images is {self.check_images!r}: use one of {', '.join(IMAGE_CHECKS)}")
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} is {value}; it must be in {least:,}..{most:,}")
        if not self.is_demo:
            for name, hint in (("model", "for example internvl_1_5"), ("tokenizer", "a folder, or a Hub id")):
                if not getattr(self, name):
                    raise ConfigError(f"--{name} is missing: name the {name} that will be trained with ({hint})")

    @property
    def is_demo(self) -> bool:
        """The generated dataset, with a model and a tokenizer of its own."""
        return self.dataset == DEMO

    @property
    def _max_seq_len(self) -> int | None:
        return DEMO_MAX_SEQ_LEN if self.max_seq_len is None and self.is_demo else self.max_seq_len

    @property
    def group_options(self) -> GroupOptions:
        """The part that decides the groups."""
        return GroupOptions(
            seed=self.seed,
            max_seq_len=self._max_seq_len,
            max_vision=self.max_vision,
            grouping=self.grouping,
            isf_iterations=self.isf_iterations,
        )


def load_config(file: Path | None, options: dict[str, Any]) -> BuildConfig:
    """The config of a build: `options` that are not None over the keys of the TOML `file`."""
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(file.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"--config {file}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"--config {file}: not valid TOML: {error}") from None
    values |= {name: value for name, value in options.items() if value is not None}
    known = {f.name for f in fields(BuildConfig)}
    return build_config(BuildConfig, values, where=str(file) if set(values) - known else "packer build")
