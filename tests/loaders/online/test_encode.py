"""`BalancedLoader(dataset, encode=function)`: the function's samples, packed as others are."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from isobatch.common.errors import ConfigError, DataError
from isobatch.common.types import LABEL_IGNORE
from isobatch.loaders import BalancedLoader, Encoded
from isobatch.loaders.online.records import Records
from support.loading.contents import content
from support.loading.online_data import open_ranks, records
from support.loading.step_planners import dispatch
from support.ranks import run_ranks

ARRAYS = {"max_tokens": 400, "max_vision": 60, "window": 40}


def steps_of(ranks):
    found = [step for loader in ranks for step in loader]
    for loader in ranks:
        loader.close()
    return found


def batches_of(ranks):
    return [batch for step in steps_of(ranks) for batch in step]


def as_the_packer(rows, folder, batches):
    """A function that gives ids and labels of these batches, and images in each form there is."""
    own = {}
    for batch in batches:
        sizes = batch.cu_seqlens.diff().tolist()
        parts = batch.input_ids.split(sizes), batch.labels.split(sizes)
        own |= dict(zip(batch.sample_ids, zip(*parts, strict=True), strict=True))

    def encode(row):
        input_ids, labels = own[row["id"]]
        names = row.get("image", [])
        paths = [folder / name for name in ([names] if isinstance(names, str) else names)]
        forms = (Image.open, str, lambda path: path.read_bytes())
        media = [forms[place % 3](path) for place, path in enumerate(paths)]
        return Encoded(input_ids, labels.tolist(), media)

    return encode


def test_ids_of_the_packer_give_the_same_steps(tmp_path):
    rows = records(tmp_path)
    steps = steps_of(open_ranks(rows, 2, tmp_path, pixel_dtype=torch.uint8))
    encode = as_the_packer(rows, tmp_path, [batch for step in steps for batch in step])
    for kept_bytes in (1 << 20, 0):  # encoded once, and again when it is read
        ranks = open_ranks(rows, 2, tmp_path, pixel_dtype=torch.uint8, encode=encode)
        for loader in ranks:
            loader._reader._kept_bytes = kept_bytes
        assert [content(step) for step in steps_of(ranks)] == [content(step) for step in steps]
        assert not ranks[0].rejected


def array_rows(count=70):
    """Numbers from which samples are made."""
    rng = np.random.default_rng(5)
    return [
        {"id": f"s{number}", "tokens": int(rng.integers(3, 120)), "rows": number % 4 * 3}
        for number in range(count)
    ]


def encode_arrays(row):
    """Ids that tell samples apart, and arrays of the sample's number."""
    number = int(row["id"][1:])
    ids = np.arange(row["tokens"]) % 7 + 10 * number
    labels = np.where(np.arange(row["tokens"]) < 2, LABEL_IGNORE, ids)
    if not row["rows"]:
        return Encoded(ids, labels)
    pixels = np.full((row["rows"], 5), number, np.float32)
    grid = torch.tensor([[1, 1, 3]]).repeat(row["rows"] // 3, 1)
    media = {"pixel_values": pixels, "image_grid_thw": grid}
    return Encoded(ids, labels, media, None if number % 2 else row["rows"])


def open_arrays(rows=None, rank=None, world=None, *, state=None, **options):
    ranks = {} if world is None else {"dp_rank": rank, "dp_world_size": world}
    given = {**ARRAYS, "encode": encode_arrays, **ranks, **options}
    loader = BalancedLoader(array_rows() if rows is None else rows, **given)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def test_arrays_arrive_joined_in_the_order_of_samples():
    loader, rows = open_arrays(keep_columns=("tokens",)), {row["id"]: row for row in array_rows()}
    steps = list(loader)
    batches, seen = [batch for step in steps for batch in step], []
    for batch in batches:
        own = [rows[name] for name in batch.sample_ids]
        seen += batch.sample_ids
        numbers = [int(row["id"][1:]) for row in own for _ in range(row["rows"])]
        grids = [[1, 1, 3]] * (len(numbers) // 3)
        if numbers:
            assert batch.processed["pixel_values"][:, 0].tolist() == numbers
            assert batch.processed["image_grid_thw"].tolist() == grids
            assert batch.processed["pixel_values"].shape == (len(numbers), 5)
        else:
            assert batch.processed == {}
        assert len(numbers) <= ARRAYS["max_vision"]
        assert len(batch.input_ids) <= ARRAYS["max_tokens"]
        assert batch.extras["tokens"] == [row["tokens"] for row in own]
        assert batch.cu_seqlens.diff().tolist() == batch.extras["tokens"]
    assert sorted(seen) == sorted(rows)
    for step in steps:
        labels = sum(int((batch.labels != LABEL_IGNORE).sum()) for batch in step)
        assert {batch.num_loss_tokens for batch in step} == {labels}
    report = loader.report()
    assert report["measured"] == len(rows)
    assert report["token_fill"] > 0.8
    loader.close()


def per_step(ranks):
    """Of each step: its samples, their ids and arrays by sample, and its labels."""
    made = []
    for step in zip(*ranks, strict=True):
        batches = [batch for own in step for batch in own]
        (labels,) = {batch.num_loss_tokens for batch in batches}
        arrays = [row for each in batches for row in each.processed.get("pixel_values", [])]
        ids = sorted(int(each) for batch in batches for each in batch.input_ids)
        names = sorted(name for batch in batches for name in batch.sample_ids)
        made.append([names, ids, sorted(int(row[0]) for row in arrays), labels])
    return made


def run_arrays(said, folder):
    encoded = []

    def encode(row):
        encoded.append(row["id"])
        return encode_arrays(row)

    loader = open_arrays(micro_batches_per_step=2, encode=encode, workers=0, window=70)
    encoded.clear()  # some are counted to tell the dataset from others
    loader.check_ranks()  # plans the first window
    said["measured"] = sorted(encoded)
    said["steps"] = per_step([loader])
    loader.close()


def test_ranks_and_resumed_runs_have_the_same_samples(tmp_path):
    expected = per_step([open_arrays(micro_batches_per_step=4, window=70)])
    first, second = run_ranks(tmp_path, 2, run_arrays, tmp_path)
    assert sorted(first["measured"] + second["measured"]) == sorted(r["id"] for r in array_rows())
    for one, own, other in zip(expected, first["steps"], second["steps"], strict=True):
        assert [sorted(a + b) for a, b in zip(own[:3], other[:3], strict=True)] == one[:3]
        assert one[3] == own[3] == other[3]
    ranks = [open_arrays(rank=rank, world=2, micro_batches_per_step=2) for rank in range(2)]
    given, states = [], []
    for step in zip(*ranks, strict=True):
        given.append([content(each) for each in step])
        (state,) = {json.dumps(loader.state_dict()) for loader in ranks}
        states.append(json.loads(state))
    assert len(given) > 2
    again = [
        open_arrays(rank=rank, world=2, micro_batches_per_step=2, state=states[0])
        for rank in range(2)
    ]
    assert [[content(each) for each in step] for step in zip(*again, strict=True)] == given[1:]
    alone = open_arrays(state=states[0])
    names = [name for batch in batches_of([alone]) for name in batch.sample_ids]
    first = [name for rank in given[0] for batch in rank for name in batch[0]]
    assert sorted(names + first) == sorted(row["id"] for row in array_rows())
    for loader in (*ranks, *again):
        loader.close()


def fails(row):
    raise RuntimeError("no such key\nof this record")


def closed_picture():
    picture = Image.new("RGB", (9, 9))
    picture.close()
    return picture


BAD = {
    "RuntimeError: no such key": fails,
    "it gives a dict; give loaders.Encoded": lambda row: {"input_ids": [1]},
    "input_ids has the shape (1, 2); give (tokens,)": lambda row: Encoded([[1, 2]]),
    "input_ids has the shape (0,); give (tokens,)": lambda row: Encoded([]),
    "input_ids has the dtype float64; give integers": lambda row: Encoded([1.0]),
    "input_ids has -3, which is no id": lambda row: Encoded(torch.tensor([1, -3])),
    f"input_ids has {2**40}, which is no id": lambda row: Encoded(np.array([2**40])),
    "1 labels for 2 input_ids": lambda row: Encoded([1, 2], [1]),
    "labels has -1, which is no id": lambda row: Encoded([1, 2], [1, -1]),
    "media is a str; give a list": lambda row: Encoded([1], media="a.png"),
    "media has attention_mask, which is of the text": lambda row: Encoded(
        [1], media={"attention_mask": [1]}
    ),
    "x of media has no dimension 0": lambda row: Encoded([1], media={"x": 3}),
    "Operation on closed image": lambda row: Encoded([1], media=[closed_picture()]),
    "num_vision is -1; give 0 or more": lambda row: Encoded([1], None, {"x": [1]}, -1),
}


def test_what_is_no_sample_is_rejected_with_its_reason(tmp_path):
    functions = list(BAD.values())
    rows = array_rows(200)

    def encode(row):
        place = int(row["id"][1:])
        return (functions[place] if place < len(functions) else encode_arrays)(row)

    loader = open_arrays(rows, encode=encode, max_rejected=0.2)
    names = [name for batch in batches_of([loader]) for name in batch.sample_ids]
    assert sorted(names) == sorted(row["id"] for row in rows[len(BAD) :])
    found = {each.index: each for each in loader.rejected}
    assert {each.reason for each in found.values()} == {"encode_failed"}
    for index, message in enumerate(BAD):
        assert message in found[index].detail, found[index]
        assert "\n" not in found[index].detail
        assert found[index].sample_id == f"s{index}"
    pictures = [{"id": f"s{number}", "media": [Image.new("RGB", (9, 9))]} for number in range(3)]
    without_model = open_arrays(pictures, encode=lambda row: Encoded([1], media=row["media"]))
    with pytest.raises(DataError, match=r"3 no_vision_encoder.*no model= says what an image is"):
        batches_of([without_model])
    calls = []

    def growing(row):
        calls.append(row)
        return Encoded(np.arange(2 + len(calls)))

    loader = open_arrays(array_rows(12), encode=growing, on_error="raise")
    loader._reader._kept_bytes = 0
    with pytest.raises(DataError, match="another record each time"):
        batches_of([loader])
    other = open_arrays(encode=lambda row: Encoded([1], media={"x": np.zeros((1, row["tokens"]))}))
    # the first token is no label
    with (
        pytest.warns(UserWarning, match="no sample of the first window has a label"),
        pytest.raises(DataError, match=r"x of sample 's\d+' is float64 \(n, \d+\), and of 's\d+'"),
    ):
        batches_of([other])
    loader.close()


def test_with_a_model_image_tokens_must_be_those_of_its_rule(tmp_path):
    rows = records(tmp_path, 40)
    (packed,) = open_ranks(rows, 1, tmp_path, pixel_dtype=torch.uint8)
    encode = as_the_packer(rows, tmp_path, batches_of([packed]))
    with_images = [row["id"] for row in rows if "image" in row]
    wrong = {
        with_images[0]: lambda given: Encoded(given.input_ids[:-1].clone().fill_(3), None),
        with_images[1]: lambda given: Encoded(given.input_ids, given.labels),
        with_images[2]: lambda given: Encoded(given.input_ids, media=["missing.png"]),
        with_images[3]: lambda given: Encoded(given.input_ids, None, [b"no image"]),
    }

    def encode_wrongly(row):
        return wrong.get(row["id"], lambda given: given)(encode(row))

    (loader,) = open_ranks(rows, 1, tmp_path, encode=encode_wrongly, max_rejected=0.2)
    batches = batches_of([loader])
    reasons = {each.sample_id: each.reason for each in loader.rejected}
    expected = ["encode_failed", "missing_image", "corrupt_image"]
    assert reasons == dict(zip(with_images[1:4], expected, strict=True))
    assert sum(batch.num_samples for batch in batches) == 37
    found = next(b for b in batches if with_images[0] in b.sample_ids)
    place = found.sample_ids.index(with_images[0])
    start, end = found.cu_seqlens[place : place + 2].tolist()
    # without labels= all ids are, but the first, which no model predicts
    assert found.labels[start:end].tolist() == [LABEL_IGNORE, *[3] * (end - start - 1)]

    def arrays(row):
        given = encode(row)
        return Encoded(given.input_ids, media={"x": np.ones((3, 2))} if given.media else None)

    (loader,) = open_ranks(rows, 1, tmp_path, encode=arrays)
    for batch in batches_of([loader]):
        images = batch.input_ids == loader.image_token_id
        assert (batch.labels[images] == LABEL_IGNORE).all()
        assert (batch.processed is not None) == bool(images.any())
    assert loader.report()["limits"]["vision_unit"] == "image_patches"

    (loader,) = open_ranks(
        rows, 1, tmp_path, encode=lambda row: (arrays if row["id"] < "s2" else encode)(row)
    )
    with pytest.raises(DataError, match="media of some samples are images, and of others arrays"):
        batches_of([loader])


def test_what_is_made_in_advance_is_bounded_by_the_bytes_of_arrays(tmp_path):
    def encode(row):
        return Encoded([1, 2], media={"x": np.zeros((1, 1 << 18), np.float32)})

    loader = open_arrays(encode=encode, max_tokens=10)
    plan = loader._steps.copy().plan(1)[0]
    made = sum(array.nbytes for batch in next(iter(loader)) for array in batch.processed.values())
    assert made >= 1 << 20
    assert made <= loader._builder.task(plan, 0).num_bytes < 1.1 * made
    assert len(loader._reader._kept) > 1
    loader.close()
    pictures = [[{"x": Image.new("RGB", (4, 4), (n, 0, 0)), "y": torch.tensor(n)}] for n in (1, 2)]
    first, second, again = (Records(each, as_files=False) for each in (*pictures, pictures[0]))
    assert first.fingerprint() == again.fingerprint() != second.fingerprint()


def test_options_that_do_not_fit_are_one_line(tmp_path):
    cases = {
        "context length; give max_tokens=": {"max_tokens": None},
        "lengths_cache cannot know": {"lengths_cache": tmp_path},
        "chat_template: of no use with encode=": {"chat_template": "x"},
        "data_root, images: of no use with encode=; leave out": {
            "data_root": "a",
            "images": "encoded",
        },
        "give model=, processor= or encode=": {"encode": None},
        "cache_key: of no use with model=; leave out": {
            "encode": None,
            "model": "tiny",
            "cache_key": "a",
        },
        "encode is 3": {"encode": 3},
    }
    for message, options in cases.items():
        with pytest.raises(ConfigError, match=message) as caught:
            open_arrays(**options)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="encode= is for records in memory"):
        BalancedLoader("demo", **ARRAYS, encode=encode_arrays)
    short = [row | {"tokens": min(row["tokens"], 70)} for row in array_rows()]
    loader = open_arrays(short, planner=dispatch)
    with pytest.raises(DataError, match="a planner gives images to other ranks"):
        list(loader)
    with pytest.raises(ConfigError, match="use model= and tokenizer="):
        loader.save_build(str(tmp_path / "packed"))
    loader.close()
    first = open_arrays(lengths_cache=tmp_path, cache_key="a")
    expected = [content(step) for step in first]
    again = open_arrays(lengths_cache=tmp_path, cache_key="a")
    assert again.report()["measured"] == len(array_rows())
    assert [content(step) for step in again] == expected
    other = open_arrays(lengths_cache=tmp_path, cache_key="b")
    assert other.report()["measured"] == 0
    for loader in (first, again, other):
        loader.close()
