"""What `python -m engine plan` is asked for: command line over TOML file over defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from balance.errors import ConfigError
from engine.cost_model.parallel import Parallelism, Training
from engine.simulator.schedule import SCHEDULES

PARTS = ("audio", "vision", "projector", "llm")
SEARCHES = ("exact", "bmp")
GIB = 2**30
MOST_GIB = 2**20
"""Of a GPU, that can be asked for."""
MOST_TOKENS = 10**8
"""Of a micro-batch that is made up, and image patches: more would not be counted right in 64
bits.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """One plan; every field is also a key of the TOML file given with --config."""

    build: str | None = None
    """Folder of a packed build; without one, `model`, `images` and `seq_len` say what a micro-batch
    is.
    """
    model: str | None = None
    """Model preset; with a build, its own."""
    images: int | None = None
    seq_len: int | None = None
    samples: int = 1
    """Samples that share `seq_len`."""
    cluster: str = "h100"
    tp: int = 1
    pp: int = 4
    dp: int = 1
    sequence_parallel: bool = True
    zero_stage: int = 1
    innermost: Literal["replicas", "stages"] = "replicas"
    frozen: tuple[str, ...] = ()
    """Parts that are not trained: audio, vision, projector, llm."""
    micro_batches: int = 16
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    memory_gib: float | None = None
    """Of a GPU; by default what the cluster's preset calls usable."""
    steps: int = 4
    seed: int = 0
    search: str = "exact"
    """`exact`, or `bmp`: OmniBal 4.2."""
    batch_size: int | None = None
    """Samples of a random micro-batch to compare with; by default 4, as in OmniBal, or what a group
    holds if less.
    """

    def __post_init__(self) -> None:
        least = {"micro_batches": 1, "stages_per_rank": 1, "steps": 1, "batch_size": 1, "seed": 0}
        made_up = {"images": 0, "seq_len": 1, "samples": 1}
        for name, bound in (least | made_up).items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"{name} is {value}; it must be at least {bound}")
        for name, value, choices in (
            ("schedule", self.schedule, SCHEDULES),
            ("search", self.search, SEARCHES),
        ):
            if value not in choices:
                raise ConfigError(f"{name} is {value!r}; use one of {', '.join(choices)}")
        unknown = sorted(set(self.frozen) - set(PARTS))
        if unknown:
            raise ConfigError(f"frozen names {', '.join(unknown)}; parts are {', '.join(PARTS)}")
        if self.memory_gib is not None:
            gib_bytes(self.memory_gib)
        if self.build is None:
            self._check_made_up()
        else:
            self._check_build(self.build)

    def _check_made_up(self) -> None:
        if self.model is None or self.images is None or self.seq_len is None:
            raise ConfigError(
                "give a packed build, or --model with --images and --seq-len of a micro-batch"
            )
        if self.batch_size is not None:
            raise ConfigError(
                "batch_size is of random samples of a build; without a build leave it out"
            )
        if max(self.images, self.seq_len) > MOST_TOKENS:
            raise ConfigError(
                f"images is {self.images}, seq_len {self.seq_len}; give at most {MOST_TOKENS:,}"
            )
        if self.samples > self.seq_len:
            raise ConfigError(
                f"{self.samples} samples cannot share {self.seq_len} tokens; give each at least one"
            )

    def _check_build(self, build: str) -> None:
        made_up = {"model": self.model, "images": self.images, "seq_len": self.seq_len}
        given = [name for name, value in made_up.items() if value is not None] + ["samples"] * (
            self.samples != 1
        )
        if given:
            raise ConfigError(
                f"a build says for itself what its {', '.join(given)} are; leave those out"
            )
        if "://" in build:
            raise ConfigError(
                f"{build}: planning reads a folder; copy the build's manifest.json, index.arrow, counts.parquet and "
                "groups.parquet into one"
            )

    @property
    def parallel(self) -> Parallelism:
        """How the model is spread over GPUs."""
        return Parallelism(
            tp=self.tp,
            pp=self.pp,
            dp=self.dp,
            sequence_parallel=self.sequence_parallel,
            zero_stage=self.zero_stage,
            innermost=self.innermost,
        )

    @property
    def training(self) -> Training:
        """What is trained."""
        return Training(**{part: part not in self.frozen for part in PARTS})


def gib_bytes(memory_gib: float) -> int:
    """Bytes of what a GPU may hold. ConfigError for what no GPU can have.

    >>> gib_bytes(0.5)
    536870912
    """
    if not 0 < memory_gib <= MOST_GIB:
        raise ConfigError(f"memory_gib is {memory_gib}; give more than 0 and at most {MOST_GIB:,}")
    return int(memory_gib * GIB)
