"""The loader's work: the same bytes whoever does it, encoders' items, several builds, figures, and
clean ends.
"""

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import Counter
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders import StreamingLoader
from isobatch.loaders.batch import collate as collating
from isobatch.loaders.read.build import StorageOptions
from support import TESTS
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import IMAGE_TOKEN, group_samples, make_samples
from support.loading.contents import content
from support.loading.step_planners import dispatch, repack

NUM_SAMPLES = 60


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    root = tmp_path_factory.mktemp("builds")
    groups = group_samples(make_samples(NUM_SAMPLES), max_tokens=50)
    return {
        format: write_tabled(root / format, groups, format) for format in ("arrow", "webdataset")
    }


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("isobatch-")]


def load(build, rank=0, world=1, **options):
    return StreamingLoader(build, dp_rank=rank, dp_world_size=world, **options)


MODES = [
    {},
    {"balance": 0.0, "micro_batches_per_step": 2},
    {"regroup": "epoch", "regroup_window": 12},
    {"planner": repack},
    {"planner": dispatch, "micro_batches_per_step": 2},
]


@pytest.mark.parametrize("mode", MODES)
def test_two_runs_give_identical_bytes_whatever_the_workers_and_the_format(builds, mode):
    runs = [
        [
            content(step)
            for step in load(
                builds[format], 1, 3, workers=workers, prefetch_bytes=bytes_ahead, **mode
            )
        ]
        for format, workers, bytes_ahead in [
            ("arrow", 0, 0),
            ("arrow", 3, 1 << 30),
            ("webdataset", 2, 0),
        ]
    ]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("mode", MODES)
def test_labels_and_pixels_belong_to_their_samples(builds, mode):
    """Whoever packs them, samples look as they do alone."""
    samples = {sample.sample_id: sample for sample in make_samples(NUM_SAMPLES)}
    pixels = {}
    for step in load(builds["arrow"], pixel_dtype=torch.uint8):
        for batch in step:
            pixels |= pixels_by_sample(batch, batch.sample_ids, samples)
    steps = [
        step
        for r in range(2)
        for step in load(builds["webdataset"], r, 2, pixel_dtype=torch.uint8, **mode)
    ]
    for batch in (batch for step in steps for batch in step):
        check_tokens(batch, samples)
    encoded = {}
    for batch in (batch for step in steps for batch in step.encoders.get("vision", step)):
        encoded |= pixels_by_sample(batch, batch.sample_ids, samples)
    for sample_id in (one for one in samples if samples[one].images):
        assert torch.equal(encoded[sample_id], pixels[sample_id])


def check_tokens(batch, samples):
    for place, sample_id in enumerate(batch.sample_ids):
        start, stop = batch.cu_seqlens[place : place + 2].tolist()
        assert batch.input_ids[start:stop].tolist() == samples[sample_id].input_ids
        assert batch.labels[start:stop].tolist() == samples[sample_id].labels
    assert len(batch.image_sizes) == sum(len(samples[one].images) for one in batch.sample_ids)


def pixels_by_sample(batch, sample_ids, samples):
    counts = [samples[sample_id].counts["num_image_patches"] for sample_id in sample_ids]
    return dict(zip(sample_ids, torch.split(batch.pixel_values, counts), strict=True))


def test_a_rank_reads_only_the_images_that_it_encodes(builds):
    for rank in range(3):
        for step in load(builds["arrow"], rank, 3, planner=dispatch, pixel_dtype=torch.uint8):
            (encoded,) = step.encoders["vision"]
            assert encoded.input_ids.shape == (0,)
            assert encoded.cu_seqlens.tolist() == [0] * (encoded.num_samples + 1)
            assert all(len(batch.pixel_values) == 0 for batch in step)
            for batch in step:
                assert 4 * int(batch.patches_per_image.sum()) == int(
                    (batch.input_ids == IMAGE_TOKEN).sum()
                )
            for again in (pickle.loads(pickle.dumps(step)), copy.deepcopy(step)):
                assert content(again) == content(step)
                pairs = [
                    (a.input_ids, b.input_ids)
                    for a, b in zip(again, step, strict=True)
                    if a.num_samples
                ]
                assert all(a.data_ptr() != b.data_ptr() for a, b in pairs)


def test_several_builds_are_one_stream_and_resume_exactly(builds, tmp_path):
    more = make_samples(25, seed=8)
    for sample in more:
        sample.sample_id = f"more-{sample.sample_id}"
    other = write_tabled(tmp_path / "more", group_samples(more, max_tokens=50))
    datasets = [(builds["arrow"], 2.0), (other, 2.0)]
    first = [load(datasets, rank, 3, pixel_dtype=torch.uint8) for rank in range(3)]
    seen = [
        one
        for loader in first
        for step in islice(loader, 4)
        for batch in step
        for one in batch.sample_ids
    ]
    for rank in range(2):
        loader = load(datasets, rank, 2, pixel_dtype=torch.uint8)
        loader.load_state_dict(first[0].state_dict())
        seen += [one for step in loader for batch in step for one in batch.sample_ids]
    assert Counter(seen) == Counter(
        [f"sample-{n:05d}" for n in range(NUM_SAMPLES)] + [s.sample_id for s in more]
    )
    for loader in first:
        loader.close()


@pytest.mark.parametrize(
    ("datasets", "options", "message"),
    [
        (lambda a, b: [], {}, r"datasets are \[\]"),
        (lambda a, b: [(a, 0.0)], {}, "with weights above 0"),
        (lambda a, b: [(a, 1), (b, 1)], {}, "was built for another model"),
    ],
)
def test_datasets_that_do_not_go_together_are_refused(builds, tmp_path, datasets, options, message):
    native = write_tabled(
        tmp_path / "native", [make_samples(3, model="qwen2_vl")], model="qwen2_vl"
    )
    with pytest.raises(ConfigError, match=message):
        load(datasets(builds["arrow"], native), **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_comes_at_its_step_and_the_state_is_that_of_the_step_before(tmp_path, workers):
    groups = group_samples(make_samples(NUM_SAMPLES), max_tokens=50)
    whole = [step[0].sample_ids for step in load(write_tabled(tmp_path / "whole", groups))]
    victim_at, victim = next(
        (n, ids[0]) for n, ids in enumerate(whole) if n > 4 and has_image(groups, ids[0])
    )
    sample = next(s for group in groups for s in group if s.sample_id == victim)
    sample.images[0] = b"no image"
    loader = load(write_tabled(tmp_path / "build", groups), workers=workers)
    got: list[tuple[str, ...]] = []
    with pytest.raises(DataError, match=victim):
        got.extend(step[0].sample_ids for step in loader)
    assert got == whole[:victim_at]
    resumed = load(tmp_path / "whole", workers=workers)
    state = loader.state_dict() | {"manifest_hash": resumed.state_dict()["manifest_hash"]}
    resumed.load_state_dict(state)
    assert [step[0].sample_ids for step in resumed] == whole[victim_at:]


def has_image(groups, sample_id):
    return any(
        sample.sample_id == sample_id and sample.images for group in groups for sample in group
    )


def test_a_newer_iterator_a_loaded_state_and_close_end_an_older_one(builds):
    loader = load(builds["arrow"], workers=2)
    whole = [step[0].sample_ids for step in load(builds["arrow"])]
    older = iter(loader)
    got = [next(older)[0].sample_ids, next(older)[0].sample_ids]
    newer = iter(loader)
    got.append(next(newer)[0].sample_ids)
    with pytest.raises(RuntimeError, match="use the newer iterator"):
        next(older)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="its state was loaded"):
        next(newer)
    last = iter(loader)
    got.append(next(last)[0].sample_ids)
    loader.close()
    with pytest.raises(ConfigError, match="closed"):
        next(last)
    assert got == whole[:4]


def test_figures_are_those_of_what_was_done(builds):
    loader = load(builds["arrow"], 1, 2, workers=2)
    other = [[len(batch.input_ids) for batch in step] for step in load(builds["arrow"], 0, 2)]
    steps = list(loader)
    stats = loader.stats()
    assert (stats.steps, stats.samples) == (
        len(steps),
        sum(batch.num_samples for step in steps for batch in step),
    )
    samples = {sample.sample_id: sample for sample in make_samples(NUM_SAMPLES)}
    ids = [one for step in steps for batch in step for one in batch.sample_ids]
    files = sum(len(image) for one in ids for image in samples[one].images)
    assert stats.read_bytes == files + sum(8 * len(samples[one].input_ids) for one in ids)
    assert min(stats.decoding_s, stats.reading_s, stats.waiting_s) > 0
    assert stats.cache_hits == 0
    # measured: what the two ranks got
    tokens = [(len(step[0].input_ids), *rank) for step, rank in zip(steps, other, strict=True)]
    idle = [abs(a - b) / (2 * max(a, b)) for a, b in tokens if a and b]
    assert stats.dist_ratio_llm == pytest.approx(sum(idle) / len(idle))


class Passes(IterableDataset):
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


@pytest.mark.parametrize(
    ("format", "options", "expected"),
    [
        ("arrow", {"images": "encoded"}, [{"isobatch"}, {"consumer"}]),
        ("arrow", {"images": "encoded", "verify": "never"}, [{"consumer"}, {"consumer"}]),
        ("arrow", {"images": "patches"}, [{"isobatch"}, {"isobatch"}]),
        ("webdataset", {"images": "encoded"}, [{"isobatch"}, {"isobatch"}]),
    ],
)
def test_steps_that_only_make_views_are_made_by_the_consumer(
    builds, monkeypatch, format, options, expected
):
    makers, plain = [], collating.collate

    def collate(*given):
        is_own = threading.current_thread() is threading.main_thread()
        makers.append("consumer" if is_own else threading.current_thread().name[:8])
        return plain(*given)

    monkeypatch.setattr(collating, "collate", collate)
    storage = StorageOptions(verify=options.pop("verify", "first"))
    loader = load(builds[format], workers=2, storage=storage, **options)
    contents, found = [], []
    for _ in range(2):
        contents.append(sorted(name for step in loader for b in step for name in b.sample_ids))
        found.append(set(makers))
        makers.clear()
    assert found == expected
    assert contents[0] == contents[1]
    loader.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_inside_a_worker_process_it_continues_where_its_parent_was(builds, method):
    whole = [content(step) for step in load(builds["arrow"], workers=0)]
    loader = load(builds["arrow"], workers=2)
    running = iter(loader)
    assert [content(step) for step in islice(running, 3)] == whole[
        :3
    ]  # its threads are alive when the worker starts
    data = DataLoader(
        Passes(loader), batch_size=None, num_workers=1, multiprocessing_context=method
    )
    assert [content(step) for step in data] == whole[3:]
    assert [content(step) for step in running] == whole[3:]


def test_tensors_are_on_the_device_that_was_asked_for(builds):
    step = next(iter(load(builds["arrow"], device="meta", workers=1)))
    assert step[0].pixel_values.device.type == "meta"
    if torch.cuda.is_available():
        step = next(iter(load(builds["arrow"], device="cuda", workers=1)))
        assert step[0].pixel_values.is_cuda


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_at_once_and_leaves_nothing(builds, number):
    script = TESTS / "support" / "loading" / "interrupted.py"
    process = subprocess.Popen(
        [sys.executable, script, builds["arrow"]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for _ in range(4):
            assert process.stdout.readline() == "step\n"
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode in (-number, 130, 1)
    assert errors.count("Traceback") <= 1
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)


def test_by_default_there_are_no_more_threads_than_cores_for_this_rank(builds, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    running = iter(load(builds["arrow"]))
    next(running)
    assert (
        len([thread for thread in threading.enumerate() if thread.name.startswith("isobatch-")])
        == 1
    )
    running.close()
