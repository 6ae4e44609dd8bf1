"""OrchMLLM's dispatching from packed shards to gradients: two ranks next to one process."""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

import isobatch.loaders.batch.collate
from isobatch.balance.metrics import dist_ratio
from isobatch.balance.steps.step_planner import ENCODERS
from isobatch.common.errors import ConfigError
from isobatch.engine.dispatching.dispatch import PHASES
from isobatch.engine.runtime.errors import PeerLost
from isobatch.loaders import StreamingLoader
from support.builds.audio_build import KINDS, PER_KIND, build_heard
from support.builds.sample_tables import path_groups, text_samples, write_tabled
from support.models.tiny_three_modalities import make_three_modalities
from support.ranks import on_ranks
from support.trainers.dispatched_training import (
    BALANCE,
    accumulate,
    gather,
    make_run,
    sum_over_ranks,
    train,
)

RANKS, MICRO_BATCHES, SEED = 2, 2, 3
BALANCES = ("none", "encoders", "all")
TOLERANCE = 1e-6
"""Of losses and of each part's gradients, relative to their size; float32."""
TRAINED_TOLERANCE = 1e-4
"""Of losses after several steps of AdamW, which makes much of small differences."""

torch.set_num_threads(1)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A step in one process."""

    weights: dict[str, torch.Tensor]
    """With which it began."""
    loss: float
    gradients: dict[str, torch.Tensor]
    """By part of the model, as one vector: single ones may be sums that cancel out."""


@pytest.fixture(scope="module")
def told(shared):
    """By rank, what it found."""
    folder = shared(
        "dispatched-training",
        lambda folder: on_ranks(RANKS, folder, _run_all, folder, str(build_heard(folder))),
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_one_process_in_every_step_of_an_epoch(told):
    for rank in told:
        for balance in BALANCES:
            offs = rank[balance]["off"]
            assert len(offs) >= 5
            assert all(set(off) == {"loss", "vision", "audio", "language"} for off in offs)
            assert max(max(off.values()) for off in offs) <= TOLERANCE, (balance, offs)


def test_every_image_and_clip_is_decoded_once_where_it_is_encoded(told):
    for balance in BALANCES:
        for name in ENCODERS:
            every = Counter(file for rank in told for file in rank[balance]["decoded"][name])
            assert set(every.values()) == {1}
            assert len(every) == told[0]["files"][name]
            for rank in told:
                assert len(rank[balance]["decoded"][name]) == rank[balance]["encoded"][name] > 0
    for balance in BALANCES:
        assert all(
            (rank[balance]["rows beside tokens"] == 0) == (balance != "none") for rank in told
        )
    # a file counts where it is used, so no byte is used twice
    used = {balance: sum(rank[balance]["bytes"] for rank in told) for balance in BALANCES}
    assert used["all"] == used["encoders"] == used["none"]


def test_samples_of_all_kinds_are_trained_once_and_features_of_both_encoders_travel(told):
    expected = {f"{kind}-{number}" for kind in KINDS for number in range(PER_KIND)}
    steps = {
        balance: [[set(step) for step in rank[balance]["ids"]] for rank in told]
        for balance in BALANCES
    }
    for ranks in steps.values():
        assert sorted(name for rank in ranks for step in rank for name in step) == sorted(expected)
    # the same samples in the same steps, but not always on the same ranks
    joined = {
        balance: [set.union(*step) for step in zip(*ranks, strict=True)]
        for balance, ranks in steps.items()
    }
    assert joined["all"] == joined["encoders"] == joined["none"]
    assert steps["all"] != steps["encoders"] == steps["none"]
    for name in ENCODERS:
        for balance in ("encoders", "all"):
            assert sum(rank[balance]["sent"][name] for rank in told) > 0


def test_every_phase_is_less_uneven_than_without_balancing(told):
    for place, name in enumerate(PHASES):
        # (rounds, ranks, phases)
        works = {balance: np.array(told[0][balance]["work"])[..., place] for balance in BALANCES}
        uneven = {balance: dist_ratio(loads.ravel(), RANKS) for balance, loads in works.items()}
        assert works["none"].sum() == works["encoders"].sum() == works["all"].sum() > 0
        # the epoch's last step has a round without any work
        assert all((loads.sum(axis=1) == 0).any() for loads in works.values())
        # steps whose groups are alike already leave little to do
        most = max(0.75 * uneven["none"], 0.065)
        assert uneven["all"] < most, (name, uneven)
        if name == "llm":
            assert works["encoders"].tolist() == works["none"].tolist()
        else:
            assert uneven["encoders"] < most, (name, uneven)


def test_training_goes_the_same_way_into_the_next_epoch(told):
    none, *others = (np.array(told[0]["trained"][balance]) for balance in BALANCES)
    assert len(none) > len(told[0]["all"]["off"])
    for other in others:
        np.testing.assert_allclose(other, none, rtol=TRAINED_TOLERANCE)
    assert none[-1] < none[0]


def test_a_rank_whose_peer_has_gone_says_so_in_one_line(told):
    assert told[0]["lost"].startswith("rank 0 stops: rank 1 does not answer any more")
    assert "\n" not in told[0]["lost"]


def test_a_build_for_a_model_without_an_audio_encoder_is_refused_in_one_line(tmp_path):
    build = write_tabled(tmp_path / "build", path_groups(text_samples(20)))
    loader = StreamingLoader(build, dp_rank=0, dp_world_size=1)
    with pytest.raises(ConfigError) as caught:
        make_three_modalities(loader)
    assert str(caught.value) == "the build is for the model tiny; build it with --model tiny_audio"


def _run_all(folder, build):
    expected = _one_process(build)
    said = {balance: _epoch(build, balance, expected) for balance in BALANCES}
    said["files"] = _files(build)
    steps = len(expected) + 2
    said["trained"] = {balance: train(_run(build, balance), steps) for balance in BALANCES}
    if dist.get_rank() == 0:
        run = _run(build, "all", check_ranks=False)  # its peer does not even begin
        with pytest.raises(PeerLost) as caught:
            train(run, steps)
        said["lost"] = str(caught.value)
        run.loader.close()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(said))


def _run(build, balance, **options):
    return make_run(build, balance, seed=SEED, micro_batches=MICRO_BATCHES, **options)


def _one_process(build):
    """All ranks' micro-batches, one after the other, with whatever comes with them; plain steps of
    SGD.
    """
    given = {
        "dp_world_size": RANKS,
        "micro_batches_per_step": MICRO_BATCHES,
        "seed": SEED,
        "audio": "features",
        "balance": BALANCE,
        "check_ranks": False,
    }
    ranks = [StreamingLoader(build, dp_rank=rank, **given) for rank in range(RANKS)]
    torch.manual_seed(SEED)
    model = make_three_modalities(ranks[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for steps in zip(*ranks, strict=True):
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        optimizer.zero_grad()
        total = 0.0
        for batch in (batch for step in steps for batch in step):
            features = {name: model[name](batch) for name in ENCODERS}
            loss = model["language"](batch, features) / batch.num_loss_tokens
            loss.backward()
            total += loss.item()
        expected.append(Expected(weights=weights, loss=total, gradients=_gradients(model)))
        optimizer.step()
    return expected


def _gradients(model):
    return {
        name: torch.cat([weight.grad.flatten() for weight in part.parameters()])
        for name, part in model.items()
    }


def _epoch(build, balance, expected):
    """An epoch of the example's steps, each from the weights of one process; -> what there is to
    tell of it.
    """
    run = _run(build, balance)
    offs, works, ids, beside = [], [], [], 0
    sent, encoded = dict.fromkeys(ENCODERS, 0), dict.fromkeys(ENCODERS, 0)
    with _Decoding() as decoding:
        for step, wanted in zip(run.loader, expected, strict=True):
            run.model.load_state_dict(wanted.weights)
            run.model.zero_grad()
            loss, work = accumulate(run.model, step)
            sum_over_ranks(run.model)
            figures, done = gather([loss], work)
            offs.append(_off(float(figures.sum()), _gradients(run.model), wanted))
            works += done.tolist()
            ids.append([name for batch in step for name in batch.sample_ids])
            beside += sum(len(batch.pixel_values) + len(batch.audio_values) for batch in step)
            for name in ENCODERS:
                encoded[name] += _count_files(name, step.encoders.get(name, step))
                sent[name] += _count_sent(name, step)
    return {
        "off": offs,
        "work": works,
        "ids": ids,
        "rows beside tokens": beside,
        "decoded": decoding.files,
        "encoded": encoded,
        "sent": sent,
        "bytes": run.loader.stats().read_bytes,
    }


def _off(loss, gradients, wanted):
    found = {
        name: float((gradients[name] - own).norm() / own.norm())
        for name, own in wanted.gradients.items()
    }
    return found | {"loss": abs(loss - wanted.loss) / wanted.loss}


def _count_files(name, batches):
    fields = {"vision": "image_sizes", "audio": "audio_lengths"}
    return sum(len(getattr(batch, fields[name])) for batch in batches)


def _count_sent(name, step):
    """Features that go to the other rank."""
    if step.note is None:
        return 0
    return sum(
        int(np.delete(routes[name].tokens.send_counts, dist.get_rank()).sum())
        for routes in step.note.rounds
    )


def _files(build):
    """By encoder, files of the whole build."""
    loader = StreamingLoader(build, dp_rank=0, dp_world_size=1, audio="features")
    batches = [batch for step in loader for batch in step]
    return {name: _count_files(name, batches) for name in ENCODERS}


class _Decoding:
    """Which files this process decodes, by the hash of their content."""

    def __enter__(self):
        self.files = {name: [] for name in ENCODERS}
        self._real = (
            isobatch.loaders.batch._vision.decode_pixels,
            isobatch.loaders.batch.collate.decode_audio,
        )
        pixels, audio = self._real

        def decode_pixels(content, **options):
            self.files["vision"].append(hashlib.sha256(content).hexdigest())
            return pixels(content, **options)

        def decode_audio(rule, content, counted=None):
            self.files["audio"].append(hashlib.sha256(content).hexdigest())
            return audio(rule, content, counted)

        isobatch.loaders.batch._vision.decode_pixels = decode_pixels
        isobatch.loaders.batch.collate.decode_audio = decode_audio
        return self

    def __exit__(self, *_):
        (
            isobatch.loaders.batch._vision.decode_pixels,
            isobatch.loaders.batch.collate.decode_audio,
        ) = self._real
