"""Schedules, counts and figures of every trainer on two ranks, and what must not be prepared."""

import importlib.util
import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from isobatch.loaders import BalancedLoader, Encoded, StreamingLoader, model_inputs, shift_labels
from support import TESTS
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples
from support.loading.evaluations import each_alone
from support.loading.online_data import OPTIONS, records
from support.ranks import launch

# only its ranks import them: that takes seconds in each process that runs tests
NEEDED = ("accelerate", "lightning", "peft", "transformers", "trl")
if lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
    pytest.skip(f"not installed: {', '.join(lacking)}", allow_module_level=True)

RATE, EPOCHS, RECORDS = 1e-3, 3, 60
NUM_GROUPS = 5
"""Of 2 ranks x 2 micro-batches: in the last step's second round no rank has a sample."""

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    groups = group_samples(make_samples(40))
    picked = [*groups[:2], *groups[2 - NUM_GROUPS :]]
    return write_tabled(tmp_path_factory.mktemp("packed") / "build", picked)


@pytest.fixture(scope="module")
def said(build, shared):
    """What each rank has said, and the folder of the records."""

    def train(out):
        rows = records(out, RECORDS)
        (out / "rows.json").write_text(json.dumps(rows))
        script = TESTS / "support" / "trainers" / "edge_ranks.py"
        result = launch(2, out / "log", script, out, build, most_s=300)
        assert result.returncode == 0, result.stderr[-3000:]

    folder = shared("trainer-edges", train)
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def assert_ends_with_the_run(rates, warmup=0):
    """A cosine to 0 from the first step's rate on, which is 0 after the last step alone."""
    assert rates[warmup] == pytest.approx(RATE, rel=0.05)
    falling = rates[warmup:]
    assert all(later < earlier for earlier, later in pairwise(falling))
    assert falling[-2] > 0
    assert falling[-1] == pytest.approx(0, abs=1e-9)


def test_schedules_end_with_the_run_on_all_ranks_and_after_a_resume(said):
    _, ranks = said
    for name, warmup in (("sft", 2), ("lightning", 0), ("accelerate", 0)):
        assert ranks[0][name] == ranks[1][name], name
        assert_ends_with_the_run(ranks[0][name], warmup)
    assert ranks[0]["trainer"] == ranks[1]["trainer"]
    late, early = ranks[0]["trainer"]
    for (whole, _, steps, _), (resumed, *_) in (late, early):
        assert_ends_with_the_run(whole, warmup=2)
        assert len(whole) == steps + 1
        assert resumed == whole[4:]
    # as the first window had it
    (_, _, steps, estimate), _ = late
    assert steps > estimate
    (_, _, steps, estimate), _ = early
    assert steps < estimate


def test_tokens_seen_are_those_of_the_samples(said):
    folder, ranks = said
    rows = json.loads((folder / "rows.json").read_text())
    alone = each_alone(rows, OPTIONS | {"data_root": str(folder)})
    expected = EPOCHS * sum(len(batch.input_ids) for batch in alone)
    for whole, resumed in ranks[0]["trainer"]:
        assert (whole[1], resumed[1]) == (expected, expected)


def test_figures_of_trl_are_those_of_the_samples_without_empty_rounds(said, build):
    from tiny_internvl import make_internvl  # noqa: PLC0415  imports transformers

    _, ranks = said
    options = {"dp_world_size": 2, "micro_batches_per_step": 2, "check_ranks": False}
    loaders = [StreamingLoader(build, dp_rank=rank, **options) for rank in range(2)]
    model, expected, num_empty = make_internvl(loaders[0]).eval(), [], 0
    for step in zip(*loaders, strict=True):
        rounds = [figures_of(model, batches) for batches in zip(*step, strict=True)]
        means = [each for each in rounds if each is not None]
        num_empty += len(rounds) - len(means)
        expected.append(torch.tensor(means).mean(dim=0).tolist())
    assert num_empty == 1
    assert ranks[0]["figures"] == ranks[1]["figures"]
    for found, wanted in zip(ranks[0]["figures"], expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-3)


def figures_of(model, batches):
    """Mean entropy and accuracy over the labels of a round; None without any."""
    entropies, hits = [], []
    for batch in batches:
        if not batch.num_samples:
            continue
        inputs = model_inputs(batch, model.config, with_labels=False)
        with torch.no_grad():
            logits = model(**inputs).logits[0, : len(batch.labels)]
        labels = shift_labels(batch.labels, batch.cu_seqlens)
        chosen = logits[labels != -100].log_softmax(dim=-1)
        entropies.append(-(chosen.exp() * chosen).sum(dim=-1))
        hits.append(chosen.argmax(dim=-1) == labels[labels != -100])
    if not sum(map(len, hits)):
        return None
    return float(torch.cat(entropies).mean()), float(torch.cat(hits).float().mean())


def test_what_accelerate_would_spoil_is_refused_at_once_on_all_ranks(said):
    for rank in said[1]:
        wrong = rank["wrong"]
        assert max(seconds for name, (_, seconds) in wrong.items() if name != "evaluated") < 20
        for name in ("dispatched", "sharded"):
            assert wrong[name][0].startswith("prepare of Accelerate"), name
            assert wrong[name][0].endswith("or give prepare the loader itself, which it passes on")
        for name in ("accumulated", "worker"):
            assert wrong[name][0].startswith("Accelerator has gradient_accumulation_steps=2"), name
        assert wrong["evaluated"][0] > 0


@pytest.mark.parametrize("packing", [True, False])
def test_tokens_seen_of_every_family_are_those_of_the_samples(tmp_path, packing):
    from support.models.family_models import FAMILIES  # noqa: PLC0415  imports transformers

    linear = {"qwen3_5", "qwen3_5_moe", "minicpmv4_6"} if packing else set()
    lengths = [5 + 3 * number for number in range(8)]
    for name in sorted(FAMILIES.keys() - linear):
        assert tokens_seen(name, lengths, tmp_path, packing, "non_padding") == sum(lengths), name
        seen = tokens_seen(name, lengths, tmp_path, packing, "all")
        assert (seen == sum(lengths)) if packing else (seen > sum(lengths)), name


def tokens_seen(name, lengths, out, packing, kind):
    """Of an epoch with a model of the family, on samples of text."""
    from transformers import TrainingArguments  # noqa: PLC0415

    from isobatch.loaders.integrations.hf_trainer import BalancedTrainer  # noqa: PLC0415
    from support.models.family_models import FAMILIES, make_family_model  # noqa: PLC0415

    model, row = make_family_model(name), FAMILIES[name].empty_row
    media = {"processed": None, "pixel_values": torch.zeros(0, *row)}
    if len(row) == 1:
        media["image_grid_thw"] = torch.zeros(0, 3, dtype=torch.long)
    if FAMILIES[name].frames:
        none = torch.zeros(0, dtype=torch.long)
        media |= {"audio_values": torch.zeros(0, 8), "audio_frames": none, "audio_lengths": none}
    loader = BalancedLoader(
        lengths,
        encode=lambda length: Encoded([10 + place % 50 for place in range(length)]),
        max_tokens=60,
        packing=packing,
        micro_batches_per_step=2,
    )
    args = TrainingArguments(
        out,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        num_train_epochs=1,
        gradient_accumulation_steps=2,
        save_strategy="no",
        include_num_input_tokens_seen=kind,
    )
    trainer = BalancedTrainer(
        model=model,
        args=args,
        train_dataset=loader,
        to_inputs=lambda batch: model_inputs(replace(batch, **media), model.config),
    )
    trainer.train()
    return trainer.state.num_input_tokens_seen
