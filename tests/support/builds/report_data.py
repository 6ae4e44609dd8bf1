"""What `packer group` leaves, made from drawn counts: for the tests of the report and its
page, and pages as a parser of HTML reads them.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa

from isobatch.balance.grouping.caps import GroupOptions
from isobatch.common.types import COUNT_COLUMNS, Counts, Groups, Limits
from isobatch.packer.group import group_counts
from isobatch.shards.tables import COUNTS_SCHEMA, REJECTED_SCHEMA, groups_table, write_table


def make_counts(num_samples: int, *, images: bool = True, seed: int = 0) -> Counts:
    """Counts with the spread of real data: 1 to 5 tiles (a tenth without images), 40 to 900 text
    tokens.
    """
    rng = np.random.default_rng(seed)
    patches = rng.choice([0, 1, 3, 5], num_samples, p=[0.1, 0.3, 0.2, 0.4]) * int(images)
    text = rng.integers(40, 900, num_samples)
    return Counts(
        num_image_patches=patches,
        num_vit_tokens=patches * 1025,
        num_image_tokens=patches * 256,
        num_text_tokens=text,
        num_audio_tokens=np.zeros_like(text),
        num_loss_tokens=text // 2,
    )


def write_build(
    out: Path, counts: Counts, *, rejected: dict[str, int] | None = None, sources: int = 1
) -> tuple[Groups, Limits]:
    """What `packer group` leaves, with samples rejected while counting after the last
    position.
    """
    grouping = group_counts(counts, GroupOptions(), vision_unit="image_patches", context_len=4096)
    num_samples = len(counts)
    table = {
        "position": np.arange(num_samples),
        "sample_id": [f"s{i}" for i in range(num_samples)],
        "source": [f"set{i % sources}" for i in range(num_samples)],
        **{name: getattr(counts, name).astype(np.int32) for name in COUNT_COLUMNS},
        "seq_len": counts.seq_len.astype(np.int32),
        "media_bytes": np.zeros(num_samples, np.int64),
    }
    reasons = [reason for reason, count in (rejected or {}).items() for _ in range(count)]
    rows = [
        {
            "position": num_samples + i,
            "sample_id": "x",
            "source": "set0",
            "reason": reason,
            "detail": "",
        }
        for i, reason in enumerate(reasons)
    ]
    out.mkdir(exist_ok=True)
    write_table(pa.table(table, schema=COUNTS_SCHEMA), out / "counts.parquet")
    write_table(groups_table(grouping.groups, counts), out / "groups.parquet")
    write_table(pa.Table.from_pylist(rows, schema=REJECTED_SCHEMA), out / "rejected.parquet")
    (out / "limits.json").write_text(json.dumps(asdict(grouping.limits)))
    return grouping.groups, grouping.limits


VOID = {"meta", "br", "path"}


class Page(HTMLParser):
    """Checks that tags balance, and collects text and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: dict[str, list[str]] = {}
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read_page(source: str) -> Page:
    """A page's tags, attributes and text; fails if its tags do not balance."""
    page = Page()
    page.feed(source)
    page.close()
    assert page.open == []
    return page
