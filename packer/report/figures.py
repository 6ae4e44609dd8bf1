"""The report of a build: OmniBal's Table 3 for its dataset, and randomness.

`make_report` reads counts, groups and rejected samples, never shards, so it works on the output of
`packer group` too. It compares the stored groups, in the loader's own order, with the samplers that
trainers use, on the packed samples only. Loads are those after padding: the baselines pad LLM
sequences to their micro-batch's longest, groups are packed; both concatenate vision patches (see
`balance.metrics`). The tables must add up: every sample is in exactly one group or rejected.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from isobatch.balance.baseline_samplers import BASELINES, BATCH_SIZE, as_groups
from isobatch.balance.metrics import (
    autocorrelation,
    dist_ratio,
    fill,
    gradient_shares,
    lower_bounds,
    pad_ratio,
    padded_loads,
    repeated_pairs,
    source_autocorrelation,
    source_entropy,
)
from isobatch.balance.order.step_order import epoch_steps
from isobatch.common.config import build_config
from isobatch.common.errors import ConfigError, DataError
from isobatch.common.types import COUNT_COLUMNS, Counts, FloatArray, Groups, IntArray, Limits
from isobatch.common.visible_text import shown
from isobatch.counting.records.fields import NeverRead
from isobatch.models.presets import ModelPreset
from isobatch.packer.format_text import counted
from isobatch.packer.group import LIMITS_NAME
from isobatch.packer.report.build_summary import Rejection, count_rejected
from isobatch.packer.report.fill_limits import unused_tokens
from isobatch.packer.report.gpu_hours import GpuHours, GpuQuestion, PackedEpoch, predict_hours
from isobatch.shards.folders import on_disk
from isobatch.shards.manifest import (
    MANIFEST_NAME,
    Manifest,
    is_complete,
    read_manifest,
    tables_on_disk,
)
from isobatch.shards.tables import (
    COUNTS_NAME,
    GROUPS_NAME,
    REJECTED_NAME,
    counts_arrays,
    read_groups,
    read_row_groups,
    read_table,
    row_group_sizes,
    source_numbers,
)

Kind = TypeVar("Kind", dict[str, Any], list[Any])

TITLES = {
    "random": "random",
    "length_group": "length-group",
    "device_group": "device-group",
    "sorted": "sorted",
    "ours_shuffled": "shuffled groups",
    "ours": "Isobatch",
}
"""What people read for each method, in the table's order."""

OURS = ("ours_shuffled", "ours")
BEFORE = "before"
"""Random micro-batches of as many samples as groups hold on average: what bars are next to."""

MICRO_BATCHES = (1, 8)
"""Micro-batches per step of the shuffle figures: none accumulated, and as many as is usual."""

TABLE_3 = ("random", "length_group", "device_group", "ours")
"""The methods of OmniBal's Table 3; the others explain them."""

MOST_SAMPLES = 1 << 20
"""Samples that methods are compared on. A build of more in partitions, which are alike, is compared
by some of these, so that the report takes no more memory than one partition.
"""

TABLE_NAMES = (COUNTS_NAME, GROUPS_NAME, REJECTED_NAME)
"""What a report reads of a finished build."""

Loads = dict[str, IntArray]
"""`vit_tokens` and `llm_tokens` of each micro-batch after padding, in stream order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleFigures:
    """How random a method's steps are.

    In a random order of n steps the correlations are 0, with a deviation of 1 / sqrt(n).
    """

    num_steps: int
    source_entropy: float
    """Entropy of a step's sources, relative to a random order: 1 is as well mixed."""
    autocorrelation_source: float
    """Correlation of the sources' shares in a step with those in the next."""
    autocorrelation_vit: float
    """Correlation of a step's load with the next step's."""
    autocorrelation_llm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodFigures:
    """One row of the table: balance and randomness of one way to fill micro-batches."""

    avg_batch_size: float
    longest_vit_tokens: int
    longest_seq_len: int
    pad_ratio: float
    dist_ratio_vit: float
    dist_ratio_llm: float
    num_steps: int
    shuffle: dict[int, ShuffleFigures]
    """Micro-batches per step -> figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFigures:
    """What a source weighs among all sources, in the loader's order."""

    samples: float
    labels: float
    """Share of the gradient with `loss_normalizer="epoch"`."""
    gradient: dict[int, float]
    """Share of the gradient with "step", by micro-batches per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures of a build; `loads` and `samples` feed the charts and stay out of the JSON."""

    num_read: int
    """Samples read: the packed and the rejected, a repeated one counted once."""
    num_repeated: int
    """Copies beyond the first of each sample, in a mixture that repeats some."""
    num_packed: int
    num_rejected: int
    rejected: dict[str, int]
    rejected_first: dict[str, str]
    """Reason -> the first sample that has it, and details."""
    never_read: dict[str, NeverRead]
    """Source -> keys of its records that nothing reads, with the records that have them."""
    num_groups: int
    dp_world_size: int
    fill: float
    unused: dict[str, float]
    """Share of the groups' LLM tokens that nothing uses, by what limits them (`fill_limits`)."""
    lower_bounds: dict[str, int]
    """Fewest groups that any grouping needs, by tokens and by vision."""
    num_steps: int
    num_sources: int
    sources: dict[str, SourceFigures]
    repeated_pairs: dict[int, float]
    """Micro-batches per step -> how often groups of a step share one in the next epoch too,
    relative to chance.
    """
    limits: Limits
    limits_explained: tuple[str, ...]
    """Lines on how the caps were chosen."""
    methods: dict[str, MethodFigures]
    notes: tuple[str, ...]
    model: str | None
    gpu_hours: GpuHours | None
    """What an epoch takes, if that was asked."""
    loads: dict[str, Loads] = field(repr=False)
    samples: Loads = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `packer report --json`; `methods` are those of Table 3."""
        values = asdict(replace(self, loads={}, samples={})) | {"limits": self.limits.to_json()}
        del values["loads"], values["samples"]
        methods = values["methods"]
        values["methods"] = {name: methods.pop(name) for name in TABLE_3}
        return {**values, "more_methods": methods}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """The tables of a build: groups hold row numbers of `counts`, in stored order."""

    counts: Counts
    sources: IntArray
    """Number of each sample's source, from 0, shape (num_samples,)."""
    source_names: tuple[str, ...]
    groups: Groups
    model: ModelPreset | None
    """None of groups that `packer group` made of lengths."""
    rejected: dict[str, Rejection]
    """Reason -> samples, most frequent first."""
    never_read: dict[str, NeverRead]
    num_repeated: int
    totals: dict[str, int]
    """Packed and rejected samples and groups of the whole build, named as in its manifest."""
    is_drawn: bool
    """Whether counts and groups are those of some of the build's partitions."""
    limits: Limits
    limits_explained: tuple[str, ...]
    llm_tokens: IntArray
    """LLM tokens of each sample as the groups' caps count them: with padding."""


def make_report(
    out: Path | str, *, dp: int = 8, seed: int = 0, question: GpuQuestion | None = None
) -> Report:
    """Compare the build at `out`, a folder or URI, with the baselines on `dp` ranks.

    `seed` is that of the loader's order and of the samplers; `question` asks for GPU hours too.
    DataError when a table is missing or the tables do not add up.
    """
    if dp < 1:
        raise ConfigError(f"dp is {dp}; give at least one data-parallel rank")
    manifest = read_manifest(out) if is_complete(str(out)) else None
    opened = tables_on_disk(manifest, TABLE_NAMES) if manifest else on_disk(str(out), TABLE_NAMES)
    with opened as folder:
        tables = _read_tables(folder, manifest)
    counts, groups, limits = tables.counts, tables.groups, tables.limits
    streams = _streams(tables, dp=dp, seed=seed)
    loads = {name: _loads(name, streams[name], tables) for name in (*TITLES, BEFORE)}
    methods = {name: _method(name, streams[name], loads[name], tables, dp) for name in TITLES}
    pairs = {}
    for number in MICRO_BATCHES:
        # a step of several micro-batches has other groups than as many steps of one
        order, following = (_in_order(tables, dp, number, seed, epoch) for epoch in (0, 1))
        stream = groups.take(order)
        methods["ours"].shuffle[number] = _shuffle(
            stream, _loads("ours", stream, tables), tables.sources, dp * number
        )
        pairs[number] = repeated_pairs(order, following, dp * number)
    packed = counts.take(np.sort(groups.samples))
    num_packed, num_rejected, num_groups = (
        tables.totals[name] for name in ("num_packed", "num_rejected", "num_groups")
    )
    bounds = lower_bounds(limits.vision_load(packed), limits.llm_load(packed), limits)
    if tables.is_drawn:  # as many more as the build has groups
        bounds = {name: bound * num_groups // max(1, len(groups)) for name, bound in bounds.items()}
    return Report(
        num_read=num_packed + num_rejected - tables.num_repeated,
        num_repeated=tables.num_repeated,
        num_packed=num_packed,
        num_rejected=num_rejected,
        rejected={reason: entry.number for reason, entry in tables.rejected.items()},
        rejected_first={reason: entry.first for reason, entry in tables.rejected.items()},
        never_read=tables.never_read,
        num_groups=num_groups,
        dp_world_size=dp,
        fill=fill(groups, tables.llm_tokens, limits.max_seq_len),
        unused=unused_tokens(groups, tables.llm_tokens, limits.vision_load(counts), limits),
        lower_bounds=bounds,
        num_steps=-(-num_groups // dp),
        num_sources=len(np.unique(tables.sources[groups.samples])),
        sources=_sources(tables, dp=dp, seed=seed),
        repeated_pairs=pairs,
        limits=limits,
        limits_explained=tables.limits_explained,
        methods=methods,
        notes=_notes(tables, len(packed), dp),
        model=tables.model.name if tables.model else None,
        gpu_hours=None
        if question is None
        else predict_hours(
            question,
            tables.model,
            PackedEpoch(
                counts=counts,
                groups=streams["ours"],
                limits=limits,
                dp=dp,
                seed=seed,
                num_packed=num_packed,
            ),
        ),
        loads=loads,
        samples={"vit_tokens": packed.num_vit_tokens, "llm_tokens": packed.seq_len},
    )


def _streams(tables: _Tables, *, dp: int, seed: int) -> dict[str, Groups]:
    """Every method's micro-batches in stream order, as groups of rows of the counts."""
    groups = tables.groups
    packed = np.sort(groups.samples)
    seq_len = tables.counts.seq_len[packed]
    group_size = max(1, round(len(packed) / max(len(groups), 1)))
    samplers = [(name, sampler, BATCH_SIZE) for name, sampler in BASELINES.items()]
    streams = {}
    for name, sampler, size in [*samplers, (BEFORE, BASELINES["random"], group_size)]:
        drawn = as_groups(sampler(seq_len, dp, size, seed))
        streams[name] = Groups(packed[drawn.samples], drawn.offsets)
    streams["ours_shuffled"] = groups.take(np.random.default_rng(seed).permutation(len(groups)))
    streams["ours"] = groups.take(_in_order(tables, dp, 1, seed))
    return streams


def _in_order(tables: _Tables, dp: int, micro_batches: int, seed: int, epoch: int = 0) -> IntArray:
    """The groups of an epoch, micro-batch after micro-batch, in each rank by rank."""
    groups = tables.groups
    vision = tables.limits.vision_load(tables.counts)
    loads = groups.sum(vision), groups.sum(tables.llm_tokens)
    steps = epoch_steps(loads, (dp, micro_batches), seed=seed, epoch=epoch)
    taken = steps.transpose(0, 2, 1).ravel()
    return taken[taken >= 0]


def _sources(tables: _Tables, *, dp: int, seed: int) -> dict[str, SourceFigures]:
    """Shares of the sources that have packed samples, by name."""
    labels = tables.counts.num_loss_tokens
    ones = np.ones_like(tables.sources)

    def shares(stream: Groups, weights: IntArray, step_groups: int) -> FloatArray:
        return gradient_shares(stream, tables.sources, weights, max(1, step_groups))

    gradients = {
        number: shares(tables.groups.take(_in_order(tables, dp, number, seed)), labels, dp * number)
        for number in MICRO_BATCHES
    }
    of_epoch = (shares(tables.groups, weights, len(tables.groups)) for weights in (ones, labels))
    return {
        tables.source_names[source]: SourceFigures(
            samples=float(samples),
            labels=float(label_share),
            gradient={number: float(by_source[source]) for number, by_source in gradients.items()},
        )
        for source, (samples, label_share) in enumerate(zip(*of_epoch, strict=True))
        if samples > 0
    }


def _loads(name: str, stream: Groups, tables: _Tables) -> Loads:
    seq_len = tables.counts.seq_len
    return {
        "vit_tokens": stream.sum(tables.counts.num_vit_tokens),
        "llm_tokens": (
            stream.sum(tables.llm_tokens) if name in OURS else padded_loads(stream, seq_len)
        ),
    }


def _method(name: str, stream: Groups, loads: Loads, tables: _Tables, dp: int) -> MethodFigures:
    vit_tokens, llm_tokens = loads["vit_tokens"], loads["llm_tokens"]
    return MethodFigures(
        avg_batch_size=len(stream.samples) / max(int((stream.sizes > 0).sum()), 1),
        longest_vit_tokens=int(vit_tokens.max(initial=0)),
        longest_seq_len=int(llm_tokens.max(initial=0)),
        pad_ratio=_pad_ratio(name, stream, tables),
        dist_ratio_vit=dist_ratio(vit_tokens, dp),
        dist_ratio_llm=dist_ratio(llm_tokens, dp),
        num_steps=-(-len(stream) // dp),
        shuffle={
            number: _shuffle(stream, loads, tables.sources, dp * number) for number in MICRO_BATCHES
        },
    )


def _pad_ratio(name: str, stream: Groups, tables: _Tables) -> float:
    """Share of padding in the tokens; of groups that of their samples, by `--pad-each-to`."""
    seq_len = tables.counts.seq_len
    if name not in OURS:
        return pad_ratio(stream, seq_len)
    padded = int(tables.llm_tokens[stream.samples].sum())
    return 1 - int(seq_len[stream.samples].sum()) / max(1, padded)


def _shuffle(stream: Groups, loads: Loads, sources: IntArray, step_groups: int) -> ShuffleFigures:
    return ShuffleFigures(
        num_steps=-(-len(stream) // step_groups),
        source_entropy=source_entropy(stream, sources, step_groups),
        autocorrelation_source=source_autocorrelation(stream, sources, step_groups),
        autocorrelation_vit=autocorrelation(loads["vit_tokens"], step_groups),
        autocorrelation_llm=autocorrelation(loads["llm_tokens"], step_groups),
    )


def _notes(tables: _Tables, num_packed: int, dp: int) -> tuple[str, ...]:
    notes, num_groups = [], len(tables.groups)
    if tables.is_drawn:
        notes.append(
            f"fill, balance, randomness and sources are those of {num_packed:,} samples, whole"
            f" partitions of the build's {tables.totals['num_packed']:,}"
        )
    if num_groups < dp:
        few = f"{counted(num_groups, 'groups')} for {dp} ranks: some have nothing to do in a step"
        notes.append(
            f"{few}, so the ratios say little; packer report --dp {max(num_groups, 1)} fits"
        )
    elif num_packed < dp * BATCH_SIZE:
        few = f"{counted(num_packed, 'samples')} for {dp} ranks"
        notes.append(f"{few} of {BATCH_SIZE} each: before packing, some ranks had nothing to do")
    return tuple(notes)


# --- the tables of a build, checked against each other ---


def _of_kind(kind: type[Kind], manifest: Manifest, key: str) -> Kind:
    """A value of the manifest that builds of earlier versions lack."""
    value = manifest.values.get(key, kind())
    if not isinstance(value, kind):
        raise DataError(f"{manifest.place}: {MANIFEST_NAME}: {key} is {shown(value)}; build again")
    return value


def _read_tables(out: Path, manifest: Manifest | None) -> _Tables:
    """The tables of a build. DataError when one is missing, unreadable or does not add up."""
    if not out.is_dir():
        raise DataError(f"{out} is not a folder; give an --out of `packer build` or `packer group`")
    numbers = None if manifest is None else _drawn_partitions(out, manifest)
    table = read_table(out / COUNTS_NAME, ("position", "source", *COUNT_COLUMNS), numbers)
    groups = _read_groups(out, numbers)
    rejected = read_table(out / REJECTED_NAME, ["position"], numbers).column("position").to_numpy()
    reasons = count_rejected(read_row_groups(out / REJECTED_NAME))

    positions = table.column("position").to_numpy()
    _check_samples(out, groups, np.isin(positions, rejected))
    totals = {"num_packed": len(groups.samples), "num_rejected": len(rejected)}
    totals["num_groups"] = len(groups)
    num_repeated = len(positions) - len(np.unique(positions))
    if manifest is None:
        limits, explained = _read_limits(out)
        unread = {}
    else:
        limits = manifest.limits
        unread = _of_kind(dict, manifest, "never_read")
        explained = tuple(map(str, _of_kind(list, manifest, "limits_explained")))
        said = manifest.values["totals"]
        asked = totals if numbers is None else [*totals, "num_repeated"]
        if missing := [name for name in asked if name not in said]:
            lacks = f"the totals of {MANIFEST_NAME} have no {missing[0]}"
            raise DataError(f"{manifest.place}: {lacks}; build again with --overwrite")
        recorded = {name: said[name] for name in totals}
        if numbers is not None:
            totals, num_repeated = recorded, said["num_repeated"]
        elif recorded != totals:
            differ = f"{MANIFEST_NAME} says {recorded}, but the tables hold {totals}"
            raise DataError(f"{manifest.place}: {differ}; build again with --overwrite")

    arrays = counts_arrays(table)
    return _Tables(
        counts=arrays,
        sources=source_numbers(table),
        source_names=tuple(table.column("source").cast(pa.string()).unique().to_pylist()),
        groups=groups,
        totals=totals,
        num_repeated=num_repeated,
        is_drawn=numbers is not None,
        model=manifest.model if manifest else None,
        rejected=reasons,
        never_read=unread,
        limits=limits,
        limits_explained=explained,
        llm_tokens=limits.llm_load(arrays),
    )


def _drawn_partitions(out: Path, manifest: Manifest) -> list[int] | None:
    """Partitions of a large build, evenly spaced, of MOST_SAMPLES together; None: all of them."""
    sizes = row_group_sizes(out / COUNTS_NAME)
    others = [len(row_group_sizes(out / name)) for name in (GROUPS_NAME, REJECTED_NAME)]
    filled = np.flatnonzero(sizes)  # a small partition may have left all its samples over
    number = len(filled) * MOST_SAMPLES // max(1, sum(sizes))
    # tables of one partition, alone or in a build that has grown, have other row groups
    is_cut = others == [len(sizes)] * 2 and "partition_samples" in manifest.values.get("config", {})
    if number >= len(filled) or not is_cut:
        return None
    # never the last one: it may be what others have left over, which is unlike them
    places = np.arange(max(1, number)) * len(filled) // max(1, number)
    return list(map(int, filled[places]))


def _read_groups(out: Path, numbers: list[int] | None) -> Groups:
    """Groups of those partitions, each a row group of the counts; their rows numbered through."""
    if numbers is None:
        return read_groups(read_table(out / GROUPS_NAME))
    parts = list(map(read_groups, read_row_groups(out / GROUPS_NAME, numbers)))
    sizes = row_group_sizes(out / COUNTS_NAME)
    firsts = np.cumsum([0, *sizes])[numbers].tolist()
    before = np.cumsum([0, *(sizes[number] for number in numbers)]).tolist()
    moved = zip(parts, firsts, before, strict=False)
    samples = np.concatenate([part.samples - first + start for part, first, start in moved])
    ends = np.cumsum(np.concatenate([part.sizes for part in parts]))
    return Groups(samples, np.concatenate([[0], ends]))


def _check_samples(out: Path, groups: Groups, is_rejected: NDArray[np.bool_]) -> None:
    num_samples = len(is_rejected)
    if groups.samples.max(initial=-1) >= num_samples:
        raise DataError(f"{out / GROUPS_NAME} names samples missing in {COUNTS_NAME}; build again")
    uses = np.bincount(groups.samples, minlength=num_samples) + is_rejected
    wrong = np.flatnonzero(uses != 1)
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"{out}: {len(wrong)} samples are not in exactly one group or else rejected (first: "
            f"row {row} of {COUNTS_NAME}, {uses[row]} times); build again with --overwrite"
        )


def _read_limits(out: Path) -> tuple[Limits, tuple[str, ...]]:
    """The caps that `packer group` chose, and the lines that explain them."""
    path = out / LIMITS_NAME
    try:
        values = json.loads(path.read_text("utf-8"))
        explained = values.pop("limits_explained", [])
    except FileNotFoundError:
        missing = f"{out} has neither {MANIFEST_NAME} nor {LIMITS_NAME}"
        raise DataError(f"{missing}: the build is unfinished; run it to its end") from None
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{path}: not a JSON object ({error}); run `packer group` again") from None
    return build_config(Limits, values, where=str(path)), tuple(map(str, explained))
