"""Options of `packer build`: command line over TOML file over defaults."""

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Annotated, Literal

from isobatch.balance.grouping.caps import GroupOptions
from isobatch.common.config import Option, check_options, preset_families, read_preset
from isobatch.common.errors import ConfigError
from isobatch.counting.records.reading import Answers, Choices, Reading, UnknownMarks
from isobatch.models.folder.find_model import find_model, is_folder
from isobatch.models.layer_bytes import Kernels, activation_budget
from isobatch.packer.count.process_pool import default_workers
from isobatch.packer.sources.dataset import DEMO, usual_model
from isobatch.shards.manifest import ShardFormat

DEMO_MODEL = "tiny"
DEMO_MAX_SEQ_LEN = 2048
"""Twice the longest demo sample: with the data's own cap, long samples would share no group."""

_PLACES = ("dataset", "data_root", "out", "work_dir")

MOST_TOKENS = 2**31 - 1
"""Counts are int32 in every artefact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """One build; every field is also a key of the TOML file given with --config."""

    dataset: Annotated[
        str,
        Option(
            "File, folder or URI, a mixture (.toml), a Hub id, 'demo', or a name that"
            " `packer datasets` lists."
        ),
    ]
    data_root: Annotated[
        str | None, Option("Folder or URI of the files' paths. Default: the annotations' folder.")
    ] = None
    model: Annotated[
        str,
        Option(
            "Folder that save_pretrained of model and processor wrote, or a Hub id (OWNER/NAME);"
            " a .toml file; or a preset that `packer models` lists, of"
            f" {preset_families('models')}."
        ),
    ] = ""
    tokenizer: Annotated[
        str,
        Option(
            "Folder with tokenizer.json and tokenizer_config.json, or a Hub id. Default: the"
            " model's, where --model is a folder or a Hub id."
        ),
    ] = ""
    chat_template: Annotated[
        str | None, Option("Chat template: a .jinja file, or the name of one of the tokenizer's.")
    ] = None
    template_date: Annotated[
        str | None,
        Option(
            "Day (YYYY-MM-DD) that a chat template writes which asks for today's. Default: that of"
            " SOURCE_DATE_EPOCH, else 2026-01-01."
        ),
    ] = None
    out: Annotated[
        str,
        Option(
            "Folder or URI (s3://, gs://, az://) to write to. Default: {dataset}-packed, in the"
            " current folder."
        ),
    ] = "{dataset}-packed"
    work_dir: str | None = None
    """Folder where a build to a URI is prepared; by default under the user's cache folder."""
    format: Annotated[
        ShardFormat,
        Option("Layout of the shards: arrow, webdataset, energon or refs. Default: arrow."),
    ] = "arrow"
    max_seq_len: Annotated[
        int | None,
        Option(
            "Cap of a group in LLM tokens (Q_t). Default: from the longest sample on, the least"
            " that fills groups, at most the model's context.",
            min=1,
            max=MOST_TOKENS,
        ),
    ] = None
    max_vision: Annotated[
        int | None,
        Option(
            "Cap of a group in image patches, or in ViT tokens for native-resolution models (Q_v)."
            " Default: predicted to be the fastest.",
            min=0,
            max=MOST_TOKENS,
        ),
    ] = None
    pad_each_to: Annotated[
        int,
        Option(
            "Multiple of tokens that the trainer pads each sample to (context parallelism, FP8):"
            " samples count with that padding, so that caps hold after it. Default: 1, none.",
            min=1,
            max=1 << 20,
        ),
    ] = 1
    memory_gib: Annotated[
        float | None,
        Option(
            "GiB for a micro-batch's activations: the caps are then the best that fit, by the"
            " model's dimensions.",
            min=0.001,
            max=2**20,
        ),
    ] = None
    memory_gpus: Annotated[
        int, Option("GPUs that share a micro-batch's activations (tensor parallelism).", 1, 1024)
    ] = 1
    memory_kernels: Annotated[
        Kernels,
        Option(
            "transformers: its modules and loss as they are; fused: norms, activation functions"
            " and loss of Liger or Megatron-LM, which keep less. Default: transformers."
        ),
    ] = "transformers"
    grouping: Annotated[
        Literal["fit", "isf"],
        Option("fit: few groups of about equal cost; isf: OmniBal's Algorithm 1. Default: fit."),
    ] = "fit"
    isf_iterations: Annotated[int, Option("ISF iterations at most.", min=1, max=1000)] = 10
    seed: Annotated[int, Option("Seed of groups and order. Default: 0.", 0, 2**63 - 1)] = 0
    executor: Annotated[
        Literal["local", "ray"],
        Option("local: processes of this machine; ray: a Ray cluster. Default: local."),
    ] = "local"
    workers: Annotated[
        int, Option("Processes; the result does not depend on it. Default: all cores.", 1, 4096)
    ] = field(default_factory=default_workers)
    partition_samples: Annotated[
        int,
        Option(
            "Samples of a partition, about: what one process counts, groups and writes. Larger"
            " datasets are cut into several.",
            min=1000,
            max=1 << 24,
        ),
    ] = 1 << 20
    partitions: Annotated[
        str | None,
        Option(
            "Work only on share K of N of the partitions (K/N, from 1): one of N jobs with the same"
            " command. The last to finish completes the build."
        ),
    ] = None
    check_images: Annotated[
        Literal["headers", "decode"],
        Option(
            "headers: look at each image's header and end; decode: decode every image once, which"
            " finds flipped bits too. Default: headers."
        ),
    ] = "headers"
    shard_mb: Annotated[int, Option("Approximate size of a shard in MiB.", 1, 1 << 20)] = 128
    chunk_records: Annotated[
        int, Option("Records per counting task, which a stopped build keeps.", 1, 1 << 20)
    ] = 1024
    map: Annotated[
        str | None,
        Option(
            "Function of yours, module:function or file.py:function, that each record goes"
            " through: record -> record, list of records, or None or a text that says why not."
        ),
    ] = None
    choices: Annotated[
        Choices,
        Option(
            "What becomes of `options` or `choices` next to a question, and of columns A, B, ...:"
            " letters: lines 'A. cat' after it, and a number as its answer becomes a letter;"
            " report: not read. Default: report."
        ),
    ] = "report"
    answers: Annotated[
        Answers,
        Option(
            "Of a question's list of answers, or an image's list of captions: first; drawn, one by"
            " --seed and the id; or all, a sample for each. Default: first."
        ),
    ] = "first"
    unknown_marks: Annotated[
        UnknownMarks,
        Option(
            "Marks such as <image3> that match no file of their sample: reject the sample, or keep"
            " them as text. Default: reject."
        ),
    ] = "reject"
    columns: Annotated[
        tuple[str, ...],
        Option(
            "The dataset's own names of what is read, OURS=THEIRS:"
            " messages=my_conv,images=pics,... May be repeated."
        ),
    ] = ()
    keep_columns: Annotated[
        tuple[str, ...],
        Option(
            "Columns of the raw records that the loader gives with each sample, as"
            " MicroBatch.extras: weight,reward,... May be repeated."
        ),
    ] = ()
    limit: Annotated[
        int | None, Option("Most records to read, for a quick look.", min=1, max=2**63 - 1)
    ] = None
    max_rejected: Annotated[
        float, Option("Largest share of unusable samples to accept. Default: 0.05.", 0, 1)
    ] = 0.05
    follow_links: Annotated[bool, Option("Read files through links out of the data root.")] = False
    fetch_annotations: Annotated[
        bool, Option("Download a known dataset's annotations from the Hub.")
    ] = False

    def __post_init__(self) -> None:
        check_options(self)
        # what is left out gets the value that is usual for the dataset
        model, tokenizer = usual_model(self.dataset)
        if not self.model:
            object.__setattr__(self, "model", model)
        if not self.tokenizer and model and self.model == model:
            object.__setattr__(self, "tokenizer", tokenizer)
        name = PurePosixPath(self.dataset.rstrip("/")).name.partition(".")[0] or "dataset"
        object.__setattr__(self, "out", self.out.replace("{dataset}", name))
        for name in _PLACES:  # an empty path would be the current folder
            if (place := getattr(self, name)) is not None and not place.strip():
                raise ConfigError(f"--{name.replace('_', '-')} is empty: give a folder or URI")
        hints = {
            "model": (self.model, "a folder, a Hub id, or for example internvl_1_5"),
            "tokenizer": (self.tokenizer_source, "a folder, or a Hub id"),
        }
        for name, (value, hint) in hints.items():
            if not self.is_demo and not value:
                if name == "tokenizer" and self.model:
                    read_preset("models", self.model)  # what is wrong with that comes first
                raise ConfigError(f"--{name} is missing: name the {name} to train with ({hint})")

    @property
    def share(self) -> tuple[int, int] | None:
        """Which share of the partitions this process works on, from 0, and of how many."""
        if self.partitions is None:
            return None
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", self.partitions)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(
                f"--partitions {self.partitions}: give K/N, for example 3/64, with K from 1 to N"
            )
        return int(match[1]) - 1, int(match[2])

    @property
    def kept_columns(self) -> tuple[str, ...]:
        """The names in `keep_columns`, each once."""
        names = (name.strip() for text in self.keep_columns for name in text.split(","))
        return tuple(dict.fromkeys(filter(None, names)))

    @property
    def reading(self) -> Reading:
        """How records are read; the model's own marks come with the model."""
        return Reading(
            choices=self.choices,
            answers=self.answers,
            unknown_marks=self.unknown_marks,
            seed=self.seed,
        )

    @property
    def tokenizer_source(self) -> str:
        """The tokenizer's folder or Hub id: by default the model's; empty if there is none."""
        return self.tokenizer or (self.model if is_folder(self.model) else "")

    @property
    def is_demo(self) -> bool:
        """The generated dataset, with a model and a tokenizer of its own."""
        return self.dataset == DEMO

    @property
    def group_options(self) -> GroupOptions:
        """The part that decides the groups."""
        max_seq_len = self.max_seq_len
        memory = None
        if max_seq_len is None and self.is_demo:
            max_seq_len = DEMO_MAX_SEQ_LEN
        if self.memory_gib is not None:
            model = find_model(self.model or DEMO_MODEL)
            memory = activation_budget(
                model,
                self.memory_gib * 2**30,
                gpus=self.memory_gpus,
                kernels=self.memory_kernels,
            )
            if memory.most_tokens(self.max_vision or 0) < 1:
                beside = f" next to {self.max_vision:,} of vision" if self.max_vision else ""
                raise ConfigError(
                    f"--memory-gib {self.memory_gib:g} holds no token of {model.name}{beside}; give"
                    " more"
                )
        return GroupOptions(
            seed=self.seed,
            max_seq_len=max_seq_len,
            max_vision=self.max_vision,
            memory=memory,
            grouping=self.grouping,
            isf_iterations=self.isf_iterations,
            pad_each_to=self.pad_each_to,
        )
