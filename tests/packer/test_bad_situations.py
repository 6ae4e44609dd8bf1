"""Every line of the table of situations in docs/reference/bad_input.md, with the real command: one
clear line, no traceback.
"""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq
import pytest

from support import ranks
from support.builds.bad_samples import rows_of
from support.builds.layouts import write_mds, write_tar
from support.builds.raw_data import options, record, write_dataset, write_image

GOOD = json.dumps([record(0), record(1)]).encode()
SIMPLE = [
    ("annotations are not there", "no dataset", None),
    ("annotations are an empty file", "is empty", b""),
    ("annotations are an empty list", "holds no records", b"[]"),
    ("annotations are a binary file", "begins with", b"\x89PNG\r\n\x1a\n" * 100),
    ("annotations are in UTF-16", "begins with", GOOD.decode().encode("utf-16")),
    ("annotations are gzip, cut short", "ended before", gzip.compress(GOOD)[:-20]),
    (
        "no sample can be used",
        "nothing to pack: all 1 samples were rejected",
        json.dumps([record(0, ["a.png"])]).encode(),
    ),
]
"""What is wrong with the annotation file, what the command says, and the file's content."""
SITUATIONS = [(what, "stops", "1") for what, _, _ in SIMPLE]


def situation(what, happens, status):
    """Mark the test of a line of the table."""
    SITUATIONS.append((what, happens, str(status)))
    return lambda test: test


COMMAND = [sys.executable, "-m", "packer"]


def build_command(dataset, out, *more):
    tokenizer = options(dataset, out)["tokenizer"]
    places = ["--dataset", str(dataset), "--out", str(out)]
    values = ["--model", "tiny", "--tokenizer", tokenizer, "--workers", "1"]
    return [*COMMAND, "build", *places, *values, *map(str, more)]


def require_clear(stderr, error=""):
    """At most one line per stage and, if `error` is given, one that begins with `error:` and holds
    it.
    """
    lines = stderr.splitlines()
    assert "Traceback" not in stderr
    assert len(lines) <= 5
    assert [line.startswith("error: ") for line in lines if "rror" in line] == [True] * bool(error)
    assert error in stderr


def run(command, status=0, error=""):
    """-> (stdout, stderr) of a command that ends as it should, in a process that need not import
    everything again: `packer`, or a program that runs it after arguments of its own.
    """
    place = command.index(COMMAND[0])
    program = command[:place] or COMMAND[-1:]
    arguments = command[place + len(COMMAND) :]
    with TemporaryDirectory() as folder:
        done = ranks.launch(1, Path(folder), *program, *arguments, most_s=120)
    require_clear(done.stderr, error)
    assert done.returncode == status
    return done.stdout, done.stderr


@pytest.fixture
def raw(tmp_path):
    return write_dataset(tmp_path / "raw", [record(number) for number in range(20)])


@pytest.mark.parametrize(
    ("error", "content"), [pytest.param(*row, id=what) for what, *row in SIMPLE]
)
def test_annotations_that_cannot_be_used(tmp_path, error, content):
    path = tmp_path / ("a.json.gz" if content and content.startswith(b"\x1f\x8b") else "a.json")
    if content is not None:
        path.write_bytes(content)
    run(build_command(path, tmp_path / "out"), 1, error)
    assert not (tmp_path / "out" / "manifest.json").exists()


@situation("annotations were broken, and are repaired", "the same command builds them", 0)
def test_a_build_that_could_not_begin_is_in_nobodys_way(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"PK")
    run(build_command(path, tmp_path / "out"), 1, "begins with")
    path.write_bytes(GOOD)
    printed, _ = run(build_command(path, tmp_path / "out"))
    assert "2 samples read = 2 packed" in printed


@situation("`--dataset` is a folder without data", "stops", 1)
def test_a_folder_without_data(tmp_path):
    (tmp_path / "raw.json").mkdir()
    run(build_command(tmp_path / "raw.json", tmp_path / "out"), 1, "no dataset in")
    assert not (tmp_path / "out").exists()


@situation(
    "members of one sample of a tar are not next to each other", "stops and names both places", 1
)
def test_a_torn_sample(tmp_path):
    members = [("a.txt", b"A"), ("b.txt", b"B"), ("a.cls", b"1")]
    place = write_tar(tmp_path / "0.tar", members)
    message = "the members of a are not next to each other: txt in sample 1, cls in sample 3"
    run(build_command(place, tmp_path / "out"), 1, message)


@situation(
    "members of a tar with an unusual suffix",
    "used if their first bytes say image, video or audio; else reported as never read",
    0,
)
def test_members_by_content(tmp_path):
    write_image(tmp_path / "a.png", 32, 32, 0)
    image = (tmp_path / "a.png").read_bytes()
    members = [("a.img", image), ("a.npy", b"12"), ("a.txt", b"A cat.")]
    place = write_tar(tmp_path / "raw" / "0.tar", members)
    printed, _ = run(build_command(place, tmp_path / "out"))
    assert "1 sample read = 1 packed" in printed
    assert 'never read: .npy (1 record, e.g. "2 bytes")' in printed
    assert pq.read_table(tmp_path / "out" / "counts.parquet")["num_image_patches"].to_pylist()[0]


def energon(folder, about, **splits):
    """An Energon folder with a shard of one text for each split."""
    for name in splits:
        write_tar(folder / f"{name}.tar", [(f"{name}.txt", b"A text.")])
    meta = folder / ".nv-meta"
    meta.mkdir()
    counts = {f"{name}.tar": 1 for name in splits}
    (meta / ".info.json").write_text(json.dumps({"shard_counts": counts}))
    parts = {name: [f"{name}.tar"] for name in splits}
    (meta / "split.yaml").write_text(json.dumps({"split_parts": parts}))
    (meta / "dataset.yaml").write_text(json.dumps(about))
    return folder


@situation("samples of an Energon folder are made by code (`sample_loader`)", "stops", 2)
def test_an_energon_folder_of_samples_that_code_makes(tmp_path):
    about = {"sample_type": {"__class__": "TextSample"}, "sample_loader": "loader.py:load"}
    place = energon(tmp_path / "raw", about, train=1)
    run(build_command(place, tmp_path / "out"), 2, "made by a sample_loader, code not")


@situation("samples of an Energon folder are crude", "read by the suffixes of their members", 0)
def test_an_energon_folder_of_crude_samples(tmp_path):
    place = energon(tmp_path / "raw", {"__class__": "CrudeWebdataset"}, train=1)
    assert "1 sample read = 1 packed" in run(build_command(place, tmp_path / "out"))[0]


@situation("an Energon metadataset has a `join`, or an unknown key", "stops", 2)
def test_a_metadataset_with_a_join(tmp_path):
    file = tmp_path / "mix.yaml"
    file.write_text(json.dumps({"splits": {"train": {"join": [], "joiner": "x"}}}))
    run(build_command(file, tmp_path / "out"), 2, "`join` joins samples by code")
    file.write_text(json.dumps({"splits": {"train": {"path": "a", "wait": 1}}}))
    run(build_command(file, tmp_path / "out"), 2, "unknown key 'wait'; known: aux, dataset_config")


@situation("a shard of an MDS dataset is cut short, or missing", "stops", 1)
def test_an_mds_shard_that_is_cut(tmp_path):
    place = write_mds(tmp_path / "raw", {"text": "str"}, [{"text": "A text."}] * 3)
    shard = place / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-1])
    run(build_command(place, tmp_path / "out"), 1, "is cut short or another; copy it again")
    shard.unlink()
    run(build_command(place, tmp_path / "out"), 1, "shard.00000.mds: cannot be read: No such file")


@situation("shards of an MDS dataset are of another format or version", "stops", 2)
def test_an_mds_dataset_of_another_format(tmp_path):
    place = write_mds(tmp_path / "raw", {"text": "str"}, [{"text": "A text."}], format="old")
    run(
        build_command(place, tmp_path / "out"),
        2,
        "are shards of mds, json, xsv, csv, tsv, version 2",
    )


@situation("a shard of an MDS dataset has another hash than its index says", "stops", 1)
def test_an_mds_shard_that_is_damaged(tmp_path):
    place = write_mds(tmp_path / "raw", {"text": "str"}, [{"text": "A text."}] * 3)
    index = json.loads((place / "index.json").read_text())
    index["shards"][0]["raw_data"]["hashes"] = {"md5": "0" * 32}
    (place / "index.json").write_text(json.dumps(index))
    run(
        build_command(place, tmp_path / "out"),
        1,
        "its md5 is not that of index.json: it is damaged",
    )


@situation("`--dataset` is a build of another model or tokenizer", "stops", 2)
def test_a_build_of_another_model(tmp_path):
    place = write_mds(tmp_path / "raw", {"text": "str"}, [{"text": "A text."}] * 3)
    run(build_command(place, tmp_path / "first"))
    again = [*build_command(tmp_path / "first", tmp_path / "out"), "--model", "tiny_audio"]
    run(again, 2, "was packed with another one")


@situation("shards of an Energon folder's other splits", "not read", 0)
def test_an_energon_folder_of_splits(tmp_path):
    about = {"sample_type": {"__class__": "TextSample"}, "field_map": {"text": "txt"}}
    place = energon(tmp_path / "raw", about, train=1, val=1, test=1)
    assert "1 sample read = 1 packed" in run(build_command(place, tmp_path / "out"))[0]


@situation("`exclude` of an Energon split", "left out; their number is said", 0)
def test_an_energon_folder_that_leaves_samples_out(tmp_path):
    about = {"sample_type": {"__class__": "TextSample"}, "field_map": {"text": "txt"}}
    place = energon(tmp_path / "raw", about, train=1, more=1)
    split = {"split_parts": {"train": ["train.tar", "more.tar"]}, "exclude": ["more.tar"]}
    (place / ".nv-meta" / "split.yaml").write_text(json.dumps(split))
    out = run(build_command(place, tmp_path / "out"))[0]
    assert "never read: exclude of split.yaml (of the dataset, e.g. 1 sample)" in out


@situation(
    "InternVL's meta JSON or Energon's `dataset.yaml` has a key that nothing reads",
    "used; the key is named as never read",
    0,
)
def test_a_meta_json_with_a_key_that_nothing_reads(tmp_path):
    (tmp_path / "a.json").write_bytes(GOOD)
    entry = {"root": str(tmp_path), "annotation": "a.json", "repeat_time": 1, "length": 1}
    (tmp_path / "meta.json").write_text(json.dumps({"a": entry}))
    out = run(build_command(tmp_path / "meta.json", tmp_path / "out"))[0]
    assert "never read: length of meta.json (of the dataset, e.g. 1)" in out


@situation("`sampling_strategy` of 0 records", "stops and says what LLaVA-NeXT takes", 2)
def test_a_sampling_of_nothing(tmp_path):
    (tmp_path / "a.json").write_bytes(GOOD)
    entry = {"json_path": "a.json", "sampling_strategy": "end:0"}
    (tmp_path / "mix.yaml").write_text(json.dumps({"datasets": [entry]}))
    run(build_command(tmp_path / "mix.yaml", tmp_path / "out"), 2, "NeXT takes all records; say")


@situation(
    "`--columns` names a column that the first records do not have, or no field of ours",
    "stops and lists what there is",
    2,
)
def test_columns_that_are_not_there(raw, tmp_path):
    command = build_command(raw, tmp_path / "out", "--columns", "messages=chat")
    run(command, 2, "no 'chat' in the first records of")


@situation(
    "`dataset_info.json` or a YAML of datasets has a key that is not read",
    "stops and lists the known ones",
    2,
)
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("dataset_info.json", {"a": {"file_name": "a.json", "weight": 2}}, "key 'weight'; known: "),
        ("mix.yaml", {"datasets": [{"json_path": "a.json", "weight": 2}]}, "key 'weight'; known: "),
    ],
)
def test_a_description_with_a_key_that_is_not_read(tmp_path, name, content, message):
    (tmp_path / "a.json").write_bytes(GOOD)
    (tmp_path / name).write_text(json.dumps(content))
    run(build_command(tmp_path / name, tmp_path / "out"), 2, message)


@situation("`--data-root` is not there", "stops", 1)
def test_no_data_root(raw, tmp_path):
    run(
        build_command(raw, tmp_path / "out", "--data-root", tmp_path / "nowhere"), 1, "no data root"
    )
    assert not (tmp_path / "out").exists()
    told = "no such folder or file, nor a Hub id (OWNER/NAME); and no data root"
    wrong = ["--tokenizer", tmp_path / "nobody", "--data-root", tmp_path / "nowhere"]
    run(build_command(raw, tmp_path / "out", *wrong), 2, told)


@situation("`--out` is a file, or below one", "stops", 1)
@pytest.mark.parametrize("out", ["file", "file/out"])
def test_the_output_is_a_file(raw, tmp_path, out):
    (tmp_path / "file").write_text("in the way")
    run(build_command(raw, tmp_path / out), 1, str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "in the way"


@situation(
    "`--out` holds another unfinished build, or a finished one", "stops; nothing is touched", 1
)
def test_the_output_is_of_another_build(raw, tmp_path):
    rows = [record(0), record(1, ["nowhere.png"])]
    run(
        build_command(write_dataset(tmp_path / "other", rows), tmp_path / "out"),
        1,
        "more than --max-rejected",
    )
    run(build_command(raw, tmp_path / "out"), 1, "unfinished build of other data or settings")
    run(build_command(tmp_path / "other", tmp_path / "out", "--max-rejected", 1))
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "out").rglob("*"))
    run(build_command(raw, tmp_path / "out"), 1, "finished build of other data or settings")
    demo = [*build_command(raw, tmp_path / "out"), "--dataset", "demo"]  # the last one counts
    run(demo, 1, "finished build of other data or settings")
    assert before == sorted(
        (path, path.stat().st_mtime_ns) for path in (tmp_path / "out").rglob("*")
    )


@situation(
    "more samples are rejected than `--max-rejected` allows (default 5 %)",
    "stops and leaves rejected.parquet;"
    " with a higher value the same command resumes and does not count again",
    1,
)
def test_too_many_rejected(tmp_path):
    rows = [record(number, ["nowhere.png"] if number < 2 else []) for number in range(20)]
    command = build_command(write_dataset(tmp_path / "raw", rows), tmp_path / "out")
    _, stderr = run(
        command, 1, "2 of 20 samples (10.0%) cannot be used, more than --max-rejected 0.05 allows"
    )
    assert stderr.startswith("count ")
    assert (
        "2 missing_image, first s0: nowhere.png; paths of files start from --data-root. All"
        in stderr
    )
    assert pq.read_table(tmp_path / "out" / "rejected.parquet").column("sample_id").to_pylist() == [
        "s0",
        "s1",
    ]
    assert not (tmp_path / "out" / "manifest.json").exists()
    printed, stderr = run([*command, "--max-rejected", "0.1"])
    assert "count " not in stderr
    assert "20 samples read = 18 packed" in printed


@situation("images are repaired after that", "`--overwrite` counts again", 0)
def test_repaired_images(tmp_path):
    raw = write_dataset(
        tmp_path / "raw", [record(number, [f"{number}.png"]) for number in range(2)]
    )
    run(
        build_command(raw, tmp_path / "out"),
        1,
        "repair the data or change the settings, and add --overwrite",
    )
    for number in range(2):
        write_image(raw / f"{number}.png", 60, 40, number)
    printed, _ = run(build_command(raw, tmp_path / "out", "--overwrite"))
    assert "2 samples read = 2 packed" in printed


READ_ONLY = """
import sys
from isobatch.packer.cli import main
from support.ranks import mount_disk
mount_disk(sys.argv.pop(1), "1m", flags=1)
main()
"""
FULL = """
import os, subprocess, sys
from isobatch.packer.cli import main
from support.ranks import mount_disk
folder, first = sys.argv.pop(1), sys.argv.pop(1)
mount_disk(folder, "600k")
if not os.fork():
    os.dup2(os.open(first, os.O_WRONLY | os.O_CREAT), 2)
    try:
        main()
    except SystemExit as left:
        os._exit(left.code)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
assert not os.path.exists(f"{folder}/out/manifest.json")
subprocess.run(["mount", "-o", "remount,size=64m", folder], check=True)
main()
"""
"""Programs that mount a disk at their first argument, and run `packer` with those after it."""


@situation("`--out` cannot be written", "stops", 1)
def test_an_output_that_cannot_be_written(raw, tmp_path, small_disk):
    folder, _ = small_disk("1m")
    program = tmp_path / "program.py"
    program.write_text(READ_ONLY)
    command = build_command(raw, folder / "out")
    run([program, folder, *command], 1, f"{folder / 'out'}: Read-only file system")


@situation("the disk is full", "stops; with more room the same command resumes", 1)
@pytest.mark.parametrize("stage", ["count", "write"])
def test_a_full_disk(tmp_path, small_disk, stage):
    folder, _ = small_disk("1m")
    rows = [record(number, answer="word " * 150 * (stage == "count")) for number in range(1100)]
    if stage == "write":
        write_image(tmp_path / "raw" / "a.png", 500, 500, 0)
        rows = [record(number, ["a.png"]) for number in range(4)]
    command = build_command(write_dataset(tmp_path / "raw", rows), folder / "out")
    first = tmp_path / "first.txt"
    program = tmp_path / "program.py"
    program.write_text(FULL)
    printed, _ = run([program, folder, first, *command])
    require_clear(first.read_text(), "no space left on device")
    assert ("count " in first.read_text()) == (stage == "write")
    assert f"{len(rows):,} samples read = {len(rows):,} packed" in printed


def start(command, moment):
    """Start a command in a process group of its own, and wait until `moment()`."""
    child = subprocess.Popen(
        command, start_new_session=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not moment(child) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    return child


def appears(path):
    return lambda _: path.exists()


def hold_last(folder, count):
    """-> (a dataset of `count` records, options with which counting it, in small chunks, does not
    end before there is a file `folder/go`).
    """
    rows = [record(number) for number in range(count)]
    code = (
        "import time\nfrom pathlib import Path\n\n\ndef hold(record):\n"
        f"    while record['id'] == 's{count - 1}' and not Path({str(folder / 'go')!r}).exists():\n"
        "        time.sleep(0.005)\n    return record\n"
    )
    (folder / "hold.py").write_text(code)
    (folder / "small.toml").write_text("chunk_records = 8")
    held = ["--map", f"{folder / 'hold.py'}:hold", "--config", folder / "small.toml"]
    return write_dataset(folder / "raw", rows), held


@situation("two builds into one output at once", "the second stops; the first continues", 1)
def test_two_builds_at_once(tmp_path):
    raw, held = hold_last(tmp_path, 40)
    command = build_command(raw, tmp_path / "out", *held)
    first = start(command, appears(tmp_path / "out" / "staging" / "build.json"))
    try:
        run(command, 1, "another packer is writing")
    finally:
        (tmp_path / "go").touch()
    printed, stderr = first.communicate(timeout=60)
    require_clear(stderr)
    assert first.returncode == 0
    assert "40 samples read = 40 packed" in printed


def is_loading(pid):
    """Whether the first large module of a process is there, and so the others are not."""
    maps = Path(f"/proc/{pid}/maps")
    return maps.exists() and "_multiarray_umath" in maps.read_text()


def a_worker_is_loading(child):
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
    return children.exists() and any(map(is_loading, children.read_text().split()))


MOMENTS = {
    "loading": lambda out: lambda child: is_loading(child.pid),
    "workers loading": lambda out: a_worker_is_loading,
    "counting": lambda out: appears(out / "staging" / "parts" / "000000.arrow"),
}


@situation("Ctrl-C, early or late, also twice", "stops; the same command resumes", 130)
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt(tmp_path, moment):
    raw, held = hold_last(tmp_path, 50)
    command = build_command(raw, tmp_path / "out", "--workers", 2, *held)
    child = start(command, MOMENTS[moment](tmp_path / "out"))
    for _ in range(2):
        os.killpg(child.pid, signal.SIGINT)  # to all its processes, as a terminal does
        time.sleep(0.02)
    (tmp_path / "go").touch()
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130
    require_clear(stderr, "stopped")
    printed, _ = run([*command, "--workers", 1])  # the last one counts
    assert "50 samples read = 50 packed" in printed


@situation(
    "SIGTERM, in the background of a script, where Ctrl-C is ignored",
    "stops; the same command resumes",
    143,
)
def test_a_termination(tmp_path):
    raw, held = hold_last(tmp_path, 50)
    for moment in ("loading", "counting"):
        (tmp_path / "go").unlink(missing_ok=True)
        command = build_command(raw, tmp_path / moment, "--workers", 2, *held)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            child = start(command, MOMENTS[moment](tmp_path / moment))
        finally:
            signal.signal(signal.SIGINT, before)
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGTERM)
        (tmp_path / "go").touch()
        _, stderr = child.communicate(timeout=60)
        assert child.returncode == 143, moment
        require_clear(stderr, "stopped")
    printed, _ = run(command)
    assert "50 samples read = 50 packed" in printed


@situation("`--config` or `--chat-template` is a pipe or a device", "stops", 2)
def test_what_never_ends_is_not_read(raw, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for option in ("--config", "--chat-template"):
        for place in (tmp_path / "pipe", "/dev/zero"):
            run(build_command(raw, tmp_path / "out", option, place), 2, "is no file but a pipe")


@situation("a number of a config is infinite, not a number, or beyond 64 bits", "stops", 2)
def test_numbers_that_nothing_holds(raw, tmp_path):
    file = tmp_path / "config.toml"
    for text in ("max_seq_len = 9223372036854775808", "memory_gib = inf", "max_rejected = nan"):
        file.write_text(text)
        key = text.partition(" ")[0]
        run(build_command(raw, tmp_path / "out", "--config", file), 2, f"{file}: {key} is")


@situation("`--tokenizer` is a number", "stops, without asking the Hub", 2)
def test_a_tokenizer_that_is_a_number(raw, tmp_path):
    for text in ("0", "nan", "1e5"):
        command = build_command(raw, tmp_path / "out")
        command[command.index("--tokenizer") + 1] = text
        run(command, 2, f"tokenizer {text}: no such folder or file, nor a Hub id")


@situation("a text of a config holds a NUL", "stops", 2)
def test_a_name_that_no_file_has(raw, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('keep_columns = []\nmap = "a\\u0000b"')
    run(build_command(raw, tmp_path / "out", "--config", file), 2, "no file can have such a name")


@situation("names hold ESC, BEL, line breaks, marks of direction or markup", "shown as escapes", 1)
def test_foreign_names_are_escapes(tmp_path):
    name = "a\x1b[2J\x07\nerror: b\u202e[bold]"
    _, error = run(build_command(tmp_path / name, tmp_path / "out"), 1, "no dataset ")
    assert r"a\x1b[2J\x07\nerror: b\u202e[bold]" in error


def test_the_table_of_situations_and_the_tests_are_the_same():
    assert rows_of("Situations") == SITUATIONS
