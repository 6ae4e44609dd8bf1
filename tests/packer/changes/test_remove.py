"""`packer remove`: samples leave a build and every file of it, and nothing else does."""

import json
import shutil

import pytest

from isobatch.balance.rng import random_permutation
from isobatch.common.errors import ConfigError, DamagedShard, DataError
from isobatch.packer.changes.remove import remove_samples
from isobatch.packer.changes.sample_names import SampleNames, read_ids
from isobatch.packer.changes.target import Target
from isobatch.packer.report.figures import make_report
from isobatch.packer.upload import save_html
from isobatch.packer.verify import require_intact, verify_build
from isobatch.shards.manifest import read_manifest
from support.builds.packed import digests, quiet, read_index
from support.growing.halves import FIRST, NEW, add, by_sample, pack, samples_of


def remove(out, ids=(), sources=(), **changes):
    names = SampleNames(ids=tuple(ids), sources=tuple(sources))
    return remove_samples(str(out), names, quiet(), workers=1, **changes)


def verify_absent(out, ids):
    names = SampleNames(ids=tuple(ids))
    require_intact(verify_build(out, quiet(), workers=2, absent=names))


def bytes_of(out):
    return b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())


def test_removed_samples_are_in_no_file_and_all_others_are_as_they_were(packed):
    before, manifest = by_sample(packed), read_manifest(packed)
    gone = ["id-000", "id-003", "id-040", "id-149"]
    with pytest.raises(DamagedShard, match=r"has \d samples? that must be absent"):
        verify_absent(packed, gone)
    old_groups = {tuple(row["sample_ids"]) for row in read_index(packed).to_pylist()}
    result = remove(packed, gone)
    assert result.num_samples == 4
    verify_absent(packed, gone)
    left = {name: value for name, value in before.items() if name not in gone}
    assert by_sample(packed) == left
    assert samples_of(packed) == left.keys()
    new_groups = {tuple(row["sample_ids"]) for row in read_index(packed).to_pylist()}
    whole = {group for group in old_groups if not set(group) & set(gone)}
    assert whole <= new_groups
    now = read_manifest(packed)
    assert now.values["totals"]["num_packed"] == manifest.num_packed - 4
    assert now.values["removed"] == 4
    assert len(now.shards) >= len({shard.name for shard in now.shards})
    content = bytes_of(packed)
    assert not [name for name in gone if name.encode() in content]
    report = make_report(packed)
    assert (report.num_read, report.num_packed) == (FIRST - 4, FIRST - 5)


def test_nothing_of_them_is_between_the_columns_of_other_groups(packed):
    gone = [f"id-{number:03d}" for number in (55, 77, 91, 92, 103, 107, 122, 124, 130, 141)]
    remove(packed, gone)
    content = bytes_of(packed)
    assert not [name for name in gone if name.encode() in content]


def test_what_a_killed_change_left_is_no_proof_and_goes_with_the_next_run(arrow_build, monkeypatch):
    save_html(make_report(arrow_build), str(arrow_build))
    assert b"secret of id-000" in (arrow_build / "report.html").read_bytes()
    shutil.copy(arrow_build / "manifest.json", arrow_build / "manifest.json-0123.tmp")

    def only_shards(target, manifest):
        names = {file.name for file in manifest.shards}
        for path in (arrow_build / "shards").iterdir():
            if f"shards/{path.name}" not in names:
                path.unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Target, "clean", only_shards)
        with pytest.raises(KeyboardInterrupt):
            remove(arrow_build, ["id-000"])
    assert read_manifest(arrow_build).values["removed"] == 1
    with pytest.raises(DamagedShard, match=r"sample_ids\.arrow: is of a change that was not fini"):
        verify_absent(arrow_build, ["id-000"])
    assert remove(arrow_build, ["id-000"]).num_samples == 0
    verify_absent(arrow_build, ["id-000"])
    assert b"id-000" not in bytes_of(arrow_build)


def test_groups_keep_the_caps_when_most_samples_go(packed):
    manifest = read_manifest(packed)
    everything = sorted(by_sample(packed))
    order = random_permutation(len(everything), 1, 1).tolist()
    gone = [everything[place] for place in order[: len(order) * 2 // 3]]
    remove(packed, gone)
    verify_absent(packed, gone)
    index = read_index(packed).to_pylist()
    for row in index:
        tokens = sum(row[f"num_{kind}_tokens"] for kind in ("image", "text", "audio"))
        assert tokens <= manifest.limits.max_seq_len
        assert row["num_image_patches"] <= manifest.limits.max_vision
    assert len(index) < manifest.num_groups * 0.6
    assert samples_of(packed) == set(everything) - set(gone)


def test_a_source_goes_with_its_rejected_samples(packed, halves):
    before = by_sample(packed)
    add(halves, packed)
    result = remove(packed, sources=["new"])
    assert (result.num_samples, result.num_rejected) == (NEW - 1, 1)
    assert by_sample(packed) == before
    require_intact(verify_build(packed, quiet(), workers=1))
    totals = read_manifest(packed).values["totals"]
    assert (totals["num_read"], totals["num_rejected"]) == (FIRST, 1)
    assert b"id-157" not in bytes_of(packed)  # which was rejected
    result = remove(packed, ["id-007"])
    assert (result.num_samples, result.num_rejected) == (0, 1)
    assert read_manifest(packed).values["totals"]["num_read"] == FIRST - 1
    with pytest.raises(DataError, match="no sample would be left"):
        remove(packed, sources=["first"])


def test_further_samples_of_an_id_go_with_it(arrow_build):
    assert {"twice", "twice#2"} <= samples_of(arrow_build)
    assert remove(arrow_build, ["twice"]).num_samples == 2
    verify_absent(arrow_build, ["twice"])
    assert not {"twice", "twice#2"} & samples_of(arrow_build)


def test_what_is_not_there_is_said_and_changes_nothing(arrow_build):
    before = digests(arrow_build)
    result = remove(arrow_build, ["nobody"], ["nothing"])
    assert (result.num_samples, result.num_rejected, result.num_shards) == (0, 0, 0)
    after = digests(arrow_build)
    after.pop("report.html")  # a build that has none gets one
    assert after == before


def test_a_build_that_lost_samples_can_grow(packed, halves):
    remove(packed, ["id-003"])
    add(halves, packed)
    require_intact(verify_build(packed, quiet(), workers=1))
    assert read_manifest(packed).num_packed == FIRST + NEW - 3
    remove(packed, ["id-004", "id-200"])
    verify_absent(packed, ["id-003", "id-004", "id-200"])
    names = [shard.name for shard in read_manifest(packed).shards]
    assert len(set(names)) == len(names)


def test_padding_counts_after_it(halves, tmp_path):
    out = pack(halves, tmp_path / "out", pad_each_to=64, keep_columns=("score",))
    remove(out, [f"id-{number:03d}" for number in range(0, 100, 3)])
    require_intact(verify_build(out, quiet(), workers=1))
    for row in read_index(out).to_pylist():
        tokens = sum(row[f"num_{kind}_tokens"] for kind in ("image", "text", "audio"))
        assert tokens + row["num_padding"] <= 2048
        assert (tokens + row["num_padding"]) % 64 == 0


def test_damage_in_a_shard_is_found_before_it_is_copied(packed):
    name = read_manifest(packed).shards[0].name
    content = bytearray((packed / name).read_bytes())
    content[len(content) // 2] ^= 1
    (packed / name).write_bytes(bytes(content))
    before = digests(packed)
    with pytest.raises(DamagedShard, match=r"another checksum.*packer verify"):
        remove(packed, [f"id-{number:03d}" for number in range(FIRST)][::2])
    after = {n: v for n, v in digests(packed).items() if n in before}
    assert after == before


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("none.txt", None, "cannot be read"),
        ("empty.txt", "\n \n", "no ids in it"),
        ("ids.json", "{}", "not a list of ids"),
        ("bad.json", "[1,", "not a list of ids"),
    ],
)
def test_a_wrong_file_of_ids_is_refused(tmp_path, name, content, problem):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=problem):
        read_ids(tmp_path / name)


def test_ids_are_lines_or_a_json_list(tmp_path):
    (tmp_path / "a.txt").write_text("x y\n\nz\nz\n")
    (tmp_path / "a.json").write_text(json.dumps(["x y", 5]))
    assert read_ids(tmp_path / "a.txt") == ("x y", "z")
    assert read_ids(tmp_path / "a.json") == ("x y", "5")
    # ids are any texts, and what was not found by its id was said to be absent
    odd = [" blanks ", "a\nb", "x\x85y", "ü\u2028ü", "#3"]
    (tmp_path / "odd.txt").write_text(json.dumps(odd))
    assert read_ids(tmp_path / "odd.txt") == tuple(odd)
    (tmp_path / "lines.txt").write_text("\ufeffx\x85y\r\nü\u2028ü\n", newline="")
    assert read_ids(tmp_path / "lines.txt") == ("x\x85y", "ü\u2028ü")
