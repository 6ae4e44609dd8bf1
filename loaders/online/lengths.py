"""What samples cost: measured once, each rank its share, known to all.

The next window is measured in a thread while training runs. Lengths stay in memory, 32 bytes per
sample, or in a file that later runs use too.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from isobatch.balance.grouping.cap_lines import CapNames, cap_lines, padded_lines
from isobatch.balance.grouping.caps import GroupOptions, PaddedChoice, choose_limits
from isobatch.common.consoles import messages
from isobatch.common.errors import Cancelled, DataError
from isobatch.common.types import COUNT_COLUMNS, BoolArray, Counts, IntArray, Limits
from isobatch.common.visible_text import visible
from isobatch.counting.record_counter import CountedRecords, RecordCounter, RejectedSample
from isobatch.counting.records.fields import NeverRead, add_never_read, never_read_line
from isobatch.counting.records.reject_reasons import BY_CHOICE, where_missing
from isobatch.loaders.online._length_table import (
    REJECTED,
    ROW,
    SOURCE,
    STATUS,
    UNKNOWN,
    USABLE,
    LengthTable,
)
from isobatch.loaders.online.config import PackingConfig
from isobatch.loaders.ranks.exchange import RankExchange
from isobatch.models.flops import FlopsModel
from isobatch.models.presets import ModelPreset

TOLD_S = 10.0
"""Seconds after which the first window says how far it is, and then again."""
Measure = Callable[[IntArray, Callable[[IntArray], IntArray]], Iterator[CountedRecords]]
"""(samples, admit) -> their records, counted some at a time, in order (`RecordReader.measure`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthOptions:
    """How samples are measured and which are rejected."""

    packing: PackingConfig
    seed: int
    is_alone: bool = True
    """Whether no other rank plans the same windows."""
    tells: bool = True
    """Whether this rank says what concerns all."""


@dataclass(slots=True)
class MeasuredPart:
    """What one rank measured: rows of the table, and what is new about them."""

    rows: NDArray[np.int32]
    sources: list[str]
    rejected: list[RejectedSample] = field(default_factory=list)
    error: str = ""
    rank: int = 0
    """Of whom these samples are the share."""
    state: Any = None
    """Of its stream."""
    content: tuple[int, int] = (0, 0)
    """Of its stream, if that is the rank's own: items read in this epoch, and a sum of them."""
    ids: dict[int, str] = field(default_factory=dict)
    """Samples over a given cap -> their own ids, since rows of counts have none."""
    never_read: dict[str, NeverRead] = field(default_factory=dict)
    """Source -> keys of its records that nothing reads, of those that are new."""


class SampleLengths:
    """Counts of all samples that any rank has measured."""

    def __init__(
        self,
        counter: RecordCounter,
        measure: Measure,
        table: LengthTable,
        exchange: RankExchange | None,
        options: LengthOptions,
    ) -> None:
        """Without `exchange` this rank measures all samples."""
        self._counter, self._measure = counter, measure
        self._table = table
        self._exchange, self._options, self._packing = exchange, options, options.packing
        self._min_measured = self._packing.window
        """Samples that are measured before their share of unusable ones is looked at."""
        self._rank = 0 if exchange is None else exchange.rank
        self._lock = threading.Lock()
        self.explained: list[str] = []
        """How caps were chosen."""
        self.rejected: dict[int, RejectedSample] = {}
        """Samples that cannot be used, by index; those that any rank has found."""
        self._unsent: list[RejectedSample] = []
        self._ids: dict[int, str] = {}  # of samples over a given cap, until they are rejected
        self.never_read: dict[str, NeverRead] = counter.unread_columns()
        _add_sources(self.never_read, table.never_read)
        """Source -> keys of the measured records that nothing reads, on all ranks."""
        self._new_never_read: dict[str, NeverRead] = {}
        self._has_told = self._has_told_rejected = not options.tells
        self.sources = table.sources
        self._source_numbers = {name: number for number, name in enumerate(self.sources)}
        self.num_measured = int(np.count_nonzero(table.rows[:, STATUS]))
        """Samples whose lengths are known."""

    def __len__(self) -> int:
        return len(self._table.rows)

    @property
    def model(self) -> ModelPreset:
        """Whose samples they are."""
        return self._counter.model

    def measure(
        self, samples: IntArray, is_cancelled: Callable[[], bool], epoch: str = ""
    ) -> BoolArray:
        """Learn what samples cost, together with all ranks; -> which of them can be used.

        Each pass over the same samples has another `epoch`: what ranks tell one another in it is
        new, since files may break in between.

        DataError on all ranks if measuring fails on one, or too many samples cannot be used.
        """
        exchange = self._exchange
        part_here = self._part(self._share(samples, self._rank), is_cancelled)
        parts = [part_here]
        if exchange is not None:
            key = f"{epoch}/{blake2b(samples.tobytes(), digest_size=12).hexdigest()}"
            try:
                parts = exchange.all_gather(key, part_here, is_cancelled)
            except Cancelled:
                _add_sources(self._new_never_read, part_here.never_read)
                raise
        if errors := [part.error for part in parts if part.error]:
            raise DataError(errors[0])
        for part in parts:
            self._add(self._share(samples, part.rank), part)
            self._note(part.rejected)
            self._ids |= part.ids
            _add_sources(self.never_read, part.never_read)
        if any(part.never_read for part in parts):
            self._table.keep_never_read(self.never_read)
        self._tell_never_read()
        sent = set(map(id, part_here.rejected))
        with self._lock:
            self._unsent = [sample for sample in self._unsent if id(sample) not in sent]
        self._check_rejected()
        return np.asarray(self._table.get(samples)[:, STATUS] == USABLE)

    def column(self, name: str, samples: IntArray) -> IntArray:
        """A column of `Counts` of samples that were measured, int64, same shape."""
        return np.asarray(self._table.get(samples)[..., COUNT_COLUMNS.index(name)], np.int64)

    def source_numbers(self, samples: IntArray) -> IntArray:
        """Place in `sources` of each sample's source."""
        return np.asarray(self._table.get(samples)[..., SOURCE], np.int64)

    def sorted_sources(self, samples: IntArray) -> IntArray:
        """Place of each sample's source by name: ranks may have met them in another order."""
        places = np.argsort(np.argsort(self.sources)) if self.sources else np.zeros(1, np.int64)
        return np.asarray(places[self.source_numbers(samples)], np.int64)

    def with_images(self, samples: IntArray, limits: Limits) -> Limits:
        """Caps that were chosen without images, with one for those that the samples have, if any.

        By the samples with images alone, since those of one window may be few.
        """
        counts = Counts(**{name: self.column(name, samples) for name in COUNT_COLUMNS})
        has_images = (limits.vision_load(counts) > 0) & (
            limits.llm_load(counts) <= limits.max_seq_len
        )
        if self._packing.max_vision is not None or not has_images.any():
            return limits
        before = self.explained
        limits = self.choose_limits(samples[has_images], as_before=limits.max_seq_len)
        self.explained = [*before, "when the first images came:", *self.explained]
        return limits

    def choose_limits(self, samples: IntArray, as_before: int | None = None) -> Limits:
        """Caps, chosen by these samples as far as they are not given, here or by the user.

        `as_before`: tokens that were chosen before.
        """
        packing, model = self._packing, self._counter.model
        max_tokens, max_vision = as_before or packing.max_tokens, packing.max_vision
        names = CapNames(
            given_tokens="your max_tokens" if as_before is None else "as before",
            larger_tokens="max_tokens={}",
        )
        if max_tokens is not None and max_vision is not None:
            max_length = model.context_len if packing.packing else max_tokens
            caps = min(max_tokens, max_length), max_vision
            return Limits(
                max_seq_len=caps[0],
                max_vision=caps[1],
                min_seq_len=caps[0],
                min_vision=caps[1],
                vision_unit=model.vision_unit,
                pad_each_to=packing.pad_each_to,
            )
        counts = Counts(**{name: self.column(name, samples) for name in COUNT_COLUMNS})
        if not packing.packing:
            padded = self._padded_limits(counts, max_tokens)
            self.explained = padded_lines(padded, names)
            return padded.limits
        choice = choose_limits(
            counts,
            GroupOptions(
                seed=self._options.seed,
                max_seq_len=max_tokens,
                max_vision=max_vision,
                pad_each_to=packing.pad_each_to,
            ),
            vision_unit=model.vision_unit,
            context_len=model.context_len,
            predictor=FlopsModel.of(model) if model.has_dimensions else None,
        )
        self.explained = cap_lines(choice, names)
        return choice.limits

    def _padded_limits(self, counts: Counts, max_tokens: int | None) -> PaddedChoice:
        """Caps of padded batches, chosen by the samples that are within those that are given."""
        from isobatch.balance.grouping.padded import choose_padded_limits  # noqa: PLC0415  compiles

        model, max_vision = self._counter.model, self._packing.max_vision
        max_length = min(max_tokens or model.context_len, model.context_len)
        vision, fits = getattr(counts, f"num_{model.vision_unit}"), counts.seq_len <= max_length
        if max_vision is not None:
            fits &= vision <= max_vision
        if not fits.any():
            raise DataError(
                f"all of the first {len(fits):,} samples are over {max_length:,} tokens or over "
                "max_vision; give larger caps"
            )
        return choose_padded_limits(
            vision[fits],
            counts.seq_len[fits],
            max_tokens=max_tokens,
            max_vision=max_vision,
            vision_unit=model.vision_unit,
        )

    def within(self, samples: IntArray) -> IntArray:
        """Samples without those that are over a given cap, which are rejected.

        One over a cap that was chosen by the first window is a group of its own.
        """
        fits = np.ones(len(samples), np.bool_)
        for loads, reason, unit, cap in self._capped(samples):
            is_over = loads > cap
            for row in np.flatnonzero(is_over & fits).tolist():
                index = int(samples[row])
                source = self.sources[int(self.source_numbers(samples[row]))]
                name = self._ids.pop(index, f"{source}:{index}")
                detail = f"{loads[row]} {unit}, cap {cap}"
                self._note([RejectedSample(index, name, source, reason, detail)])
            fits &= ~is_over
        self._check_rejected()
        return samples[fits]

    def _capped(self, samples: IntArray) -> list[tuple[IntArray, str, str, int]]:
        """For each cap that is given: the samples' loads, the reason, the unit and the cap."""
        counts = Counts(**{name: self.column(name, samples) for name in COUNT_COLUMNS})
        model, packing = self._counter.model, self._packing
        max_length = min(model.context_len, packing.max_tokens or model.context_len)
        tokens = counts.padded(packing.pad_each_to).seq_len
        name = "tokens"
        if packing.pad_each_to > 1:
            name = f"tokens with padding to a multiple of {packing.pad_each_to}"
        capped = [(tokens, "longer_than_max_seq_len", name, max_length)]
        if packing.max_vision is not None:
            unit = model.vision_unit
            loads = np.asarray(getattr(counts, f"num_{unit}"))
            name = unit.replace("_", " ")
            capped.append((loads, "more_than_max_vision", name, packing.max_vision))
        return capped

    def _over(self, samples: IntArray) -> BoolArray:
        """Which of the samples are usable, but for a cap that is given."""
        is_over = np.any([loads > cap for loads, _, _, cap in self._capped(samples)], axis=0)
        return np.asarray(is_over & (self._table.get(samples)[:, STATUS] == USABLE))

    def lose(self, lost: Sequence[RejectedSample]) -> None:
        """Note samples that this rank could not read after they were measured."""
        with self._lock:
            self._unsent += lost if self._exchange is not None else []
        if self._exchange is None and self._options.is_alone:
            self._note(lost)
        elif self._exchange is None:  # still planned: other ranks cannot know it
            self.rejected |= {sample.index: sample for sample in lost}

    def source_shares(self) -> dict[str, float]:
        """Share of each source in the usable samples that are measured."""
        rows = self._table.rows
        usable = rows[rows[:, STATUS] == USABLE, SOURCE]
        numbers = np.bincount(usable, minlength=len(self.sources))
        shares = numbers / max(1, int(numbers.sum()))
        return dict(zip(self.sources, shares.tolist(), strict=True))

    def _share(self, samples: IntArray, rank: int) -> IntArray:
        """The samples that one rank measures."""
        return samples[rank :: 1 if self._exchange is None else self._exchange.size]

    def _part(self, samples: IntArray, is_cancelled: Callable[[], bool]) -> MeasuredPart:
        """Rows of samples, those measured that are not known yet; or why they cannot be."""
        # those over a cap that earlier runs have measured are counted again, for their ids
        is_unknown = self._table.get(samples)[:, STATUS] == UNKNOWN
        is_unnamed = np.array([sample not in self._ids for sample in samples.tolist()], np.bool_)
        unknown = samples[is_unknown | (self._over(samples) & is_unnamed)]
        reported_s = inf if self.num_measured or self._rank else time.monotonic()

        def admit(chunk: IntArray) -> IntArray:
            if is_cancelled():
                raise Cancelled("the loader was closed, or is at another place")
            return self._existing(chunk)

        num_done = 0
        try:
            for counted in self._measure(unknown, admit):
                chunk = counted.indices
                self._add(chunk, part := _part_of(counted))
                num_done += len(chunk)
                over = np.flatnonzero(self._over(chunk))
                names = counted.table.column("sample_id").take(pa.array(over)).to_pylist()
                self._ids |= zip(chunk[over].tolist(), names, strict=True)
                self._note(part.rejected)
                _add_sources(self._new_never_read, counted.never_read)
                with self._lock:  # until all ranks have it, since this window may be given up
                    self._unsent += part.rejected
                if time.monotonic() > reported_s + TOLD_S:  # the first step waits for this
                    reported_s = time.monotonic()
                    messages.print(
                        f"{num_done:,} of the first {len(unknown):,} samples are measured"
                    )
        except Cancelled:
            raise
        except Exception as error:
            if self._exchange is None:
                raise
            reason = f"one rank failed: {type(error).__name__}: {error}"
            return MeasuredPart(np.zeros((0, ROW), np.int32), [], error=reason, rank=self._rank)
        rows = self._table.get(samples)
        numbers, rows[:, SOURCE] = np.unique(rows[:, SOURCE], return_inverse=True)
        with self._lock:
            names = [self.sources[number] for number in numbers if number < len(self.sources)]
            part = MeasuredPart(rows, names, [*self._unsent], rank=self._rank)
            part.ids = {row: self._ids[row] for row in samples.tolist() if row in self._ids}
            part.never_read, self._new_never_read = self._new_never_read, {}
            return part

    def _tell_never_read(self) -> None:
        """Say once, after the first window, which keys of the records nothing reads."""
        if not self._has_told and (line := never_read_line(self.never_read)):
            self._tell(line)
        self._has_told = True

    @staticmethod
    def _tell(line: str) -> None:
        messages.print(f"note: {visible(line)}", markup=False, highlight=False, soft_wrap=True)

    def _existing(self, samples: IntArray) -> IntArray:
        return samples  # of a stream some are not there

    def _add(self, samples: IntArray, part: MeasuredPart) -> None:
        """Take over the rows of a part, known ones too, so that all ranks have the same."""
        if not len(samples):
            return
        with self._lock:
            for name in part.sources:
                if self._source_numbers.setdefault(name, len(self.sources)) == len(self.sources):
                    self.sources.append(name)
            numbers = [self._source_numbers[name] for name in part.sources] or [0]
        rows, known = part.rows.copy(), self._table.get(samples)
        rows[:, SOURCE] = np.array(numbers, np.int32)[rows[:, SOURCE]]
        is_other = (rows != known).any(axis=1)
        if is_other.any():
            self._table.set(samples[is_other], rows[is_other])
        is_new = (known[:, STATUS] == UNKNOWN) & (rows[:, STATUS] != UNKNOWN)
        self.num_measured += int(np.count_nonzero(is_new))

    def _note(self, rejected: Sequence[RejectedSample]) -> None:
        if not rejected:
            return
        indices = np.array([sample.index for sample in rejected], np.int64)
        rows = self._table.get(indices)
        rows[:, STATUS] = REJECTED
        self._table.set(indices, rows)
        self.rejected |= {sample.index: sample for sample in rejected}

    def _check_rejected(self) -> None:
        """DataError if too many samples cannot be used; the same on all ranks.

        The first that are fewer are told once.
        """
        rejected = [*self.rejected.values()]  # threads that read may add others
        reasons = Counter(sample.reason for sample in rejected)
        number = sum(count for reason, count in reasons.items() if reason not in BY_CHOICE)
        max_share, measured = self._packing.max_rejected, self.num_measured
        is_over = number > max_share * measured
        is_over &= measured >= min(self._min_measured, len(self))
        if not number or (self._has_told_rejected and not is_over):
            return
        listed = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(5))
        most_common = next(reason for reason, _ in reasons.most_common() if reason not in BY_CHOICE)
        first = next(sample for sample in rejected if sample.reason == most_common)
        line = f"{number:,} of {measured:,} samples cannot be used"
        why = f"{listed}; the first is {first.sample_id} ({first.detail})"
        why += where_missing(reasons, "data_root=")
        if is_over:
            raise DataError(
                f"{line}, more than max_rejected={max_share:g} allows: {why}. Repair the data, or "
                "raise max_rejected"
            )
        self._tell(f"{line} so far: {why}; the loader's `rejected` lists them")
        self._has_told_rejected = True


def _add_sources(never_read: dict[str, NeverRead], more: dict[str, NeverRead]) -> None:
    for source, paths in more.items():
        add_never_read(never_read.setdefault(source, {}), paths)


def _part_of(counted: CountedRecords) -> MeasuredPart:
    names = list(dict.fromkeys(counted.sources))
    places = {name: place for place, name in enumerate(names)}
    status = np.where(counted.usable, USABLE, REJECTED)
    sources = [places[name] for name in counted.sources]
    extra = np.stack([status, sources], axis=1)
    rows = np.concatenate([counted.counts, extra], axis=1).astype(np.int32)
    return MeasuredPart(rows, names, counted.rejected)
