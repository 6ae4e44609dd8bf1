"""GPU hours of an epoch, predicted for a build and for what people use without.

Pure. Every number comes from the build's counts, the model's sizes and the GPU's peak. Where
something has to be assumed, it is what makes the build look worse: a high share of the peak, no
attention on padding, micro-batches of the others that need not fit into memory, and ranks that wait
once per step. `assumptions` says so to whoever reads the figures.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from isobatch.balance.baseline_samplers import BASELINES, BATCH_SIZE, as_groups, packed_batches
from isobatch.balance.metrics import epoch_ms, padded_loads
from isobatch.common.errors import ConfigError
from isobatch.common.types import Counts, Groups, IntArray, Limits
from isobatch.models.clusters import load_cluster
from isobatch.models.flops import FlopsModel
from isobatch.models.presets import ModelPreset
from isobatch.packer.format_text import counted

MFU = 0.5
"""Share of the peak while a rank computes: above what most runs of such models reach."""

PACKED = "packed"
"""The method of trainers that pack samples in random order, by length alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuQuestion:
    """What somebody will train on."""

    gpu: str
    """Preset of a cluster, or a TOML file of one."""
    num_gpus: int
    price: float | None = None
    """Of one GPU for one hour, in any currency."""
    mfu: float = MFU

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise ConfigError(f"--gpus is {self.num_gpus}; give at least 1")
        if not 0 < self.mfu <= 1:
            raise ConfigError(f"--mfu is {self.mfu:g}; give a share of the GPU's peak, up to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodHours:
    """An epoch by one way to fill micro-batches."""

    gpu_hours: float
    padding: float
    """Share of the FLOPs that is spent on padding."""
    waiting: float
    """Share of the GPU hours in which ranks wait for the step's slowest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHours:
    """A prediction of one epoch, by method; the build's own is `ours`."""

    question: GpuQuestion
    model: str
    description: str
    """Of the GPUs."""
    methods: dict[str, MethodHours]
    baseline: str
    """The fastest of the others, which the saving is against."""
    saved_hours: float
    """GPU hours that the build saves against `baseline`; negative if it takes more."""
    saved_share: float
    """The same as a share of the baseline's."""
    assumptions: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedEpoch:
    """An epoch of a build, or of a drawn part of it."""

    counts: Counts
    groups: Groups
    """In the loader's order."""
    limits: Limits
    dp: int
    seed: int
    num_packed: int
    """Samples of the whole build."""


def predict_hours(question: GpuQuestion, model: ModelPreset | None, epoch: PackedEpoch) -> GpuHours:
    """Predict an epoch of a build and of what people use without one.

    ConfigError if the model's sizes are not known, or the GPUs do not divide into `dp` ranks.
    """
    if question.num_gpus % epoch.dp:
        raise ConfigError(f"--gpus {question.num_gpus} are no multiple of --dp {epoch.dp} ranks")
    if model is None or not model.has_dimensions:
        named = "groups of lengths alone" if model is None else f"the model {model.name}"
        needs = "build with a --model that has them, or add [vit] and [llm] tables to its .toml"
        raise ConfigError(f"--gpu needs the model's sizes, which {named} has none of: {needs}")
    cluster = load_cluster(question.gpu)
    flops = FlopsModel.of(model)
    loads = flops.loads(epoch.counts)
    flops_per_hour = cluster.peak_flops_per_s * question.mfu * 3_600
    rows = np.sort(epoch.groups.samples)
    drawn_flops = float(flops.train_flops(loads)[rows].sum())
    epoch_flops = drawn_flops * epoch.num_packed / max(1, len(rows))

    def hours(groups: Groups, llm_tokens: IntArray) -> MethodHours:
        # whole steps only, as for the ratios: the last one says more about the dataset's size
        whole = slice(None, len(groups) // epoch.dp * epoch.dp or None)
        plain = loads.sum(groups)
        needed = float(flops.train_flops(plain)[whole].sum())
        spent = flops.train_flops(replace(plain, llm_tokens=llm_tokens))[whole]
        paid = epoch_ms(spent, epoch.dp) * epoch.dp
        return MethodHours(
            gpu_hours=paid * epoch_flops / max(needed, 1.0) / flops_per_hour,
            padding=1 - needed / max(float(spent.sum()), 1.0),
            waiting=1 - float(spent.sum()) / max(paid, 1.0),
        )

    tokens = epoch.limits.llm_load(epoch.counts)
    size = max(1, round(len(rows) / max(len(epoch.groups), 1)))
    methods = {}
    for name, sampler in BASELINES.items():
        tried = []
        for batch_size in {BATCH_SIZE, size}:
            groups = as_groups(sampler(tokens[rows], epoch.dp, batch_size, epoch.seed))
            groups = Groups(rows[groups.samples], groups.offsets)
            tried.append(hours(groups, padded_loads(groups, tokens)))
        methods[name] = min(tried, key=lambda method: method.gpu_hours)
    groups = packed_batches(tokens[rows], epoch.limits.max_seq_len, epoch.seed)
    groups = Groups(rows[groups.samples], groups.offsets)
    methods[PACKED] = hours(groups, groups.sum(tokens))
    baseline = min(methods, key=lambda name: methods[name].gpu_hours)
    methods["ours"] = hours(epoch.groups, epoch.groups.sum(tokens))
    before = methods[baseline].gpu_hours
    saved = before - methods["ours"].gpu_hours
    ranks = f"{counted(epoch.dp, 'ranks')} of {counted(question.num_gpus // epoch.dp, 'GPUs')}"
    return GpuHours(
        question=question,
        model=model.name,
        description=cluster.description,
        methods=methods,
        baseline=baseline,
        saved_hours=saved,
        saved_share=saved / max(before, 1e-300),
        assumptions=(
            f"one epoch of {counted(epoch.num_packed, 'samples')}; encoder and LLM are trained"
            " whole, and nothing is computed twice. With a frozen encoder, waiting for vision costs"
            " less.",
            f"while it computes, a GPU reaches {question.mfu:.0%} of"
            f" {cluster.peak_flops_per_s / 1e12:,.0f} TFLOP/s (--mfu). At half of that, all hours"
            " and the saving are twice as many.",
            f"the others have {BATCH_SIZE} samples per micro-batch, or {size}, as many as groups"
            " hold on average: what is faster, whether it fits into memory or not; packed: random"
            " samples up to max_seq_len, as trainers pack. Padding costs no attention.",
            f"{ranks} wait once per step, of one micro-batch each; the last step, in which some"
            " have no work, is left out. With FSDP or ZeRO-3 they wait in every layer, which is"
            " more. Communication, the optimizer and data loading come on top, for all alike.",
        ),
    )
