"""What loaders log is what an oracle finds in the micro-batches of all ranks, on every route."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from isobatch.common.errors import ConfigError
from isobatch.loaders import BalancedLoader, StepDataset, StreamingLoader
from isobatch.models.presets import load_model
from support.builds.raw_data import record
from support.builds.sample_tables import MAX_SEQ_LEN, path_groups, text_samples, write_tabled
from support.builds.shard_fixture import group_samples, make_samples
from support.loading.step_planners import dispatch, repack
from support.ranks import run_ranks
from support.workers.logging_ranks import log_alone, log_in_groups

EVERY, WORLD, PAIRS = 3, 2, 2
LOADS = ("waiting_vision", "waiting_llm", "waiting_attention")


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    root = tmp_path_factory.mktemp("logged")
    return [
        write_tabled(root / "images", group_samples(make_samples(90), max_tokens=120)),
        write_tabled(root / "texts", path_groups(text_samples(220))),
    ]


class Log(list):
    """Figures by name and step, as they were written."""

    def __call__(self, figures, step):
        self.append((step, {name.removeprefix("isobatch/"): of for name, of in figures.items()}))

    def of(self, name):
        return [figures[name] for _, figures in self]


def records(count=240):
    rng = np.random.default_rng(4)
    return [record(n, answer="word " * int(rng.integers(1, 90))) for n in range(count)]


def make_online(log, rank, **options):
    options = {"model": "tiny", "max_tokens": 512, "max_vision": 8, "window": 40, **options}
    return BalancedLoader(records(), **common(log, rank), **options)


def common(log, rank):
    log_to = log if rank == 0 else None
    ranks = {"dp_rank": rank, "dp_world_size": WORLD, "micro_batches_per_step": PAIRS}
    return {**ranks, "workers": 0, "log_to": log_to, "log_every": EVERY}


def make_offline(source, **options):
    return lambda log, rank: StreamingLoader(source, **common(log, rank), **options)


def routes(builds):
    mixed = [(builds[0], 1.0), (builds[1], 0.5)]
    return {
        "a build": (make_offline(builds[0]), MAX_SEQ_LEN),
        "groups of each epoch": (make_offline(builds[1], regroup="epoch"), MAX_SEQ_LEN),
        "some samples": (make_offline(builds[1], split="train"), MAX_SEQ_LEN),
        "a mixture": (make_offline(mixed), MAX_SEQ_LEN),
        "weights by step": (
            make_offline(builds, mixing_weights=[(0, {"images": 1, "texts": 2})]),
            MAX_SEQ_LEN,
        ),
        "stored order": (make_offline(builds[0], shuffle=False), MAX_SEQ_LEN),
        "a planner": (make_offline(builds[0], planner=repack), MAX_SEQ_LEN),
        "no build": (make_online, 512),
        "no build, in order": (lambda *of: make_online(*of, shuffle=False), 512),
        "padded": (lambda *of: make_online(*of, packing=False), 512),
    }


def expected_of(steps, cap):
    """Figures of steps, by all ranks' micro-batches: (steps, ranks, micro-batches)."""
    rounds = [of for step in steps for of in rounds_of(step)]
    complete = [of for of in rounds if all(map(num_samples, of))] or rounds
    loads = {
        "waiting_vision": lambda batch: len(batch.pixel_values),
        "waiting_llm": tokens_of,
        "waiting_attention": lambda batch: sum(length**2 for length in lengths_of(batch)),
    }
    batches = [batch for of in rounds for part in of for batch in part if batch.num_samples]
    figures = {name: waiting(complete, load) for name, load in loads.items()}
    return figures | {"fill": sum(map(tokens_of, batches)) / (len(batches) * cap)}


def rounds_of(step):
    """What ranks compute between two meetings: a micro-batch, or a step of unequally many."""
    if len({len(rank) for rank in step}) > 1:
        return [step]
    return [[[batch] for batch in of] for of in zip(*step, strict=True)]


def num_samples(batches):
    return sum(batch.num_samples for batch in batches)


def lengths_of(batch):
    if batch.is_padded:
        return [batch.max_seqlen] * batch.num_samples
    return batch.cu_seqlens.diff().tolist() if batch.num_samples else []


def tokens_of(batch):
    return sum(lengths_of(batch))


def waiting(rounds, load):
    shares = []
    for of in rounds:
        loads = [sum(map(load, part)) for part in of]
        shares.append(sum(max(loads) - one for one in loads) / max(1, max(loads) * len(loads)))
    return float(np.mean(shares))


@pytest.mark.parametrize("route", routes([""] * 2))
def test_every_route_logs_what_all_ranks_received(builds, route):
    make, cap = routes(builds)[route]
    log, is_packed_again = Log(), route == "a planner"
    ranks = [make(log, rank) for rank in range(WORLD)]
    steps = list(zip(*ranks, strict=True))
    assert [step for step, _ in log] == [*range(EVERY, len(steps), EVERY), len(steps)]
    tokens = [sum(tokens_of(batch) for rank in step for batch in rank) for step in steps]
    for number, (step, figures) in enumerate(log):
        expected = expected_of(steps[EVERY * number : step], cap)
        if is_packed_again and step == len(steps):  # a step is complete if its stored groups are
            expected = {"fill": expected["fill"]}
        for name, value in expected.items():
            assert figures[name] == pytest.approx(value, rel=1e-9, abs=1e-12), (name, step)
        assert figures["tokens"] == sum(tokens[:step])
        assert 0 < figures["tokens_per_second"] < 1e9
        assert figures["data_wait_ms"] > 0
        assert 0 < figures["data_wait_share"] < 1
        assert figures["skipped"] == figures["rejected"] == 0
    assert log.of("epoch") == sorted(log.of("epoch"))
    assert log[-1][1]["epoch"] == 1
    stats = ranks[0].stats()
    assert (stats.steps, stats.tokens) == (len(steps), sum(tokens))
    whole = expected_of(steps, cap)
    assert stats.fill == pytest.approx(whole["fill"])
    assert is_packed_again or stats.dist_ratio_attention == pytest.approx(
        whole["waiting_attention"], rel=1e-9
    )
    assert ranks[1].stats().dist_ratio_attention is None


@pytest.mark.parametrize("route", ["a build", "a mixture", "no build"])
def test_a_resumed_run_goes_on_where_it_was_and_counts_no_token_twice(builds, route):
    make, _ = routes(builds)[route]
    whole, first, second = Log(), Log(), Log()
    loader = make(whole, 0)
    num_steps = len(list(loader))
    list(loader)
    running = make(first, 0)
    for step, _ in enumerate(running, 1):
        if step == 4:
            state = running.state_dict()
        if step == 6:
            break
    running.close()
    assert first[-1][0] == 6
    resumed = make(second, 0)
    resumed.load_state_dict(state)
    list(resumed)
    list(resumed)
    assert second[-1][0] == whole[-1][0] > num_steps
    assert second[-1][1]["tokens"] == whole[-1][1]["tokens"]
    assert second[-1][1]["epoch"] == whole[-1][1]["epoch"] == 2
    assert second[0][0] == 4 + EVERY
    before = {step: figures["tokens"] for step, figures in whole}
    assert first[-1][1]["tokens"] == before[6]


def test_a_state_of_an_earlier_version_has_no_steps_done_and_a_wrong_one_is_refused(builds):
    loader = StreamingLoader(builds[0], workers=0)
    next(iter(loader))
    state = loader.state_dict()
    assert state.pop("done")["steps"] == 1
    loader.load_state_dict(state)
    assert loader.state_dict()["done"] == {"steps": 0, "tokens": 0}
    for wrong in (3, {}, {"steps": 1}, {"steps": "1", "tokens": 2}):
        with pytest.raises(ConfigError, match="state has done"):
            loader.load_state_dict({**state, "done": wrong})


def test_planners_that_give_ranks_other_work_are_logged_by_step(builds):
    log = Log()
    options = {**common(log, 0), "planner": dispatch}
    assert len(list(StreamingLoader(builds[0], **options))) == log[-1][0]
    assert all(0 <= figures[name] < 1 for _, figures in log for name in LOADS)


def test_nothing_is_computed_where_nobody_listens(builds, monkeypatch):
    loader = StreamingLoader(builds[0], workers=0)
    for step in loader:
        assert step
    (plan,) = loader._steps.copy().plan(1)
    assert plan.figures.llm_squares is None
    assert "samples" not in loader._source.build.__dict__  # counts are not read
    assert loader.stats().dist_ratio_attention is None


def test_trainers_figures_are_means_of_their_steps(builds):
    log = Log()
    loader = StreamingLoader(builds[1], workers=0, log_to=log, log_every=4)
    loader.log({"loss": 7.0})  # no step yet, and nobody who logs it
    for number, _ in enumerate(loader):
        loader.log({"loss": torch.tensor(float(number)), "only once": 1} if number else {"loss": 0})
    assert log.of("loss")[:2] == [1.5, 5.5]
    assert log[0][1]["only once"] == 1


def test_one_rank_logs_where_each_has_a_group_of_its_own(builds, tmp_path):
    first, second = run_ranks(tmp_path, 2, log_in_groups, builds[0])
    assert first["logged"] == first["steps"] == second["steps"] > 0
    assert second["logged"] == 0


def test_one_of_two_real_ranks_logs_the_values_of_both(builds, tmp_path):
    pytest.importorskip("tensorboard")
    from support.workers.read_logs import read_events  # noqa: PLC0415

    said = run_ranks(tmp_path, 2, log_alone, builds[0], str(tmp_path / "runs"))
    assert [of["logs"] for of in said] == [True, False]
    (file,) = (tmp_path / "runs").iterdir()
    assert str(said[0]["pid"]) in file.name
    log = Log()
    ranks = [
        StreamingLoader(
            builds[0],
            dp_rank=rank,
            dp_world_size=2,
            workers=0,
            log_to=log if rank == 0 else None,
            log_every=3,
        )
        for rank in range(2)
    ]
    steps = list(zip(*ranks, strict=True))
    events = read_events(tmp_path / "runs")
    assert [step for step, _ in events["isobatch/fill"]] == [step for step, _ in log]
    for name in LOADS:
        values = [value for _, value in events[f"isobatch/{name}"]]
        assert values == pytest.approx(log.of(name), rel=1e-6)
    first = expected_of(steps[:3], MAX_SEQ_LEN)
    assert events["isobatch/waiting_llm"][0][1] == pytest.approx(first["waiting_llm"], rel=1e-6)


def test_wrong_options_are_told_in_one_line(builds, monkeypatch):
    for options, match in (
        ({"log_to": "tensorbord"}, r"log_to is 'tensorbord'; use one of tensorboard, wandb"),
        ({"log_to": 3}, "log_to is 3; it must be"),
        ({"log_every": 0}, "log_every is 0; it must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=match):
            StreamingLoader(builds[0], **options)
    monkeypatch.setattr(
        "isobatch.loaders.metrics.find_spec", lambda name: name == "trackio" or None
    )
    with pytest.raises(ConfigError, match=r"pip install wandb, or use trackio, which you have"):
        BalancedLoader(records(), model="tiny", log_to="wandb:project")
    loader = StreamingLoader(builds[0], log_to=Log())
    worker = DataLoader(
        StepDataset(loader), batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    with pytest.raises(ConfigError, match="num_workers=0"):
        next(iter(worker))


def test_a_tool_that_fails_ends_the_log_and_a_function_that_fails_the_run(builds, monkeypatch):
    def fail(*_):
        raise OSError("No space left on device")

    tools = {"tensorboard": lambda folder: (fail, lambda: None)}
    monkeypatch.setattr("isobatch.loaders.metrics._TOOLS", tools)
    monkeypatch.setattr("isobatch.loaders.metrics.find_spec", lambda name: name)
    loader = StreamingLoader(builds[1], workers=0, log_to="tensorboard", log_every=1)
    with pytest.warns(
        UserWarning, match="No space left on device; nothing more is logged"
    ) as lines:
        assert len(list(loader)) == len(loader)
    assert sum("nothing more is logged" in str(line.message) for line in lines) == 1
    loader = StreamingLoader(builds[1], workers=0, log_to=fail, log_every=1)
    with pytest.raises(OSError, match="No space"):
        list(loader)


def test_attention_that_is_not_known_is_left_out_with_a_line(builds, tmp_path, monkeypatch):
    monkeypatch.setattr("isobatch.loaders.steps.build_groups.MOST_COUNTED", 10)
    log = Log()
    loader = StreamingLoader(builds[1], workers=0, log_to=log, log_every=1)
    with pytest.warns(UserWarning, match="waiting for attention is not logged: the build's 220"):
        next(iter(loader))
    loader.close()
    assert "waiting_attention" not in log[0][1]
    assert "waiting_llm" in log[0][1]


def test_stats_are_a_small_table(builds):
    loader = StreamingLoader(builds[0], workers=0)
    list(loader)
    lines = str(loader.stats()).splitlines()
    assert lines[0].split() == ["steps", str(len(loader))]
    assert f" {loader.stats().read_bytes:,}" in str(loader.stats())
    assert f" {2**40:,}" in str(replace(loader.stats(), read_bytes=2**40))
    assert any(line.split()[0] == "fill" and line.endswith("%") for line in lines)
    assert max(map(len, lines)) < 60


def test_records_that_cannot_be_used_are_counted_without_a_build():
    log = Log()
    rows = [*records(60), {"id": "bad", "conversations": 3}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = BalancedLoader(
            rows, model="tiny", max_tokens=512, max_vision=8, log_to=log, max_rejected=0.5
        )
        list(loader)
    assert log[-1][1]["rejected"] == loader.stats().rejected_samples == 1
    assert load_model("tiny").dimensions
