"""GPU hours of an epoch, predicted for a build and for what people use without.

Pure. Every number comes from the build's counts, the model's sizes and the GPU's peak. Padding
costs no attention, and micro-batches of the others need not fit into memory, which makes the build
look worse. Steps of one micro-batch per rank make it look better than long steps do, so the saving
of those is said too. `assumptions` says all this to whoever reads the figures.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from isobatch.balance.baseline_samplers import (
    BASELINES,
    BATCH_SIZE,
    as_groups,
    best_fit_batches,
    packed_batches,
)
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
"""The method of trainers that pack samples by length alone."""
ACCUMULATED = 8
"""Micro-batches per step of a rank, for the second figure."""


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
    accumulated_hours: float
    """GPU hours with `ACCUMULATED` micro-batches per step and rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHours:
    """A prediction of one epoch, by method; the build's own is `ours`."""

    question: GpuQuestion
    model: str
    num_packed: int
    """Samples of an epoch."""
    description: str
    """Of the GPUs."""
    methods: dict[str, MethodHours]
    baseline: str
    """The fastest of the others, which the saving is against."""
    saved_hours: float
    """GPU hours that the build saves against `baseline`; negative if it takes more."""
    saved_share: float
    """The same as a share of the baseline's."""
    num_steps: int
    """Steps in which every rank has a micro-batch; 0 of a build with fewer groups than ranks."""
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
        plain = loads.sum(groups)
        needed = flops.train_flops(plain)
        spent = flops.train_flops(replace(plain, llm_tokens=llm_tokens))

        def paid(per_step: int) -> tuple[slice, float]:
            # whole steps only, as for the ratios: the last one says more about the dataset's size
            width = epoch.dp * per_step
            whole = slice(None, len(groups) // width * width or None)
            steps = np.pad(spent[whole], (0, -len(spent[whole]) % width))
            of_ranks = steps.reshape(-1, per_step, epoch.dp).sum(axis=1).ravel()
            return whole, epoch_ms(of_ranks, epoch.dp) * epoch.dp

        whole, once = paid(1)
        longer, accumulated = paid(ACCUMULATED)
        per_flop = epoch_flops / flops_per_hour
        return MethodHours(
            gpu_hours=once * per_flop / max(float(needed[whole].sum()), 1.0),
            padding=1 - float(needed[whole].sum()) / max(float(spent[whole].sum()), 1.0),
            waiting=1 - float(spent[whole].sum()) / max(once, 1.0),
            accumulated_hours=accumulated * per_flop / max(float(needed[longer].sum()), 1.0),
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
    tried = []
    for pack in (packed_batches, best_fit_batches):
        groups = pack(tokens[rows], epoch.limits.max_seq_len, epoch.seed)
        groups = Groups(rows[groups.samples], groups.offsets)
        tried.append(hours(groups, groups.sum(tokens)))
    methods[PACKED] = min(tried, key=lambda method: method.gpu_hours)
    baseline = min(methods, key=lambda name: methods[name].gpu_hours)
    before = methods[baseline].gpu_hours
    longest = min(method.accumulated_hours for method in [*methods.values(), *tried])
    methods["ours"] = hours(epoch.groups, epoch.groups.sum(tokens))
    saved = before - methods["ours"].gpu_hours
    saved_long = 1 - methods["ours"].accumulated_hours / max(longest, 1e-300)
    num_steps = len(epoch.groups) // epoch.dp
    ranks = f"{counted(epoch.dp, 'ranks')} of {counted(question.num_gpus // epoch.dp, 'GPUs')}"
    return GpuHours(
        question=question,
        model=model.name,
        num_packed=epoch.num_packed,
        description=cluster.description,
        methods=methods,
        baseline=baseline,
        saved_hours=saved,
        saved_share=saved / max(before, 1e-300),
        num_steps=num_steps,
        assumptions=(
            f"one epoch of {counted(epoch.num_packed, 'samples')}; encoder and LLM are trained"
            " whole, and nothing is computed twice. With a frozen encoder, waiting for vision costs"
            " less.",
            f"while it computes, a GPU reaches {question.mfu:.0%} of"
            f" {cluster.peak_flops_per_s / 1e12:,.0f} TFLOP/s (--mfu). At half of that, all hours"
            " and the saving are twice as many.",
            f"the others have {BATCH_SIZE} samples per micro-batch, or {size}, as many as groups"
            " hold on average: what is faster, whether it fits into memory or not; packed: up to"
            " max_seq_len, in random order or by best fit in blocks of 1,000, what is faster."
            " Padding costs no attention.",
            f"{ranks} wait once per step, of one micro-batch each. With {ACCUMULATED} micro-batches"
            f" per step in DDP the saving is {saved_long:z.1%}; with FSDP or ZeRO-3 ranks wait in"
            " every layer, and it is not less than with one.",
            f"{counted(num_steps, 'whole steps')} of the build; a last one, in which some ranks"
            " have no work, is left out. Communication, the optimizer and data loading come on top,"
            " for all alike.",
        ),
    )
