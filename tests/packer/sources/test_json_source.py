import json
import tracemalloc
from multiprocessing.reduction import ForkingPickler

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.common.errors import DataError
from isobatch.counting.records.record import MOST_DEPTH
from isobatch.packer.sources import json_source as json_records
from isobatch.packer.sources.base import FilePiece, cut
from isobatch.packer.sources.json_source import read_json_records
from isobatch.shards.folders import open_folder
from support.cases import for_each

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
records = st.fixed_dictionaries(
    {
        "id": texts,
        "conversations": st.lists(
            st.fixed_dictionaries({"from": texts, "value": texts}), max_size=3
        ),
    },
    optional={
        "image": texts,
        "score": st.floats(allow_nan=False),
        "nested": st.lists(st.lists(st.integers())),
    },
)


def records_of(path):
    return read_json_records(open_folder(str(path.parent)), FilePiece(path.name))


def read(path):
    return [(r.position, r.value, r.broken) for r in records_of(path)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(records, min_size=1, max_size=6),
    st.sampled_from([None, 1, "\t"]),
    st.booleans(),
    st.integers(1, 64),
    st.booleans(),
)
def test_any_layout_and_any_block_size_give_the_same_records(
    tmp_path_factory, rows, indent, ascii_only, block, bom
):
    folder = tmp_path_factory.mktemp("json")
    dump = {"ensure_ascii": ascii_only}
    (folder / "a.json").write_text(
        "\ufeff" * bom + json.dumps(rows, indent=indent, **dump), "utf-8"
    )
    (folder / "a.jsonl").write_text(
        "\n\n".join(json.dumps(row, **dump) for row in rows) + "\n" * bom, "utf-8"
    )
    expected = [(i, row, "") for i, row in enumerate(rows)]
    original = json_records.BLOCK_BYTES
    json_records.BLOCK_BYTES = block
    try:
        assert read(folder / "a.json") == expected
        assert read(folder / "a.jsonl") == expected
    finally:
        json_records.BLOCK_BYTES = original


def turns(i):
    return {
        "id": str(i),
        "conversations": [{"from": "human", "value": f"q{i}"}, {"from": "gpt", "value": f"a{i}"}],
    }


DAMAGE = {
    "missing quote": ('"id": "3"', '"id": "3'),
    "missing comma": ('"3", "conv', '"3" "conv'),
    "bare word": ('"id": "3"', '"id": oops'),
    "missing brace": ('"value": "a3"}]}', '"value": "a3"}]'),
    "extra brace": ('"value": "a3"}]}', '"value": "a3"}]}}'),
    "control character": ('"a3"', '"a\x01"'),
}


@for_each("block", [16, 1 << 20])
@for_each("damage", DAMAGE)
@for_each("layout", ["array", "indented array", "lines"])
def test_one_broken_record_costs_that_record(tmp_path, monkeypatch, layout, damage, block):
    monkeypatch.setattr(json_records, "BLOCK_BYTES", block)
    rows = [turns(i) for i in range(8)]
    text = "\n".join(map(json.dumps, rows)) if layout == "lines" else json.dumps(rows, indent=None)
    assert DAMAGE[damage][0] in text
    text = text.replace(*DAMAGE[damage])
    if layout == "indented array":
        text = text.replace('{"id"', '\n {\n  "id"')
    path = tmp_path / "a.json"
    path.write_text(text)
    found = read(path)
    assert [value["id"] for _, value, broken in found if not broken] == [
        str(i) for i in range(8) if i != 3 or (damage == "extra brace" and layout != "lines")
    ]
    broken = [message for _, _, message in found if message]
    assert len(broken) == 1
    assert "line " in broken[0]
    assert [position for position, _, _ in found] == list(range(len(found)))


def test_a_file_that_ends_early_gives_what_was_whole_and_says_so(tmp_path):
    text = json.dumps([turns(i) for i in range(5)])
    path = tmp_path / "a.json"
    path.write_text(text[: text.index('"a4"')])
    found = read(path)
    assert [value["id"] for _, value, broken in found if not broken] == list("0123")
    assert found[4][2] or found[-1][2]


def test_invalid_utf8_reaches_the_record_that_holds_it_and_no_other(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(json.dumps([turns(0), turns(1), turns(2)]).encode().replace(b"q1", b"q\xff"))
    values = [value for _, value, _ in read(path)]
    assert values[0] == turns(0)
    assert values[2] == turns(2)
    assert values[1]["conversations"][0]["value"] == "q\udcff"


@pytest.mark.parametrize("layout", ["array", "lines"])
def test_files_of_many_blocks_lose_nothing(tmp_path, monkeypatch, layout):
    """Several records per block, blocks that end inside characters of several bytes, and no newline
    at the end.
    """
    monkeypatch.setattr(json_records, "BLOCK_BYTES", 4096)
    rows = [turns(i) | {"text": "\u00e4\u6f22\U0001f600" * (i % 50)} for i in range(700)]
    texts = [json.dumps(row, ensure_ascii=False) for row in rows]
    path = tmp_path / "a.json"
    path.write_text("\n".join(texts) if layout == "lines" else f"[{','.join(texts)}]", "utf-8")
    assert [value for _, value, _ in read(path)] == rows


def test_text_behind_the_array_is_reported(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([turns(0)]) + "\n" + json.dumps([turns(1)]))
    found = read(path)
    assert found[0][1] == turns(0)
    assert "more after the end of the array" in found[1][2]


def test_objects_spread_over_lines_are_records_too(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("\n".join(json.dumps(turns(i), indent=2) for i in range(4)))
    assert [value for _, value, _ in read(path)] == [turns(i) for i in range(4)]


def test_a_line_that_never_ends_is_one_broken_record(tmp_path, monkeypatch):
    monkeypatch.setattr(json_records, "BLOCK_BYTES", 256)
    monkeypatch.setattr(json_records, "MAX_RECORD_CHARS", 2000)
    path = tmp_path / "a.json"
    path.write_text(
        json.dumps(turns(0)) + "\n" + "{" + "x" * 20_000 + "}\n" + json.dumps(turns(2)) + "\n"
    )
    found = read(path)
    assert [bool(broken) for _, _, broken in found] == [False, True, False]
    assert found[2][1] == turns(2)


@pytest.mark.parametrize(("content", "message"), [("", "is empty"), ("hello", "begins with 'h'")])
def test_a_file_that_is_no_records_is_one_clear_error(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read(path)


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "a.json"
    row = json.dumps(turns(0) | {"filler": "x" * 2000})
    path.write_text("[" + ",\n".join([row] * 10_000) + "]")
    assert path.stat().st_size > 20_000_000
    tracemalloc.start()
    assert sum(1 for _ in records_of(path)) == 10_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * json_records.BLOCK_BYTES


def test_a_deep_record_is_kept_or_rejected_whatever_reads_it_and_goes_to_any_process(
    tmp_path, monkeypatch
):
    def from_frames(number, path):
        return from_frames(number - 1, path) if number else read(path)

    monkeypatch.setattr(json_records, "BLOCK_BYTES", 64)
    good = json.dumps({"text": '] a [ "{', "more": {"text": 1}})
    for depth in (3, MOST_DEPTH - 1, MOST_DEPTH, 490, 500, 700, 900, 960, 990, 3000, 50_000):
        for opened, closed in ("[]", ('{"text":', "}")):
            deep = f'{{"text": "x", "deep": {opened * depth}1{closed * depth}}}'
            (tmp_path / "a.json").write_text(f"[{good},\n {deep},{good}]")
            (tmp_path / "a.jsonl").write_text(f"{good}\n{deep}\n{good}\n")
            for name in ("a.json", "a.jsonl"):
                found = read(tmp_path / name)
                assert len(found) == 3, (depth, name)
                is_kept = [not broken for _, _, broken in found]
                assert is_kept == [True, depth < MOST_DEPTH, True], (depth, name)
                assert found[1][2] in {"", f"line 2: it is nested more than {MOST_DEPTH} deep"}
                assert from_frames(200, tmp_path / name) == found
                for chunk in cut(records_of(tmp_path / name), 2):
                    ForkingPickler.dumps(chunk)
