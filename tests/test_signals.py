"""A program that is stopped ends with one line and the signal's status, at whatever moment.

`ISOBATCH_TEST_DRAWS=100` stops that many.
"""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from support import ROOT
from support.builds.packed import build
from support.builds.raw_data import good_records, options, write_dataset

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "4"))
MOST_S = 60
LONGEST_S = 4.0
"""What a command takes here; on a busy machine signals come in its first part."""
STARTING = """
import sys
sys.argv[0] = "packer"
from isobatch.packer.__main__ import main  # until it is there, Python itself answers signals
print(flush=True)
main()
"""
STOPPED_IN_EXEC = """
import sys
from isobatch.common.interrupts import StopSignals
try:
    exec("raise KeyboardInterrupt")
except KeyboardInterrupt:
    StopSignals().hold()
sys.exit(143)
"""


@pytest.fixture(scope="module")
def places(shared):
    """(raw data, a build of it)."""

    def make(folder):
        write_dataset(folder / "raw", good_records(folder / "raw", 20))
        build(folder / "raw", folder / "out")

    folder = shared("to be stopped", make)
    return folder / "raw", folder / "out"


def command(rng, places, folder):
    raw, out = places
    values = options(raw, folder / "out")
    building = ("dataset", "out", "model", "tokenizer")
    return rng.choice(
        (
            ["build", "--workers=2", *(f"--{name}={values[name]}" for name in building)],
            ["report", out],
            ["verify", out],
            ["inspect", out, "--html", folder / "page.html"],
        )
    )


def begin(program, *arguments):
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_stopped_command_ends_with_its_line_and_status(places, tmp_path):
    for draw in range(DRAWS):
        rng = random.Random(f"{draw} {time.time_ns() if DRAWS > 4 else 0}")
        folder = tmp_path / str(draw)
        folder.mkdir()
        number = (signal.SIGINT, signal.SIGTERM)[draw % 2]
        with begin(["-c", STARTING], *command(rng, places, folder)) as process:
            assert process.stdout.readline()  # Python itself takes its time, and has no line
            moment = rng.uniform(0.1, LONGEST_S)
            time.sleep(moment)
            if process.poll() is None:
                # to all its processes, as a terminal does, or to the first, as a scheduler may
                send = os.killpg if number == signal.SIGINT else os.kill
                send(process.pid, number)
            _, said = process.communicate(timeout=MOST_S)
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        if process.returncode:
            assert process.returncode == 128 + number, (draw, moment, said)
            assert len(errors) == 1, (draw, moment, said)
            assert errors[0].startswith("error: stopped"), (draw, moment, said)
            assert "Traceback" not in said
        else:
            assert not errors, (draw, moment, said)


def test_the_status_is_kept_when_an_interrupt_came_out_of_an_exec(tmp_path):
    (tmp_path / "stopped.py").write_text(STOPPED_IN_EXEC)
    done = subprocess.run(
        [sys.executable, "-m", "stopped"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        check=False,
        timeout=MOST_S,
    )
    assert done.returncode == 143
