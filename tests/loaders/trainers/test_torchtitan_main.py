"""TorchTitan's main branch, as pinned: it is not on PyPI, and was not run.

Read in September 2026's `torchtitan/components/data/loader.py` and `types.py` (commit dcaa2828) and
`hf_datasets/multimodal/mm_collator.py` (0fe24f63, whose microbatch counts labels by other names).
Modules with their signatures stand for them here. Version 0.3 is run by `test_torchtitan.py`.
"""

import importlib
import json
import sys
from collections import Counter
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from isobatch.common.errors import ConfigError
from isobatch.loaders import StreamingLoader, packed_batch

pytest.importorskip("transformers")

from support.frameworks.veomni.data import write_packed

TOKENS, CONTEXT = 192, 160
FIELDS = {
    "input": (torch.int64, (TOKENS,)),
    "labels": (torch.int64, (TOKENS,)),
    "positions": (torch.int64, (TOKENS,)),
    "padding_mask": (torch.bool, (TOKENS,)),
}
"""Of a microbatch, next to `num_valid_tokens`, an int, and `model_kwargs`."""
KWARGS = {
    "pixel_values": (torch.float32, ("patches", "values")),
    "grid_thw": (torch.int64, ("images", 3)),
    "pixel_values_videos": None,
    "grid_thw_videos": None,
    "special_tokens": {"image_id", "video_id"},
    "mrope_positions": (torch.int64, (TOKENS, 3)),
}
COUNTS = {
    "dcaa2828": "num_valid_tokens: int",
    "0fe24f63": "loss_token_counts: torch.Tensor\n    routing_token_counts: torch.Tensor",
}
TYPES = """
from dataclasses import dataclass, field
from typing import Any
import torch

@dataclass(kw_only=True, slots=True)
class TokenizedTrainingMicrobatch:
    input: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    padding_mask: torch.Tensor
    COUNTS
    model_kwargs: dict[str, Any] = field(default_factory=dict)
"""
LOADER = """
from abc import ABC, abstractmethod
from dataclasses import dataclass

class BaseDataLoader(ABC):
    max_num_documents: int | None = None

    @dataclass(kw_only=True, slots=True)
    class Config:
        max_num_documents: int | None = None

        def __post_init__(self):
            assert self.max_num_documents is None or self.max_num_documents > 0

    @abstractmethod
    def __iter__(self): ...

    def close(self): ...
"""
MODULES = "torchtitan", "tyro", "isobatch.loaders.integrations.torchtitan"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Images and texts for Qwen2.5-VL, as records and packed."""
    folder = tmp_path_factory.mktemp("main")
    records, config = write_packed(folder, 40)
    return SimpleNamespace(
        folder=folder, records=records, config=config, model=str(folder / "model")
    )


@pytest.fixture
def adapter_of(tmp_path, monkeypatch):
    """The adapter, imported where TorchTitan is main with these fields of counts."""

    def forget():
        for name in [name for name in sys.modules if name.startswith(MODULES)]:
            del sys.modules[name]

    def imported(counts):
        folder = tmp_path / "torchtitan" / "components" / "data"
        folder.mkdir(parents=True)
        for place in (folder, *folder.parents[:2]):
            (place / "__init__.py").touch()
        (folder / "types.py").write_text(TYPES.replace("COUNTS", counts))
        (folder / "loader.py").write_text(LOADER)
        suppress = "class conf:\n    class Suppress: ..."
        (tmp_path / "tyro.py").write_text(suppress)
        monkeypatch.syspath_prepend(str(tmp_path))
        return importlib.import_module("isobatch.loaders.integrations.torchtitan")

    forget()
    yield imported
    forget()


def made(adapter, config, rank=0, ranks=1, **more):
    """As main's trainer builds it."""
    given = {"dp_world_size": ranks, "dp_rank": rank, "tokenizer": None}
    given |= {"max_context_length": CONTEXT, "num_tokens_per_microbatch": TOKENS}
    return adapter.BalancedDataLoader(config, **given | more)


def configs(adapter, data, **more):
    """Of the build, and of the records without one."""
    kind = adapter.BalancedDataLoader.Config
    options = {"max_tokens": CONTEXT, "data_root": data.folder / "raw"}
    return [
        kind(dataset_path=str(data.folder / "packed"), model=data.model, epochs=1, **more),
        kind(records=data.records, model=data.model, epochs=1, options=options, **more),
    ]


def shape_of(values):
    return {
        name: (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


@pytest.mark.parametrize("version", COUNTS)
@pytest.mark.parametrize("number", [0, 1])
def test_microbatches_have_the_pinned_fields(data, adapter_of, version, number):
    adapter = adapter_of(COUNTS[version])
    config = configs(adapter, data)[number]
    loading = made(adapter, config)
    steps = [batch for step in made(adapter, config).loader for batch in step]
    ours = list(loading)
    assert len(ours) == len(steps) > 5
    for microbatch, batch in zip(ours, steps, strict=True):
        values = {part.name: getattr(microbatch, part.name) for part in fields(microbatch)}
        kwargs, row = values.pop("model_kwargs"), packed_batch(batch, data.config)
        counts = {name: values.pop(name) for name in list(values) if name not in FIELDS}
        assert shape_of(values) == FIELDS
        num_labels, num_tokens = int((values["labels"] != -100).sum()), row.num_tokens
        assert num_labels == batch.num_loss_tokens > 0
        if version == "dcaa2828":
            assert counts == {"num_valid_tokens": num_labels}
        else:
            assert counts["loss_token_counts"] == num_labels
            assert counts["routing_token_counts"].tolist() == [num_tokens]
        check_row(values, kwargs, row)
        check_media(kwargs, row)
    loading.close()
    json.dumps(loading.state_dict())


def check_row(values, kwargs, row):
    """The samples, and then padding whose positions begin again after the longest context."""
    size = row.num_tokens
    assert torch.equal(values["input"][:size], row.input_ids)
    assert torch.equal(values["labels"][:size], row.labels)
    assert torch.equal(values["positions"][:size], row.position_ids)
    assert torch.equal(kwargs["mrope_positions"][:size], row.mrope_positions.T)
    assert not values["padding_mask"][:size].any()
    assert values["padding_mask"][size:].all()
    assert (values["labels"][size:] == -100).all()
    padding = torch.arange(TOKENS - size) % CONTEXT
    assert torch.equal(values["positions"][size:], padding)
    assert torch.equal(kwargs["mrope_positions"][size:], padding[:, None].expand(-1, 3))


def check_media(kwargs, row):
    """Patches of all images in one table, of as many rows as their grids say."""
    assert kwargs.keys() == KWARGS.keys()
    for name, pinned in KWARGS.items():
        if pinned is None:
            assert kwargs[name] is None
        elif isinstance(pinned, set):
            assert kwargs[name].keys() == pinned
        else:
            assert kwargs[name].dtype == pinned[0]
            assert kwargs[name].dim() == len(pinned[1])
            assert kwargs[name].shape[1] == pinned[1][1] or pinned[1][1] == "values"
    assert torch.equal(kwargs["pixel_values"], row.media["pixel_values"])
    assert torch.equal(kwargs["grid_thw"], row.media["image_grid_thw"])
    assert len(kwargs["pixel_values"]) == int(kwargs["grid_thw"].prod(dim=1).sum())


def test_a_padding_longer_than_the_context_begins_again(data, adapter_of):
    adapter = adapter_of(COUNTS["dcaa2828"])
    batch = next(
        batch for step in StreamingLoader(data.folder / "packed", shuffle=False) for batch in step
    )
    size = packed_batch(batch, data.config).num_tokens
    longest = int(batch.cu_seqlens.diff().max())
    special = {"image_id": 1, "video_id": 2}
    options = {"num_tokens": size + 2 * longest + 1, "special": special}
    values = adapter.titan_microbatch(batch, data.config, max_context=longest, **options)
    starts = (values["positions"][size:] == 0).nonzero().ravel().tolist()
    assert starts == [0, longest, 2 * longest]
    assert values["positions"].max() == longest - 1


@pytest.mark.parametrize("number", [0, 1])
def test_epochs_end_on_all_ranks_and_a_state_resumes_on_another_number(data, adapter_of, number):
    adapter = adapter_of(COUNTS["dcaa2828"])
    config = configs(adapter, data)[number]

    def rows(loading, count=None):
        found = []
        for microbatch in loading:
            found.append(tuple(microbatch.input[~microbatch.padding_mask].tolist()))
            if len(found) == count:
                break
        return found

    assert len({len(rows(made(adapter, config, rank, 2))) for rank in range(2)}) == 1
    begun = [made(adapter, config, rank, 2) for rank in range(2)]
    taken = [row for loading in begun for row in rows(loading, 2)]
    states = [loading.state_dict() for loading in begun]
    assert states[0] == states[1]
    for rank in range(3):
        loading = made(adapter, config, rank, 3)
        loading.load_state_dict(states[0])
        taken += rows(loading)
    whole = rows(made(adapter, config))
    # that a blank image has no answer, and each sample one
    counts, found = (Counter(token for row in part for token in row) for part in (whole, taken))
    answers = [token for token, count in counts.items() if count == len(data.records)]
    assert answers
    assert all(found[token] == counts[token] for token in answers)


def test_what_main_does_not_take_is_one_line(data, adapter_of):
    adapter = adapter_of(COUNTS["dcaa2828"])
    config = configs(adapter, data)[0]
    with pytest.raises(
        ConfigError, match=r"a sample has .* more than max_context_length 20; raise"
    ):
        next(iter(made(adapter, config, max_context_length=20)))
    few = configs(adapter, data, max_num_documents=1)[0]
    assert made(adapter, few).max_num_documents == 1
    with pytest.raises(ConfigError, match="samples, blank ones among them, more than max_num_doc"):
        list(made(adapter, few))
    with pytest.raises(ConfigError, match="more than pad_total_to 40"):
        list(made(adapter, config, num_tokens_per_microbatch=40))
    with pytest.raises(ConfigError, match=r"not known here: install 0\.3\.0, or main"):
        made(adapter, config, num_mtp_layers=1)


def test_another_main_is_one_line(data, adapter_of):
    adapter = adapter_of("labels_by_depth: list")
    message = r"not known here: install 0\.3\.0, or main .* it has fields \[.*'labels_by_depth'"
    with pytest.raises(ConfigError, match=message):
        made(adapter, configs(adapter, data)[0])
