"""The benchmark for one GPU: its whole path at tiny size on a CPU, its layers at full size without
numbers.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu import batches, device, layers, load_data, optimizer, presets, profiles, train_run, trainer
from papers.datasets import internvl_samples
from papers.omnibal_models import PAIRS
from torch.nn import functional

from isobatch.engine.cost_model.layer_list import layers_of
from isobatch.engine.cost_model.parallel import Parallelism
from isobatch.engine.cost_model.profile_table import profiled_costs, read_profile
from isobatch.engine.runtime.cpu_memory import LiveBytes
from isobatch.models.clusters import load_cluster
from isobatch.models.presets import load_model
from support import BENCHMARKS, ranks

COMMAND = BENCHMARKS / "gpu_training.py"

TIMEOUT_S = 120
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small lose more to threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measured(
    folder: Path, command: str, *options: str, timeout: float = TIMEOUT_S
) -> tuple[dict[str, Any], str]:
    """The figures and the text that a run keeps; the text is what it prints."""
    printed = folder / "printed"
    done = ranks.launch(1, printed, COMMAND, command, "--out", folder, *options, most_s=timeout)
    assert done.returncode == 0, done.stderr
    assert "…" not in done.stdout  # nothing is cut off
    (kept,) = (
        path for path in folder.glob(f"gpu_{command}_*.json") if "profile.json" not in path.name
    )
    assert kept.with_suffix(".txt").read_text() == done.stdout
    figures = json.loads(kept.read_text())
    assert figures["command"].startswith(f"python benchmarks/gpu_training.py {command}")
    assert figures["date"] in kept.name
    return figures, done.stdout


def check_profile(figures: dict[str, Any], folder: Path, model: str) -> None:
    """Every kind of layer has figures, and the profile is one that planning takes."""
    preset = load_model(model)
    kinds = dict.fromkeys(layer.kind for layer in layers_of(preset, Parallelism()))
    assert [row["kind"] for row in figures["layers"]] == list(kinds)
    for row in figures["layers"]:
        assert min(row["measured"]["forward_ns"]) > 0
        assert min(np.add(row["measured"]["input_grad_ns"], row["measured"]["weight_grad_ns"])) > 0
    assert max(figures["layers"][-1]["measured"]["saved_bytes"]) > 0
    profile = read_profile(folder / figures["profile"])
    costs = profiled_costs(profile, profile.loads)
    assert costs.num_layers == len(layers_of(preset, Parallelism()))
    assert costs.state_bytes.min() > 0


def test_profile_measures_every_kind_of_layer_and_partitions_by_it(tmp_path):
    figures, _ = measured(tmp_path, "profile", "--tiny", "--models", "1")
    check_profile(figures, tmp_path, presets.INTERNVL)
    assert [row["name"] for row in figures["table_9"]] == ["6B + Llama3-8B"]
    for row in figures["table_9"]:
        assert sum(row["measured"]) == sum(row["modelled"]) == sum(row["paper"])
        # nothing is faster on measured layers than what the search finds on them
        assert row["paper_ratio"] >= 0.9999
        assert row["modelled_ratio"] >= 0.9999
    for by in ("measured layers", "the analytical model"):
        methods = figures[f"table_4, {by}"]
        assert [row["name"] for row in methods][:4] == [
            "parameter-based",
            "layer-based",
            "profile-based",
            "BMP",
        ]
    assert figures["table_4, measured layers"][3]["measured_ratio"] == 1.0


def test_train_runs_every_way_and_adaptive_recomputation_keeps_to_its_memory(tmp_path):
    options = ("--steps", "1", "--micro-batches", "2", "--rounds", "1", "--budgets", "0.5")
    figures, text = measured(tmp_path, "train", "--tiny", *options)
    padded, packed, adaptive, nothing = figures["ways"]
    recomputed = [sum(way["recomputed"].values()) for way in (padded, packed, adaptive, nothing)]
    assert recomputed[0] == recomputed[1] > recomputed[2] > recomputed[3] == 0
    assert (
        packed["peak_bytes"]
        < adaptive["peak_bytes"]
        <= adaptive["limit_bytes"]
        < nothing["peak_bytes"]
    )
    for way in figures["ways"]:
        assert way["name"] in text
        assert len(way["passes_s"]) == len(way["losses"]) == 1
        assert 0 < way["losses"][0] < 2 * math.log(256)
        assert way["predicted_bytes"] == pytest.approx(way["peak_bytes"], rel=0.25)
        assert way["predicted_s"][0] > 0
    assert packed["tokens"] == nothing["tokens"]
    assert read_profile(tmp_path / figures["profile"]).names[0] == "patch_embedding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_runs_out_of_memory_is_a_row_and_the_next_one_runs(dtype):
    bench = replace(device.open_bench(tiny=True, cluster=None), dtype=dtype)
    preset = presets.tiny_of(presets.two_billion(), num_layers=2, tile_side=4)
    counts = presets.counts_for(internvl_samples(300), preset, tiny=True)
    sizes, options = presets.sizes_of(preset, 256, 9), argparse.Namespace(micro_batches=2, steps=1)
    random, balanced = train_run.steps_of(counts, sizes, options)
    with device.one_rank(bench.device):
        own = trainer.Trainer(preset, counts, sizes, [(random, True), (balanced, False)], bench)
        recompute = np.zeros(len(own.kinds), np.bool_)
        way = trainer.Way(name="packed", steps=balanced, padded=False, recompute=recompute)
        with LiveBytes(limit_bytes=1 << 21):
            failed = own.run(way, 1)
        ran = own.run(way, 1)
    assert (failed.passes_s, failed.peak_bytes) == ([], None)
    assert len(ran.passes_s) == 1
    assert 0 < ran.losses[0] < 2 * math.log(256)
    assert ran.predicted_bytes == pytest.approx(ran.peak_bytes, rel=0.25)
    row = train_run.row_of(failed, ran, 1e12, 1e11)
    assert "out of memory" in row
    assert len(row) == len(train_run.row_of(ran, ran, 1e12, 1e11)) == len(train_run.HEADINGS)


def test_load_feeds_a_vlm_and_attention_kernels_agree(tmp_path):
    options = ("--samples", "12", "--seconds", "1", "--arms", "BalancedLoader, 1", "packed")
    figures, text = measured(tmp_path, "load", "--tiny", *options)
    by_borders, by_mask = figures["losses"].values()
    assert by_borders == pytest.approx(by_mask, rel=1e-6)
    assert "failed" not in figures, figures["failed"]
    assert [arm["name"] for arm in figures["arms"]] == [
        "packed by tokens",
        "BalancedLoader, 16,384",
    ]
    for arm in figures["arms"]:
        assert arm["name"] in text
        assert arm["loss"] == pytest.approx(math.log(4096), rel=0.05)


def test_groups_by_tokens_have_every_sample_once_and_keep_to_the_cap():
    tokens = np.random.default_rng(0).integers(1, 300, 500)
    groups = load_data.best_fit_decreasing(tokens, 1000)
    assert sorted(number for group in groups for number in group) == list(range(500))
    assert max(tokens[group].sum() for group in groups) <= 1000
    assert len(groups) <= 1.05 * tokens.sum() / 1000


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    done = ranks.launch(1, tmp_path / "printed", COMMAND, "profile", "--out", tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "torch sees no GPU; run this where there is one, or give --tiny to see the path run on a"
        " CPU"
    ]


@pytest.mark.parametrize(
    "pair", [None, *PAIRS], ids=lambda pair: "one GPU" if pair is None else pair.name
)
def test_layers_of_full_size_stay_on_their_device_and_give_what_specs_say(pair):
    # the device meta has shapes and dtypes, and refuses tensors of another device, but computes
    # nothing
    whole, where = (
        load_model(presets.INTERNVL if pair is None else pair.preset),
        torch.device("meta"),
    )
    preset = presets.one_of_each(presets.gpu_part(whole, 1 if pair is None else pair.tp))
    sequences = batches.Sequences.of_sizes(profiles.FULL.tiles, profiles.FULL.tokens, 256)
    batch = batches.make_batch(sequences, preset, torch.bfloat16)
    batch = replace(batch, **{name: tensor.to(where) for name, tensor in batch.tensors().items()})
    model = layers.make_model(preset, where, torch.bfloat16)
    carry: dict[str, torch.Tensor] = {}
    for place, layer in enumerate(model.layers):
        for name, spec in (model.specs(place, batch) if place else {}).items():
            assert (spec.shape, spec.dtype) == (tuple(carry[name].shape), carry[name].dtype)
        carry = layer(carry, batch)
    assert (carry["loss"].shape, carry["loss"].dtype) == ((), torch.float32)
    carry["loss"].backward()
    for layer in model.layers:
        assert all(
            weight.grad is not None and weight.dtype == torch.bfloat16
            for weight in layer.parameters()
        )


def test_layers_have_as_many_parameters_as_the_planner_counts():
    for preset in (
        presets.two_billion(),
        presets.gpu_part(load_model("eva_clip_1b_internlm2_20b"), 2),
    ):
        model = layers.make_model(presets.one_of_each(preset), torch.device("meta"), torch.bfloat16)
        counted = layers_of(presets.one_of_each(preset), Parallelism())
        for layer, own in zip(model.layers[1:], counted[1:], strict=True):
            # biases and some norms are not counted; nor, in the embedding of patches, class token
            # and positions
            assert sum(weight.numel() for weight in layer.parameters()) == pytest.approx(
                own.num_params, rel=0.002
            )


def test_the_model_has_two_billion_parameters():
    counted = layers_of(presets.two_billion(), Parallelism())
    assert sum(layer.num_params for layer in counted) == pytest.approx(2e9, rel=0.05)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[4, 4, 4], [5, 1, 6]])
def test_attention_stays_inside_sequences(lengths, causal):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(12, heads, 8, generator=generator) for heads in (4, 2, 2))
    made = layers.attend(query, key, value, lengths, causal=causal)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    sees = ids[:, None] == ids
    if causal:
        sees &= torch.ones(12, 12, dtype=torch.bool).tril()
    scores = torch.einsum("ihd,jhd->hij", query, key.repeat_interleave(2, dim=1)) / math.sqrt(8)
    shares = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    wanted = torch.einsum("hij,jhd->ihd", shares, value.repeat_interleave(2, dim=1)).flatten(1)
    torch.testing.assert_close(made, wanted)


def test_padding_and_packing_change_no_loss():
    preset = presets.tiny_of(presets.two_billion(), num_layers=1)
    model = layers.make_model(preset, torch.device("cpu"), torch.float32)

    def loss(tiles: list[int], tokens: list[int], lengths: list[int], ids: list[int]) -> float:
        sequences = batches.Sequences(tiles=tiles, tokens=tokens, lengths=lengths, ids=ids)
        batch, carry = batches.make_batch(sequences, preset, torch.float32), {}
        # pixels are drawn by micro-batch: give all the same ones
        batch = replace(batch, pixels=torch.ones_like(batch.pixels))
        for layer in model.layers:
            carry = layer(carry, batch)
        return float(carry["loss"])

    with torch.no_grad():
        alone = loss([2], [9], [9], [3]) + loss([1], [5], [5], [4])
        assert loss([2, 1], [9, 5], [9, 5], [3, 4]) == pytest.approx(alone, rel=1e-5)
        assert loss([2, 1], [9, 5], [9, 9], [3, 4]) == pytest.approx(alone, rel=1e-5)


def test_the_optimizer_is_adamw_and_loses_no_small_steps_in_bf16():
    torch.manual_seed(0)
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    second.load_state_dict(first.state_dict())
    small = torch.nn.Linear(3, 2).to(torch.bfloat16)
    before = small.weight.detach().clone()
    own = optimizer.MasterAdamW([first], lr=1e-2)
    plain = torch.optim.AdamW(second.parameters(), lr=1e-2)
    tiny = optimizer.MasterAdamW([small], lr=1e-5)
    inputs = torch.randn(5, 3)
    for _ in range(3):
        for layer in (first, second):
            functional.mse_loss(layer(inputs), torch.ones(5, 2)).backward()
        own.step()
        plain.step()
        plain.zero_grad()
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert one.grad is None
        torch.testing.assert_close(one, two)
    for _ in range(200):
        small.weight.grad = torch.ones_like(small.weight)
        tiny.step()
    moved = float((small.weight.float() - before.float()).mean().detach())
    assert moved == pytest.approx(-200 * 1e-5, rel=0.3)


def test_what_tensor_parallel_gpus_send_is_added_to_what_one_of_them_took():
    preset = presets.tiny_of(load_model(presets.INTERNVL), num_layers=1)
    bench = replace(device.open_bench(tiny=True, cluster=None), cluster=load_cluster("h100"))
    loads = profiles.loads_of(profiles.tiny_sizes(preset), preset)
    alone, shared = (
        profiles.sends(preset, Parallelism(tp=tp, sequence_parallel=False), bench, loads)
        for tp in (1, 2)
    )
    assert not np.any(alone)
    assert (np.array(shared)[:, 1] > 0).all()  # of the vision layer


@pytest.mark.gpu
@ON_GPU
def test_profile_on_a_gpu(tmp_path):
    figures, _ = measured(tmp_path, "profile", "--models", "1", timeout=280)
    check_profile(figures, tmp_path, presets.INTERNVL)
    limit = figures["matmul_flops_per_s"]
    vision = next(row for row in figures["layers"] if row["kind"] == "vision_layer")
    flops = profiles.layer_flops(
        load_model(presets.INTERNVL),
        profiles.loads_of(profiles.SIZES, load_model(presets.INTERNVL)),
    )
    speeds = flops["vision_layer"] / np.array(vision["measured"]["forward_ns"]) * 1e9
    assert (speeds < 1.05 * limit).all()  # else something was not waited for


@pytest.mark.gpu
@ON_GPU
def test_train_on_a_gpu(tmp_path):
    options = ("--steps", "1", "--micro-batches", "2", "--rounds", "1", "--budgets", "0.5")
    figures, _ = measured(tmp_path, "train", *options, timeout=280)
    _, packed, adaptive, nothing = figures["ways"]
    assert (
        packed["peak_bytes"]
        < adaptive["peak_bytes"]
        <= adaptive["limit_bytes"]
        < nothing["peak_bytes"]
    )
    for way in figures["ways"]:
        assert all(map(math.isfinite, way["losses"]))
        assert way["predicted_bytes"] == pytest.approx(way["peak_bytes"], rel=0.25)
