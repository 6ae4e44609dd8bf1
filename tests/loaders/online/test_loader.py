"""`BalancedLoader`: the samples of a build, without one."""

import json
import pickle
import re
import warnings
from io import BytesIO
from pathlib import Path

import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pictures

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders import BalancedLoader, StepDataset, StreamingLoader
from support.builds.packed import build
from support.builds.raw_data import record, write_dataset, write_image
from support.loading.contents import content
from support.loading.online_data import OPTIONS, built_samples, open_ranks, records, samples_of
from support.models.saved_videos import save_video_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("online")


@pytest.fixture(scope="module")
def rows(folder):
    return records(folder)


@pytest.fixture(scope="module")
def built(rows, folder):
    write_dataset(folder, rows)
    build(folder, folder / "packed", max_seq_len=1024)
    return built_samples(folder / "packed")


def batches_of(ranks):
    return [batch for loader in ranks for step in loader for batch in step]


class MapStyle(torch.utils.data.Dataset):
    """Gives pictures as PIL does, and messages."""

    def __init__(self, rows, folder):
        self.rows, self.folder = rows, folder

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        names = row.get("image", [])
        names = [names] if isinstance(names, str) else names
        images = [Pictures.open(self.folder / name) for name in names]
        return {"id": row["id"], "conversations": row["conversations"], "images": images}


def hugging_face(rows, folder):
    """The same as a `datasets.Dataset` with undecoded content."""

    def files(row):
        names = row.get("image", [])
        return [names] if isinstance(names, str) else names

    values = [
        {
            "id": row["id"],
            "conversations": row["conversations"],
            "images": [
                {"bytes": (folder / name).read_bytes(), "path": None} for name in files(row)
            ],
        }
        for row in rows
    ]
    turns = List({"from": Value("string"), "value": Value("string")})
    features = Features({"id": Value("string"), "conversations": turns, "images": List(Image())})
    return Dataset.from_list(values, features=features)


def renamed(dataset):
    """The same by a function of the user's, for columns of other names."""

    def rename(batch):
        return {key.replace("turns", "conversations"): value for key, value in batch.items()}

    return dataset.rename_column("conversations", "turns").with_transform(rename)


def test_samples_are_those_of_a_build(rows, built, folder, monkeypatch):
    def cast(*_given, **_options):
        pytest.fail("the dataset is written again")

    kinds = {
        "list": rows,
        "datasets": hugging_face(rows, folder),
        "with_transform": renamed(hugging_face(rows, folder)),
        "torch": MapStyle(rows, folder),
    }
    monkeypatch.setattr(Dataset, "cast", cast)
    for name, dataset in kinds.items():
        ranks = open_ranks(dataset, 2 if name == "list" else 1, folder, pixel_dtype=torch.uint8)
        found = samples_of(batches_of(ranks), ranks[0].image_token_id)
        assert found == built, name
        assert not ranks[0].rejected
        for loader in ranks:
            loader.close()


def test_videos_are_those_of_a_build(tmp_path):
    clips = pytest.importorskip("support.clips")
    model, rows = save_video_folder("qwen2_5_vl", tmp_path, {}), []
    for number in range(6):
        write_image(tmp_path / "raw" / f"{number}.png", 40 + 9 * number, 60, number)
        clip = clips.make_clip(12 + number, (64, 48), seed=number)
        (tmp_path / "raw" / f"{number}.mp4").write_bytes(clip.content)
        files = {"image": f"{number}.png", "video": f"{number}.mp4"}
        rows.append(record(number, text="<image><video>") | files)
    build(write_dataset(tmp_path / "raw", rows), tmp_path / "packed", model=model, tokenizer=model)
    options = {"data_root": str(tmp_path / "raw"), "max_tokens": 4096, "max_vision": 100_000}
    found = []
    for loader in (
        StreamingLoader(tmp_path / "packed", workers=0),
        BalancedLoader(rows, model=model, workers=0, **options),
    ):
        found.append({})
        for batch in (batch for step in loader for batch in step if len(batch.sample_ids)):
            sizes, media = batch.cu_seqlens.diff().tolist(), batch.image_grid_thw.prod(1)
            pixels = batch.pixel_values.split(media.view(-1, 2).sum(1).tolist())
            seconds = batch.video_seconds.view(-1, 2)  # of an image, of a video
            parts = batch.input_ids.split(sizes), batch.labels.split(sizes), pixels, seconds
            for name, *own in zip(batch.sample_ids, *parts, strict=True):
                found[-1][name] = [each.tolist() for each in own]
        loader.close()
    assert found[0] == found[1]
    assert len(found[0]) == 6
    assert all(own[3][0] == 0 < own[3][1] for own in found[0].values())


@pytest.mark.parametrize("kind", [str, Path])
def test_absolute_paths(rows, built, folder, kind):
    def absolute(row):
        names = row.get("image", [])
        names = [names] if isinstance(names, str) else names
        return row | {"image": [kind(folder / name) for name in names]}

    (loader,) = open_ranks(rows, 1, folder.parent, transform=absolute, pixel_dtype=torch.uint8)
    assert samples_of(batches_of([loader]), loader.image_token_id) == built
    loader.close()


def test_resumes_on_other_ranks(rows, folder):
    options = {"micro_batches_per_step": 2, "image_transform": None}
    ranks = open_ranks(rows, 2, folder, **options)
    given, states = [], []
    for step in zip(*ranks, strict=True):
        given.append([content(each) for each in step])
        (state,) = {json.dumps(loader.state_dict()) for loader in ranks}
        states.append(json.loads(state))
    assert len(given) > 2
    assert ranks[0].epoch == 1
    again = open_ranks(rows, 2, folder, state=states[0], **options)
    assert [[content(each) for each in step] for step in zip(*again, strict=True)] == given[1:]
    with pytest.raises(ConfigError, match="give the loader the dataset, model and tokenizer of"):
        open_ranks(rows[::-1], 2, folder, state=states[0], **options)
    alone = open_ranks(rows, 1, folder, state=states[0])
    names = [name for batch in batches_of(alone) for name in batch.sample_ids]
    first = [name for rank in given[0] for batch in rank for name in batch[0]]
    assert sorted(names + first) == sorted(row["id"] for row in rows)
    for loader in (*ranks, *again, *alone):
        loader.close()


def test_rejected_samples_are_counted_and_training_goes_on(rows, folder, capfd):
    broken = folder / "images" / "broken.jpg"
    broken.write_bytes(b"no image")
    bad = [
        record(900, ["images/broken.jpg"]),
        record(901, ["images/missing.jpg"]),
        {"id": "s902", "text_only": "no known key"},
        record(903, answer="word " * 2000),
        "no object",
        record(905, ["https://x.org/1.jpg"]),
    ]
    (loader,) = open_ranks(rows + bad, 1, folder, max_rejected=0.2)
    names = [name for batch in batches_of([loader]) for name in batch.sample_ids]
    assert sorted(names) == sorted(row["id"] for row in rows)
    reasons = {each.index - len(rows): each.reason for each in loader.rejected}
    assert reasons == {
        0: "corrupt_image",
        1: "missing_image",
        2: "no_conversation",
        3: "longer_than_max_seq_len",
        4: "not_an_object",
        5: "image_url",
    }
    details = {each.reason: each.detail for each in loader.rejected}
    assert details["missing_image"] == str(folder / "images" / "missing.jpg")
    assert details["image_url"].startswith("https://x.org/1.jpg: download it first")
    report = loader.report()
    assert report["rejected"] == dict.fromkeys(reasons.values(), 1)
    assert report["measured"] == len(rows) + 6
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "cannot be used" in line)
    assert re.match(
        r"note: [1-6] of 40 samples cannot be used so far: 1 \w+, .*; the first is", line
    )
    assert line.endswith("the loader's `rejected` lists them")
    loader.close()
    # opened pictures, of modes that PNG has not, and that cannot be read any more
    file = BytesIO()
    Pictures.effect_noise((90, 90), 50).save(file, "JPEG")
    broken = [Pictures.open(BytesIO(file.getvalue()[:-2000])), Pictures.open(file)]
    broken[1].close()
    modes = "CMYK", "F", "HSV", "I", "LAB", "PA", "YCbCr"
    opened = [Pictures.new(mode, (40, 40)) for mode in modes] + broken
    more = [record(n, []) | {"image": each} for n, each in enumerate(opened, 1000)]
    (loader,) = open_ranks(rows + more, 1, folder)
    names = [name for batch in batches_of([loader]) for name in batch.sample_ids]
    assert {f"s{1000 + n}" for n in range(len(modes))} <= set(names)
    assert [each.reason for each in loader.rejected] == ["corrupt_image"] * 2
    assert "a picture: ValueError: Operation on closed image" in loader.rejected[1].detail
    loader.close()
    (loader,) = open_ranks(rows + bad * 5, 1, folder)
    with pytest.raises(DataError, match=r"samples cannot be used, more than max_rejected=0\.05"):
        batches_of([loader])
    loader.close()
    (loader,) = open_ranks([record(0, ["nowhere.png"])], 1, folder)
    with pytest.raises(DataError, match=r"nowhere\.png\); paths of files start from data_root=\."):
        batches_of([loader])
    loader.close()
    # the first that is named is one of the most common reason
    (loader,) = open_ranks(bad[:1] + rows, 1, folder, max_tokens=20)
    with pytest.raises(DataError, match=r"the first is s\d+ \(\d+ tokens, cap 20\)"):
        batches_of([loader])
    loader.close()


def test_a_slow_first_window_says_how_far_it_is(rows, folder, monkeypatch, capfd):
    monkeypatch.setattr("isobatch.loaders.online.lengths.TOLD_S", -1.0)  # as if all had taken long
    (loader,) = open_ranks(rows, 1, folder)
    batches_of([loader])
    loader.close()
    said = capfd.readouterr().err
    assert said.splitlines() == ["40 of the first 40 samples are measured"]


class Failing(list):
    """A dataset that raises for one record."""

    def __getitem__(self, index):
        if index == 3:
            raise OSError("disk error")
        return super().__getitem__(index)


def test_a_dataset_that_raises_or_changes(rows, folder):
    (loader,) = open_ranks(Failing(rows), 1, folder)
    assert len({name for b in batches_of([loader]) for name in b.sample_ids}) == len(rows) - 1
    (rejected,) = loader.rejected
    assert (rejected.index, rejected.reason) == (3, "unreadable_record")
    assert rejected.detail == "OSError: disk error"
    loader.close()
    calls = []

    def growing(row):
        calls.append(row)
        turns = [*row["conversations"][:-1], {"from": "gpt", "value": "word " * len(calls)}]
        return row | {"conversations": turns}

    texts = [row for row in rows if "image" not in row]
    (loader,) = open_ranks(texts, 1, folder, transform=growing, on_error="raise", window=10)
    loader._reader._kept_bytes = 0
    with pytest.raises(DataError, match="another record each time"):
        batches_of([loader])
    loader.close()


def test_caps_are_chosen_and_said_why(rows, folder):
    (loader,) = open_ranks(rows, 1, folder, max_tokens=None, max_vision=None)
    assert loader.limits is None
    assert loader.explained == []
    next(iter(loader))
    assert loader.limits is not None
    assert "tokens" in loader.explained[0]
    assert any("with max_tokens=" in line for line in loader.explained)
    assert "max-seq-len" not in "".join(loader.explained)
    assert loader.report()["limits"]["max_seq_len"] == loader.limits.max_seq_len
    state = loader.state_dict()
    loader.close()
    (again,) = open_ranks(rows, 1, folder, max_tokens=None, max_vision=None, state=state)
    batches_of([again])
    assert again.limits == loader.limits
    again.close()
    # of texts first, which choose none for images: the first images do
    order = [row for row in rows if not row.get("image")]
    order += [row for row in rows if row.get("image")]
    for packing in (True, False):
        options = {"shuffle": False, "packing": packing, "window": 20}
        options |= {"max_tokens": 600, "max_vision": None}
        ranks = open_ranks(order, 2, folder, **options)
        steps = list(zip(*ranks, strict=True))
        batches = [batch for step in steps for own in step for batch in own]
        (caps,) = {loader.limits for loader in ranks}
        assert (caps.max_seq_len, caps.max_vision > 0) == (600, True)
        assert caps.to_json() == ranks[0].report()["limits"]
        with_images = [batch.num_samples for batch in batches if len(batch.image_sizes)]
        assert sum(with_images) >= 2 * len(with_images), packing
        several = [batch for batch in batches if batch.num_samples > 1]
        assert 0 < max(len(batch.pixel_values) for batch in several) <= caps.max_vision
        lines = ranks[0].explained
        place = lines.index("when the first images came:")
        assert "no images" in lines[0]
        assert f"(as before), {caps.max_vision} image patches" in lines[place + 1]
        for loader in ranks:
            loader.close()


def test_lengths_are_kept_for_later_runs(rows, folder, tmp_path):
    (first,) = open_ranks(rows, 1, folder, lengths_cache=tmp_path)
    expected = [content(step) for step in first]
    first.close()
    (again,) = open_ranks(rows, 1, folder, lengths_cache=tmp_path)
    assert again.report()["measured"] == len(rows)
    assert [content(step) for step in again] == expected
    assert again.report()["sources"] == first.report()["sources"]
    again.close()
    (other,) = open_ranks(rows[1:], 1, folder, lengths_cache=tmp_path)
    assert other.report()["measured"] == 0
    other.close()
    # the same names in another folder may be other images
    (moved,) = open_ranks(rows, 1, folder / "images" / "..", lengths_cache=tmp_path)
    assert moved.report()["measured"] == len(rows)
    moved.close()
    (elsewhere,) = open_ranks(rows, 1, folder / "images", lengths_cache=tmp_path)
    assert elsewhere.report()["measured"] == 0
    elsewhere.close()
    # what a process was writing when it ended: measured again
    for names in tmp_path.glob("*.json"):
        names.write_text('["rec')
    (broken,) = open_ranks(rows, 1, folder, lengths_cache=tmp_path)
    assert broken.report()["measured"] == 0
    assert [content(step) for step in broken] == expected
    broken.close()


def test_kept_lengths_know_what_nothing_reads(rows, folder, tmp_path, capfd):
    scored = [row | ({"score": 1} if number % 3 == 0 else {}) for number, row in enumerate(rows)]
    expected = {"record": {"score": (len(scored[::3]), "1")}}
    for _ in range(2):
        (loader,) = open_ranks(scored, 1, folder, lengths_cache=tmp_path)
        for _ in loader:
            pass
        assert loader.report()["never_read"] == expected
        assert "never read: score (" in capfd.readouterr().err
        loader.close()
    ranks = open_ranks(scored, 2, folder, lengths_cache=tmp_path)
    assert [loader.report()["never_read"] for loader in ranks] == [expected] * 2
    for loader in ranks:
        loader.close()
    for file in tmp_path.glob("*.unread"):
        file.write_text("[1")
    (damaged,) = open_ranks(scored, 1, folder, lengths_cache=tmp_path)
    assert damaged.report()["measured"] == len(scored)
    damaged.close()


def test_a_sample_over_a_cap_is_named_by_its_id(rows, folder, tmp_path):
    long = rows[:50] + [record(900 + n, answer="word " * 500) for n in range(2)]
    by_image = {"max_tokens": 5000, "max_vision": 1}
    for cap in ({"max_tokens": 400}, by_image):
        for _ in range(2):  # measured, and known from an earlier run
            options = {"lengths_cache": tmp_path, "max_rejected": 1.0, "max_vision": 24} | cap
            ranks = open_ranks(long, 2, folder, **options)
            batches_of(ranks)
            for loader in ranks:
                assert loader.rejected
                for each in loader.rejected:
                    assert each.sample_id == long[each.index]["id"]
                loader.close()


def test_length_is_estimated_from_the_first_window_on(rows, folder):
    ranks = open_ranks(rows, 2, folder)
    (estimate,) = {len(loader) for loader in ranks}
    assert not ranks[0].is_len_exact
    lengths, left = [], []
    for step in zip(*ranks, strict=True):
        assert len(step) == 2
        (length,) = {len(loader) for loader in ranks}
        (remaining,) = {loader.remaining_steps for loader in ranks}
        lengths.append(length)
        left.append(remaining)
    assert abs(estimate - len(lengths)) <= 0.3 * len(lengths)
    assert lengths[-1] == len(lengths)
    assert left[-1] == 0
    for loader in ranks:
        loader.close()


def test_epochs_and_data_loader(rows, folder):
    (loader,) = open_ranks(rows, 1, folder, epochs=2)
    assert sum(batch.num_samples for step in loader for batch in step) == 2 * len(rows)
    assert list(loader) == []
    loader.close()
    (loader,) = open_ranks(rows, 1, folder)
    steps = iter(torch.utils.data.DataLoader(StepDataset(loader), batch_size=None))
    seen = sum(next(steps).micro_batches[0].num_samples for _ in range(3))
    assert seen
    loader.close()


def test_wrong_use_is_one_line(rows, folder):
    cases = {
        "split needs a build": {"split": "train"},
        "no option windo; did you mean": {"windo": 3},
        "window is 0": {"window": 0},
        "max_vision is -1; it must be at least 0": {"max_vision": -1},
        "processor= or encode=, or measure=": {"model": None},
        "max_rejected is 2": {"max_rejected": 2.0},
        "max_tokens is '4k'": {"max_tokens": "4k"},
        "give the tokenizer": {"model": "qwen2_vl"},
        "data_root is s3://a/b, which is no folder here": {"data_root": "s3://a/b"},
    }
    tokens = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 30
    for options in ({}, {"model": "qwen2_vl"}, {"model": None, "max_tokens": None}):
        with pytest.raises(ConfigError, match=r"record 0 has input_ids .* measure='own'"):
            BalancedLoader(tokens, **OPTIONS | options)
    BalancedLoader(tokens, max_tokens=9, measure="own").close()
    for message, options in cases.items():
        with pytest.raises(ConfigError, match=message) as caught:
            BalancedLoader(rows, **OPTIONS | options)
        assert "\n" not in str(caught.value)
    for dataset in ({"a": 1}, b"text", iter(rows), []):
        with pytest.raises(ConfigError, match="dataset"):
            BalancedLoader(dataset, **OPTIONS)
    (loader,) = open_ranks(rows, 1, folder)
    with pytest.raises(ConfigError, match="num_workers=0"):
        pickle.dumps(loader)
    with pytest.raises(ConfigError, match="no items"):
        loader[0]
    loader.close()
    with pytest.raises(ConfigError, match="closed"):
        next(iter(loader))


def test_a_column_to_keep_that_no_record_has_is_named(rows, folder, tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    for dataset in (rows, file):
        with pytest.warns(UserWarning, match="no 'scroe' .* first records, which have .*image"):
            open_ranks(dataset, 1, folder, keep_columns=("id", "scroe"))[0].close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = {"keep_columns": ("conversations",), "columns": {"conversations": "chat"}}
        renamed = [{"chat": row["conversations"]} for row in rows]
        open_ranks(renamed, 1, folder, **kept)[0].close()
        late = [*rows[:20], rows[20] | {"score": 1.5}]
        open_ranks(late, 1, folder, keep_columns=("score",))[0].close()


def late_pictures(folder):
    """Records of pictures that tests change after they were measured."""
    (folder / "late").mkdir(exist_ok=True)
    for number in range(12):
        Pictures.new("RGB", (40, 30), (number, 0, 0)).save(folder / f"late/{number}.png")
    return [record(number, [f"late/{number}.png"]) for number in range(12)]


def names_of(steps):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [name for step in steps for batch in step for name in batch.sample_ids]


def test_a_picture_that_breaks_after_it_was_measured(folder):
    rows = late_pictures(folder)
    (loader,) = open_ranks(rows, 1, folder, max_rejected=0.5, workers=0, max_tokens=200)
    steps = iter(loader)
    names = names_of([next(steps)])
    kept = next(number for number in range(12) if f"s{number}" not in names)
    (folder / f"late/{kept}.png").write_bytes(b"other bytes")
    names += names_of(steps)
    assert sorted(names) == sorted(f"s{number}" for number in range(12) if number != kept)
    assert [each.index for each in loader.rejected] == [kept]
    assert loader.rejected[0].detail.startswith(f"{folder}/late/{kept}.png: ")
    loader.close()


def test_a_picture_that_is_there_again_has_random_numbers_too(folder):
    rows, drawn = late_pictures(folder), []

    def draw(batch, generators):
        drawn.extend(map(len, (batch.sample_ids, generators)))
        return batch

    options = {"max_rejected": 0.5, "workers": 0, "batch_transform": draw}
    for loader in open_ranks(rows, 2, folder, **options):  # which plan on with what one has lost
        loader.is_at_end  # noqa: B018  measures
        file = folder / "late/3.png"
        content = file.read_bytes()
        file.write_bytes(b"other bytes")
        lost = "s3" not in names_of(loader)
        file.write_bytes(content)
        assert lost
        names_of(loader)
        assert drawn[::2] == drawn[1::2]
        loader.close()


def test_the_report_is_a_page(rows, folder):
    bad = [record(900, ["<b>none.png"]), {"id": "s901"}, record(902, answer="word " * 2000)]
    ranks = open_ranks([*rows, *bad, bad[0] | {"id": "s903"}], 2, folder, workers=0)
    for loader in ranks:
        loader.write_report(folder / "before.html")  # of a loader that has done nothing yet
    steps = list(zip(*ranks, strict=True))
    page = folder / "report.html"
    ranks[1].write_report(page)
    assert not page.exists()
    ranks[0].write_report(str(page))
    text, report = page.read_text("utf-8"), ranks[0].report()
    ratios = ranks[0]._meter.step_ratios()
    assert ratios.shape == (2, report["steps"])
    assert ratios.shape[1] > 3
    # the last step, if it lacks groups, is not in the figures
    is_whole = all(batch.num_samples for rank in steps[-1] for batch in rank)
    assert ratios[:, : len(steps) - (not is_whole)].mean(axis=1) == pytest.approx(
        [report["dist_ratio_vit"], report["dist_ratio_llm"]], abs=1e-6
    )
    assert text.count("<svg") == 1
    assert text.count('class="line ') == 2
    for figure in (
        *(f"{report['token_fill']:.1%}", f"{report['first_window_s']:.1f} s", "94 of 94 records"),
        *("Rejected samples: 4 of 94", "<td>missing_image</td><td>2</td>", "s900: "),
        *("&lt;b&gt;none.png", "<td>record</td><td>100.0%</td>", "longer_than_max_seq_len"),
    ):
        assert figure in text, figure
    assert "<b>none" not in text
    empty = (folder / "before.html").read_text("utf-8")
    assert "<svg" not in empty
    assert "None of those that are measured" in empty
    with pytest.raises(ConfigError, match="report cannot be written: No such file"):
        ranks[0].write_report(folder / "no" / "folder.html")
    for loader in ranks:
        loader.close()


def test_an_evaluation_is_a_whole_pass_in_order(rows, built, folder):
    options = {"shuffle": False, "window": 32, "pixel_dtype": torch.uint8}
    (loader,) = open_ranks(rows, 1, folder, **options)
    names, states = [row["id"] for row in rows], []
    assert loader.is_evaluation
    for number in range(3):
        steps = []
        for step in loader:
            steps += [step]
            states.append(loader.state_dict())
            if number == 1 and len(steps) == 2:
                break  # the next one begins at the beginning all the same
        given = [name for step in steps for batch in step for name in batch.sample_ids]
        assert given == (names if number != 1 else names[: len(given)])
        if number != 1:
            batches = [batch for step in steps for batch in step]
            assert samples_of(batches, loader.image_token_id) == built
    assert 3 < len(loader) < len(rows)
    loader.close()
    # two ranks after three steps of one, and then a whole pass
    ranks = open_ranks(rows, 2, folder, state=states[2], micro_batches_per_step=2, **options)
    rest = [batch for batches in zip(*map(list, ranks), strict=True) for batch in batches]
    ids = sorted(name for step in rest for batch in step for name in batch.sample_ids)
    position = json.loads(json.dumps(states[2]))["stream"]
    waiting = [each for group in position["waiting"] for each in group]
    left = [*waiting, *position["carried"], *range(position["consumed"], 90)]
    assert ids == sorted(f"s{number}" for number in left)
    assert len({len(step) for rank in ranks for step in rank}) <= 2
    for rank in ranks:
        rank.close()
    (training,) = open_ranks(rows, 1, folder, window=32)
    with pytest.raises(ConfigError, match="state has window"):
        training.load_state_dict(states[2])
    with pytest.raises(ConfigError, match="leave out epochs"):
        open_ranks(rows, 1, folder, epochs=1, **options)
