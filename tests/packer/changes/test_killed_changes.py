"""Changes that are killed at random: the build is the old one or the new one, never another.

`ISOBATCH_TEST_DRAWS=20` asks for 20 kills of each; by default there are 6.
"""

import json
import os
import random
import shutil
import time

import pytest

from isobatch.packer.verify import require_intact, verify_build
from isobatch.shards.manifest import is_complete, read_manifest
from support import ranks
from support.builds.packed import digests, quiet
from support.builds.raw_data import options
from support.growing.halves import pack

KILLS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "6"))
RUN_S = 300
SCRIPT = """
if __name__ == "__main__":
    from isobatch.packer.cli import main
    main()
"""


def begin(folder, *command):
    """A command's process, forked from one that has imported what it needs."""
    folder.mkdir(exist_ok=True)
    script, printed = folder / "packer.py", folder / "printed"
    script.write_text(SCRIPT)
    shutil.rmtree(printed, ignore_errors=True)
    (process,) = ranks.start(1, printed, script, *map(str, command))
    return process


def run(folder, *command):
    process = begin(folder, *command)
    process.join(RUN_S)
    said = (folder / "printed" / "stderr").read_text()
    assert process.exitcode == 0, said
    return said


@pytest.fixture(scope="module")
def changes(halves, first_builds, shared, tmp_path_factory):
    """(arguments of each command, what it makes: all files, those of the build, its seconds)"""

    def make(folder):
        pack(halves, folder / "second", "new", keep_columns=("score",))
        ids = [f"id-{number:03d}" for number in range(0, 150, 7)]
        (folder / "ids.json").write_text(json.dumps(ids))

    folder = shared("changes to kill", make)
    values = options(halves / "new", "x", data_root=str(halves))
    kept = ("dataset", "data_root", "tokenizer")
    add = [f"--{name.replace('_', '-')}={values[name]}" for name in kept]
    commands = {
        "add": ["add", "BUILD", *add, "--workers=1"],
        "remove": ["remove", "BUILD", f"--ids={folder / 'ids.json'}", "--workers=1"],
        "merge": ["merge", "FIRST", str(folder / "second"), "--out", "BUILD"],
    }
    work = tmp_path_factory.mktemp("undisturbed")
    wanted = {}
    for name, command in commands.items():
        out = begun(first_builds["arrow"], name, work / name)
        started = time.monotonic()
        run(work / f"{name} run", *filled(command, out, first_builds["arrow"]))
        wanted[name] = contents(out), build_files(out), time.monotonic() - started
    return commands, wanted


def begun(first, name, out):
    """The place of a build before the change."""
    if name != "merge":
        shutil.copytree(first, out)
    return out


def filled(command, out, first):
    return [str({"BUILD": out, "FIRST": first}.get(word, word)) for word in command]


def contents(out):
    """Digests of all that a build is; empty for one that does not exist."""
    if not is_complete(str(out)):
        return {}
    return {name: value for name, value in digests(out).items() if name != "report.html"}


def build_files(out):
    """Digests of the files that the manifest lists, and of itself."""
    if not is_complete(str(out)):
        return {}
    manifest = read_manifest(out)
    names = {file.name for file in (*manifest.shards, *manifest.files)} | {"manifest.json"}
    return {name: value for name, value in digests(out).items() if name in names}


@pytest.mark.slow
@pytest.mark.timeout(3 * RUN_S)
@pytest.mark.parametrize("name", ["add", "remove", "merge"])
def test_a_killed_change_leaves_the_old_build_or_the_new_one(changes, first_builds, tmp_path, name):
    commands, wanted = changes
    new, new_files, seconds = wanted[name]
    draw, out = random.Random(), begun(first_builds["arrow"], name, tmp_path / "out")
    old = build_files(out)
    command, moments, states = filled(commands[name], out, first_builds["arrow"]), [], []
    for kill in range(KILLS):
        if contents(out) == new:  # it came through: begin again
            shutil.rmtree(out)
            begun(first_builds["arrow"], name, out)
        child = begin(tmp_path / f"run{kill}", *command)
        moments.append(draw.uniform(0.02, 1.05) * seconds)
        time.sleep(moments[-1])
        child.kill()
        child.join()
        now = build_files(out)
        states.append("old" if now == old else "new" if now == new_files else "another")
        assert states[-1] != "another", f"killed after {moments[-1]} of {seconds} s"
    run(tmp_path / "last", *command)
    assert contents(out) == new, f"killed after {moments} s"
    assert not (out / "staging").exists()
    assert (out / "report.html").exists()
    require_intact(verify_build(out, quiet(), workers=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["add", "remove", "merge"])
def test_a_change_killed_before_its_report_writes_it_when_it_runs_again(
    changes, first_builds, tmp_path, name
):
    commands, _ = changes
    out = begun(first_builds["arrow"], name, tmp_path / "out")
    for _ in range(2):
        run(tmp_path / "run", *filled(commands[name], out, first_builds["arrow"]))
        (out / "report.html").unlink()
