"""Fuzz what reads files of others: `python scripts/fuzz.py TARGET --seconds 300`.

Each case is a damaged file (`tests/support/damaged/targets.py` has the targets, with their seeds).
It must be taken, or refused with one of our errors. A finding is a process that dies, more than 10
s of CPU time, more than 1 GB of memory, or any other exception. Cases run in child processes, many
to each; a damaged file that gets a new answer is damaged further. A finding's file is made as small
as it gets and kept in `--keep`; `--replay FILE` runs one file again. `all` goes through all targets
in turn, `--seconds` for each, `--rounds` times.
"""

import argparse
import gc
import json
import mmap
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from isobatch.common.errors import IsobatchError  # noqa: E402
from support.damaged.mutate import mutate  # noqa: E402
from support.damaged.targets import TARGETS, Target  # noqa: E402

MOST_CPU_S, MOST_WALL_S = 10.0, 120.0
"""Time of one case: of the processor, because a machine has other work; and at all."""
MOST_BYTES = 1 << 30
"""Memory that a case may take in addition to the process's own."""
SPACE_BYTES = 6 << 30
"""Address space that a child gets beyond its own: the machine must live on."""
CASES_PER_CHILD = 150
MOST_SEEDS = 600
MINIMISE_S = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Refused(Exception):
    """A refusal that is not one line."""


def run_case(target: Target, content: bytes, folder: Path) -> tuple[str, str]:
    """(kind, what) of one case in this process; kind is ok, refused or finding."""
    _reset_peak()
    before = _memory("VmRSS")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        answer = target.use(content, folder)
        kind, what = "ok", str(answer or "")
    except IsobatchError as error:
        kind, what = "refused", str(error)
        lines = what.split("\n")
        if not lines[0].strip() or not all(line.isprintable() for line in lines):
            kind, what = "finding", f"a refusal that is not one line: {what!r:.300}"
    except BaseException as error:  # a panic of Rust's is no Exception
        kind, what = "finding", _describe(error)
    if kind != "finding" and (grown := _memory("VmHWM") - before) > MOST_BYTES:
        kind, what = "finding", f"memory: {grown >> 20} MB, then {kind}: {what:.120}"
    return kind, what


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame for frame in frames if str(ROOT) in frame.filename and "tests" not in frame.filename
    ]
    frame = (ours or frames)[-1]
    name = Path(frame.filename).name
    return f"{type(error).__name__} at {name}:{frame.name}:{frame.lineno}: {str(error)[:200]!r}"


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _memory(key: str) -> int:
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) << 10 if match else 0


def shape_of(kind: str, what: str) -> str:
    """An answer without numbers and names: equal for answers of one kind."""
    return f"{kind} {re.sub(r'[0-9]+|/[^ ]*|`[^`]*`|[^ ]*%[^ ]*', '#', what[:500])[:70]}"


# --- child processes ---


def _child(target, seeds, rng, count, folder, board, novel):  # noqa: PLR0913, PLR0917
    """Run `count` mutated cases. The board has the case's number and the child's CPU time then."""
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    limit = _address_space() + SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    current = folder / "current"
    answers = []
    begun = 0.0
    for number in range(count):
        content = seeds[number] if rng is None else _draw(target, seeds, rng)
        current.write_bytes(content)
        now = time.process_time()
        board[:] = struct.pack("<qdd", number, now, time.monotonic())
        begun = now
        kind, what = run_case(target, content, folder / "case")
        took = time.process_time() - begun
        answers.append([kind, what[:400], took])
        if kind == "finding":
            (novel / f"finding-{number}").write_bytes(content)
        elif rng is not None:
            shape = shape_of(kind, what)
            name = novel / f"{zlib.crc32(shape.encode()):08x}"
            if len(content) < 300_000 and not name.exists():
                name.write_bytes(content)
        if _memory("VmRSS") > 3 << 30:
            break
        if number % 50 == 49:
            gc.collect()
    (folder / "answers.json").write_text(json.dumps(answers))


def _draw(target, seeds, rng):
    content = mutate(rng.choice(seeds), rng, seeds, target.tokens)
    return target.seal(content) if target.seal else content


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE


def run_child(target, seeds, rng, count, novel):
    """(answers, finding or None, its content) of a batch in a forked process."""
    with tempfile.TemporaryDirectory(prefix="isobatch-fuzz-") as name:
        folder = Path(name)
        board = mmap.mmap(-1, 24)
        struct.pack_into("<qdd", board, 0, -1, 0.0, time.monotonic())
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _child(target, seeds, rng, count, folder, board, novel)
                code = 0
            except BaseException:
                (folder / "broken").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        finding = _watch(pid, board)
        number = struct.unpack_from("<qdd", board, 0)[0]
        if (folder / "broken").exists():
            raise RuntimeError((folder / "broken").read_text())
        if finding:
            current = folder / "current"
            return [], (f"{finding} (case {number} of its process)"), current.read_bytes()
        answers = json.loads((folder / "answers.json").read_text())
        return answers, None, b""


def _watch(pid: int, board: mmap.mmap) -> str:
    """Wait for a child; what is wrong if it is killed, by itself or for its time."""
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            if os.WIFSIGNALED(status):
                return f"crash: {signal.Signals(os.WTERMSIG(status)).name}"
            return "" if os.WEXITSTATUS(status) in (0, 1) else f"exit {os.WEXITSTATUS(status)}"
        values = struct.unpack_from("<qdd", board, 0)
        number, cpu_then, wall_then = values
        if number >= 0:
            cpu, wall = _cpu_of(pid) - cpu_then, time.monotonic() - wall_then
            is_late = cpu > MOST_CPU_S or wall > MOST_WALL_S
            # a look while it is written tells nothing
            if is_late and values == struct.unpack_from("<qdd", board, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return f"hang: {cpu:.0f} s of CPU, {wall:.0f} s"
        time.sleep(0.02)


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


# --- a target for some seconds ---


class Log:
    """Lines on the terminal and in a file."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a") if path else None

    def __call__(self, text: str) -> None:
        """Write a line, with the time."""
        line = f"{time.strftime('%H:%M:%S')} {text}"
        print(line, flush=True)
        if self._file:
            print(line, file=self._file, flush=True)


def fuzz(target: Target, seconds: float, seed: int, keep: Path, log: Log) -> int:  # noqa: C901
    """Run a target; -> number of kinds of findings."""
    rng = random.Random(f"{target.name} {seed}")
    seeds = list(target.seeds())
    novel = keep / "corpus" / target.name
    novel.mkdir(parents=True, exist_ok=True)
    findings: dict[str, int] = {}
    counts = {"ok": 0, "refused": 0, "finding": 0}
    slowest = 0.0
    end = time.monotonic() + seconds
    begun = time.monotonic()
    shapes = {}

    def take(what: str, content: bytes) -> None:
        counts["finding"] += 1
        kind = re.sub(r"[0-9]+", "#", what.partition(": ")[0] if "at " in what[:60] else what)[:90]
        findings[kind] = findings.get(kind, 0) + 1
        if findings[kind] == 1:
            place = keep / "findings" / f"{target.name}-{zlib.crc32(kind.encode()):08x}"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
            log(f"{target.name}: FINDING {what} -> {place} ({len(content)} bytes)")

    whole, finding, content = run_child(target, seeds, None, len(seeds), novel)
    if finding:
        take(finding, content)
    for place, (kind, what, took) in enumerate(whole):
        slowest = max(slowest, took)
        if kind != "ok":
            log(f"{target.name}: seed {place} is {kind}: {what:.200}")
            if kind == "finding":
                take(what, seeds[place])
    while time.monotonic() < end:
        pool = seeds + list(shapes.values())
        child = random.Random(rng.random())
        answers, finding, content = run_child(target, pool, child, CASES_PER_CHILD, novel)
        if finding:
            take(finding, content)
        for kind, _, took in answers:
            slowest = max(slowest, took)
            if kind != "finding":
                counts[kind] += 1
        for number, (kind, what, _) in enumerate(answers):
            if kind == "finding":
                take(what, (novel / f"finding-{number}").read_bytes())
                (novel / f"finding-{number}").unlink()
        for path in sorted(novel.iterdir()):
            if path.name not in shapes and len(shapes) < MOST_SEEDS:
                shapes[path.name] = path.read_bytes()
    total = sum(counts.values())
    log(
        f"{target.name}: {(time.monotonic() - begun) / 60:.1f} min, {total:,} cases"
        f" ({counts['ok']:,} taken, {counts['refused']:,} refused), {len(shapes)} answers,"
        f" slowest {slowest:.1f} s, {len(findings)} kinds of findings {findings or ''}"
    )
    return len(findings)


def replay(path: Path, log: Log) -> bool:
    """Run a file once, in a process of its own; -> whether it is a finding."""
    target = TARGETS[path.name.partition("-")[0]]
    with tempfile.TemporaryDirectory() as name:
        answers, finding, _ = run_child(target, [path.read_bytes()], None, 1, Path(name))
    kind, what, _ = ["finding", finding, 0.0] if finding else answers[0]
    log(f"{path.name}: {kind}: {what}")
    return kind == "finding"


def minimise(target: Target, content: bytes, log: Log) -> bytes:
    """A smaller file with the same finding."""
    with tempfile.TemporaryDirectory() as name:

        def finding_of(data: bytes) -> str:
            answers, finding, _ = run_child(target, [data], None, 1, Path(name))
            what = finding or (answers[0][1] if answers[0][0] == "finding" else "")
            return re.sub(r"[0-9]+", "#", what)[:40]

        wanted = finding_of(content)
        if not wanted:
            log(f"{target.name}: no finding any more")
            return content
        end = time.monotonic() + MINIMISE_S
        step = max(1, len(content) // 2)
        while step and time.monotonic() < end:
            place = 0
            while place < len(content) and time.monotonic() < end:
                smaller = content[:place] + content[place + step :]
                if finding_of(smaller) == wanted:
                    content = smaller
                else:
                    place += step
            step //= 2
    return content


def main() -> int:
    """Run the command."""
    names = ", ".join(TARGETS)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", nargs="?", default="all", help=f"all, or one of {names}")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--log", type=Path)
    parser.add_argument("--replay", type=Path, nargs="+", help="files TARGET-what, to run once")
    parser.add_argument("--minimise", type=Path, help="a finding to make smaller, in place")
    options = parser.parse_args()
    log = Log(options.log)
    if options.target not in ("all", *TARGETS):
        parser.error(f"{options.target} is none of {names}")
    if options.replay:
        return sum([replay(path, log) for path in options.replay])
    if options.minimise:
        smaller = minimise(TARGETS[options.target], options.minimise.read_bytes(), log)
        options.minimise.write_bytes(smaller)
        log(f"{len(smaller)} bytes: {smaller[:200]!r}")
        return 0
    targets = list(TARGETS.values()) if options.target == "all" else [TARGETS[options.target]]
    bad = 0
    for number in range(options.rounds):
        for target in targets:
            bad += fuzz(target, options.seconds, options.seed + number, options.keep, log)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
