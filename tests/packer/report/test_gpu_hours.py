"""Predicted GPU hours against plain loops, what is assumed, and the example of docs/pack.md."""

import io
import re

import numpy as np
import pytest
from rich.console import Console

from isobatch.balance.baseline_samplers import BASELINES, packed_batches
from isobatch.balance.grouping.caps import GroupOptions
from isobatch.balance.order.step_order import epoch_steps
from isobatch.common.errors import ConfigError
from isobatch.models.clusters import load_cluster
from isobatch.models.presets import load_model
from isobatch.packer.group import group_counts
from isobatch.packer.report.gpu_hours import GpuQuestion, PackedEpoch, predict_hours
from isobatch.packer.report.terminal import print_hours
from support import ROOT
from support.builds.report_data import make_counts

MODEL = "internvl_1_5"


def packed_epoch(num_samples, dp, num_packed=None, seed=0):
    counts = make_counts(num_samples, seed=seed)
    grouped = group_counts(counts, GroupOptions(), vision_unit="image_patches", context_len=4096)
    loads = grouped.groups.sum(counts.num_image_patches), grouped.groups.sum(counts.seq_len)
    order = epoch_steps(loads, (dp, 1), seed=seed).transpose(0, 2, 1).ravel()
    return PackedEpoch(
        counts=counts,
        groups=grouped.groups.take(order[order >= 0]),
        limits=grouped.limits,
        dp=dp,
        seed=seed,
        num_packed=num_packed or num_samples,
    )


def plain_hours(epoch, batches, *, padded, flops_per_s):
    """GPU hours, waiting and padding of batches in order, written out."""
    preset = load_model(MODEL)
    vit, llm = preset.dimensions
    patches, seq_len = epoch.counts.num_image_patches.tolist(), epoch.counts.seq_len.tolist()
    embedded = 1024 / 1025
    vit_weights = vit.num_layers * vit.layer_weights + embedded * (
        vit.patch_values * vit.hidden_size
    )
    vit_weights += vit.merged_share(embedded) * vit.projector_weights
    llm_weights = llm.num_layers * llm.layer_weights + llm.vocab_size * llm.hidden_size

    def flops(batch, tokens):
        tiles = sum(patches[s] for s in batch)
        vision = 2 * vit_weights * tiles * 1025
        vision += 4 * vit.num_layers * vit.attention_size * tiles * 1025**2
        squares = sum(seq_len[s] ** 2 for s in batch)
        text = 2 * llm_weights * tokens + 2 * llm.num_layers * llm.attention_size * squares
        return 3 * (vision + text)

    real = [flops(batch, sum(seq_len[s] for s in batch)) for batch in batches]
    spent = [
        flops(batch, max(seq_len[s] for s in batch) * len(batch)) if padded else done
        for batch, done in zip(batches, real, strict=True)
    ]
    whole = len(batches) // epoch.dp * epoch.dp
    steps = [spent[start : start + epoch.dp] for start in range(0, whole, epoch.dp)]
    paid = sum(max(step) for step in steps) * epoch.dp
    scale = sum(flops([s], seq_len[s]) for s in range(len(seq_len))) / sum(real[:whole])
    return (
        paid * scale / flops_per_s / 3600,
        1 - sum(spent[:whole]) / paid,
        1 - sum(real[:whole]) / sum(spent[:whole]),
    )


@pytest.mark.parametrize("dp", [1, 4])
def test_hours_equal_the_definition_for_every_method(dp):
    epoch = packed_epoch(700, dp)
    question = GpuQuestion(gpu="h100", num_gpus=2 * dp, mfu=0.4)
    hours = predict_hours(question, load_model(MODEL), epoch)
    flops_per_s = load_cluster("h100").peak_flops_per_s * 0.4
    seq_len = epoch.counts.seq_len
    size = round(700 / len(epoch.groups))
    expected = {}
    for name, sampler in BASELINES.items():
        tried = [
            plain_hours(
                epoch,
                sampler(seq_len, dp, number, 0).reshape(-1, number).tolist(),
                padded=True,
                flops_per_s=flops_per_s,
            )
            for number in (4, size)
        ]
        expected[name] = min(tried)
    packed = packed_batches(seq_len, epoch.limits.max_seq_len, 0)
    for name, groups in (("packed", packed), ("ours", epoch.groups)):
        batches = [groups[i].tolist() for i in range(len(groups))]
        expected[name] = plain_hours(epoch, batches, padded=False, flops_per_s=flops_per_s)
    assert list(hours.methods) == [*BASELINES, "packed", "ours"]
    for name, values in expected.items():
        method = hours.methods[name]
        predicted = (method.gpu_hours, method.waiting, method.padding)
        assert predicted == pytest.approx(values, rel=1e-9, abs=1e-12), name
    others = {name: values[0] for name, values in expected.items() if name != "ours"}
    assert hours.baseline == min(others, key=others.__getitem__)
    saved = min(others.values()) - expected["ours"][0]
    assert hours.saved_hours == pytest.approx(saved, rel=1e-6)
    assert hours.saved_share == pytest.approx(saved / min(others.values()), rel=1e-6)


def test_hours_go_by_the_share_of_the_peak_and_the_whole_builds_samples():
    model, epoch = load_model(MODEL), packed_epoch(400, 4)
    half, full = (
        predict_hours(GpuQuestion(gpu="h100", num_gpus=8, mfu=mfu), model, epoch)
        for mfu in (0.5, 1.0)
    )
    larger = predict_hours(
        GpuQuestion(gpu="h100", num_gpus=4), model, packed_epoch(400, 4, num_packed=4_000)
    )
    for name, method in half.methods.items():
        assert method.gpu_hours == pytest.approx(2 * full.methods[name].gpu_hours)
        assert larger.methods[name].gpu_hours == pytest.approx(10 * method.gpu_hours)


def test_a_build_that_takes_longer_is_said_to_take_longer():
    epoch = packed_epoch(400, 4)
    singles = type(epoch.groups)(np.arange(400), np.arange(401))
    alone = PackedEpoch(**{**fields_of(epoch), "groups": singles})
    question = GpuQuestion(gpu="h100", num_gpus=4, price=2.0)
    hours = predict_hours(question, load_model(MODEL), alone)
    assert hours.saved_hours < 0
    said = printed(hours)
    assert re.search(r"takes (< )?[\d.]+ GPU hours more .*against length-group, the", said)
    assert "saves" not in said


def fields_of(value):
    return {name: getattr(value, name) for name in value.__slots__}


def test_a_question_that_cannot_be_answered_is_one_line():
    epoch, model = packed_epoch(100, 4), load_model(MODEL)
    question = GpuQuestion(gpu="h100", num_gpus=8)
    for make, words in (
        (lambda: GpuQuestion(gpu="h100", num_gpus=0), "--gpus is 0"),
        (lambda: GpuQuestion(gpu="h100", num_gpus=1, mfu=1.5), "--mfu is 1.5"),
        (lambda: predict_hours(GpuQuestion(gpu="h100", num_gpus=6), model, epoch), "multiple of"),
        (lambda: predict_hours(GpuQuestion(gpu="h101", num_gpus=4), model, epoch), "mean h100"),
        (lambda: predict_hours(question, None, epoch), "lengths alone has none of"),
    ):
        with pytest.raises(ConfigError, match=words) as error:
            make()
        assert "\n" not in str(error.value)


def test_trainers_packing_keeps_the_order_drawn_and_cuts_only_where_it_must():
    rng = np.random.default_rng(1)
    for cap in (1, 7, 50, 10_000):
        lengths = rng.integers(1, 40, 500)
        groups = packed_batches(lengths, cap, seed=3)
        assert groups.samples.tolist() == np.random.default_rng(3).permutation(500).tolist()
        batches = [groups[i] for i in range(len(groups))]
        sums = [int(lengths[batch].sum()) for batch in batches]
        assert all(total <= cap or len(b) == 1 for total, b in zip(sums, batches, strict=True))
        # each cut was needed: the next batch's first sample would not have fitted
        following = [int(lengths[batch[0]]) for batch in batches[1:]]
        assert all(a + b > cap for a, b in zip(sums[:-1], following, strict=True))
    assert len(packed_batches(np.array([], np.int64), 5, seed=0)) == 0


def printed(hours, width=200):
    text = io.StringIO()
    print_hours(hours, Console(file=text, width=width))
    return text.getvalue()


def test_the_example_of_the_page_is_what_is_printed():
    question = GpuQuestion(gpu="h100", num_gpus=64, price=2.5)
    epoch = packed_epoch(20_000, 64, num_packed=1_000_000)
    hours = predict_hours(question, load_model(MODEL), epoch)
    said = printed(hours, width=100).splitlines()
    page = (ROOT / "docs" / "pack.md").read_text("utf-8")
    block = page.partition("\npredicted: ")[2].partition("```")[0]
    *sentence, _, _, _, _, _, _, _, _, _ = block.splitlines()
    assert f"predicted: {' '.join(sentence)}" == said[0]
    table = [line.rstrip() for line in said if not line.startswith("predicted")][:9]
    assert [line.rstrip() for line in block.splitlines()[-9:]] == table
