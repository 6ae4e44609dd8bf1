import json
import shutil
from dataclasses import replace
from functools import partial

import pytest

from isobatch.common.errors import ConfigError, DamagedShard, DataError
from isobatch.packer.verify import MOST_SHOWN, require_intact, verify_build
from isobatch.shards.manifest import write_manifest
from support.builds import bad_pictures as pictures
from support.builds.packed import build, quiet
from support.builds.raw_data import good_records, write_dataset, write_image


@pytest.fixture(params=["arrow", "webdataset", "energon", "refs"])
def built(request, shared, tmp_path):
    def make(folder):
        raw = write_dataset(folder / "raw", good_records(folder / "raw", 20))
        build(raw, folder / "out", format=request.param)

    made = shared(f"to verify {request.param}", make)
    return shutil.copytree(made / "out", tmp_path / "out")


def problems(out):
    return verify_build(out, quiet(), workers=2).problems


def test_an_intact_build_has_no_problems(built):
    verification = verify_build(built, quiet(), workers=2)
    require_intact(verification)
    assert verification.num_samples == 20


@pytest.mark.parametrize(
    "name",
    ["shards/shard-00000", "index.arrow", "sample_ids.arrow", "counts.parquet", "rejected.parquet"],
)
def test_one_flipped_byte_is_found_and_its_file_named(built, name):
    path = next(p for p in built.rglob("*") if str(p.relative_to(built)).startswith(name))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert [problem.split(":")[0] for problem in problems(built)] == [str(path.relative_to(built))]
    with pytest.raises(DamagedShard, match=path.name):
        require_intact(verify_build(built, quiet(), workers=1))


def test_a_missing_and_a_short_shard_are_named(built):
    path = next((built / "shards").iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    assert path.name in problems(built)[0]
    assert "bytes" in problems(built)[0]
    path.unlink()
    assert path.name in problems(built)[0]


def test_totals_that_do_not_add_up_are_found(built):
    path = built / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["content_hash"], manifest["format_version"]
    manifest["totals"]["num_read"] += 1
    manifest["totals"]["num_loss_tokens"] -= 1
    write_manifest(built, manifest)
    found = problems(built)
    assert any("20 packed, but 21 read" in problem for problem in found)
    assert any("num_loss_tokens" in problem for problem in found)


def test_an_edited_manifest_and_a_file_that_nobody_made_are_found(built):
    (built / "shards" / "shard-00099.tar").write_text("who?")
    assert problems(built) == ["shards/shard-00099.tar: is not in the manifest"]
    path = built / "manifest.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(DamagedShard, match="edited"):
        problems(built)
    values = json.loads(path.read_text())
    del values["content_hash"]
    path.write_text(json.dumps(values))
    assert "manifest.json: has no content_hash: it was edited" in problems(built)


def test_no_build_an_unfinished_one_and_a_foreign_manifest_are_clear_errors(built, tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        problems(tmp_path / "nothing")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(
        DataError, match=r"no manifest.json, so no finished build; nothing is there"
    ):
        problems(tmp_path / "nothing")
    with pytest.raises(DataError, match="an empty path"):
        problems("")
    (built / "manifest.json").write_text('{"format_version": 99}')
    with pytest.raises(DataError, match="format_version 99"):
        problems(built)
    (built / "manifest.json").unlink()
    with pytest.raises(DataError, match="no finished build"):
        problems(built)


def test_files_that_a_refs_build_points_to_are_checked_if_asked(tmp_path):
    raw = write_dataset(tmp_path / "raw", good_records(tmp_path / "raw", 20))
    for form in ("refs", "arrow"):
        build(raw, tmp_path / form, format=form)
    check = partial(verify_build, progress=quiet(), workers=2, media=True)
    with pytest.raises(ConfigError, match="--media: the shards of this arrow build hold"):
        check(tmp_path / "arrow")
    with pytest.raises(ConfigError, match="--image-root is for --media"):
        check(tmp_path / "refs", media=False, image_root=str(tmp_path))
    whole = check(tmp_path / "refs")
    assert (whole.problems, whole.num_media) == ([], len(list((raw / "images").iterdir())))
    gone, cut, changed, hollow = sorted((raw / "images").iterdir())[:4]
    gone.unlink()
    cut.write_bytes(cut.read_bytes()[:-300])
    write_image(changed, 12, 34, 0)
    hollow.write_bytes(pictures.png(60, 40, pixels=b"\0" * 100))
    problems = check(tmp_path / "refs").problems
    assert len(problems) == 4
    for path, what in (
        (gone, "missing_image"),
        (cut, "corrupt_image"),
        (changed, "12 x 34 pixels now, "),
        (hollow, "corrupt_image"),
    ):
        (problem,) = (each for each in problems if path.name in each)
        assert problem.startswith("sample 's")
        assert what in problem
    assert verify_build(tmp_path / "refs", quiet(), workers=2).problems == []
    (tmp_path / "elsewhere").mkdir()
    lost = check(tmp_path / "refs", image_root=str(tmp_path / "elsewhere")).problems
    assert len(lost) == whole.num_media > MOST_SHOWN
    with pytest.raises(DataError) as error:
        require_intact(replace(whole, problems=lost))
    assert str(error.value).count("; sample '") == MOST_SHOWN - 1
    assert str(error.value).endswith(f"; and {len(lost) - MOST_SHOWN} more (all: --json)")
    with pytest.raises(ConfigError, match="nowhere: no such folder; give theirs with --image-root"):
        check(tmp_path / "refs", image_root=str(tmp_path / "nowhere"))
