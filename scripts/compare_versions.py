"""Shows that two versions of Isobatch write and read the same: builds, loader states, plans.

    python scripts/compare_versions.py OLD [--corpus FOLDER --tokenizer FOLDER] [--keep FOLDER]

OLD is a checkout of the older version with a virtual environment in `.venv`; the newer one is the
checkout that this script is in. Both pack the demo in every format, with `--corpus` also that
folder (LLaVA layout) in every format and as part of a mixture. All files must be equal byte for
byte, except: manifests may differ in the version and in the `content_hash` that covers it, of the
index the rows must be equal (from `format_version` 3 on the sample ids are a file of their own),
and report.html is not compared. The newer version then resumes the loader of the older one,
continues its training run with the same losses, writes the same plan.json and reads the older
one's. Whole epochs of both loaders are compared in several settings, with all tensors.

What two versions do differently on purpose (the changelog says what) differs here too.

Prints a line per comparison; the exit status is 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

ROOT = Path(__file__).parents[1]
FORMATS = ("arrow", "webdataset", "refs")
VERSION_KEYS = ("isobatch_version", "format_version", "content_hash")
"""Fields of a manifest in which two versions may differ."""
INDEX, SAMPLE_IDS = "index.arrow", "sample_ids.arrow"
"""Together the index, in two files from `format_version` 3 on."""
NOT_COMPARED = {"report.html"}
"""Pages for people, which no program reads."""

# Takes steps of two ranks and prints their sample ids; the state travels as a file.
LOADER = """
import json, sys
from loaders import StreamingLoader
build, state_path, steps = sys.argv[1:]
seen = []
for rank in range(2):
    loader = StreamingLoader(build, dp_rank=rank, dp_world_size=2, micro_batches_per_step=2,
                             seed=3, workers=0, regroup=None, balance=0.5)
    if state_path.endswith("resume"):
        loader.load_state_dict(json.loads(open(state_path.removesuffix("resume")).read()))
    taken = []
    while len(taken) < int(steps):
        for step in loader:
            taken.append([[list(batch.sample_ids), batch.input_ids.sum().item()] for batch in step])
            if not state_path.endswith("resume") and len(taken) == 3 and rank == 0:
                open(state_path, "w").write(json.dumps(loader.state_dict()))
            if len(taken) == int(steps):
                break
    seen.append(taken)
    loader.close()
print(json.dumps(seen))
"""
# Prints a digest of an epoch: the samples of each rank's micro-batches, and all their tensors.
EPOCH = """
import hashlib, json, sys
import loaders, torch
kind, source, world, options = json.loads(sys.argv[1])
if source == "records":
    source = [{"id": f"{n}", "conversations": [
        {"from": "human", "value": "what is it " * (1 + n % 7)},
        {"from": "gpt", "value": "word " * (1 + 37 * n % 90)}]} for n in range(700)]
digest = hashlib.sha256()
for rank in range(world):
    loader = getattr(loaders, kind)(source, dp_rank=rank, dp_world_size=world, workers=0, **options)
    for step in loader:
        for batch in step:
            digest.update(json.dumps(list(batch.sample_ids)).encode())
            for name in ("input_ids", "labels", "position_ids", "cu_seqlens", "pixel_values"):
                digest.update(getattr(batch, name).contiguous().numpy().tobytes())
    loader.close()
print(digest.hexdigest())
"""
WORLDS = 1, 8
STREAMED: dict[str, dict[str, Any]] = {
    "random": {"balance": 0.0},
    "balance .5": {"balance": 0.5},
    "balance .9": {"balance": 0.9},
    "4 micro-batches": {"balance": 0.5, "micro_batches_per_step": 4},
    "drop": {"balance": 0.9, "micro_batches_per_step": 3, "remainder": "drop"},
    "regrouped": {"balance": 0.9, "regroup": "epoch"},
    "in order": {"shuffle": False},
    "chosen": {"balance": 0.5, "limit": 300},
}
"""Options of `StreamingLoader`; what a default would be is written out."""
WITHOUT_BUILD: dict[str, dict[str, Any]] = {
    "packed": {"balance": 0.9},
    "padded": {"balance": 0.9, "packing": False},
    "in order": {"shuffle": False},
    "own": {"measure": "own"},
}
"""Options of `BalancedLoader`."""
RESUMED_AFTER = 3
LOADER_STEPS = 8

PLANS = {
    "model": "--model internvl_1_5 --images 9 --seq-len 4096 --cluster a100_80g --tp 2 --pp 4",
    "interleaved": "--model llava_1_5 --images 4 --seq-len 4096 --pp 4 --schedule interleaved "
    "--stages-per-rank 2",
}
TRAIN_STEPS = (3, 5)
"""The older version stops after the first number of steps; both then continue to the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A checkout with its environment."""

    root: Path
    train: tuple[str, ...]
    """Arguments of torchrun that start its trainer."""

    def run(self, *arguments: str) -> str:
        """Run Python with this version's packages; -> what it prints. SystemExit if it fails."""
        python = self.root / ".venv" / "bin" / "python"
        environment = os.environ | {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [str(python), *arguments],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            command = " ".join(arguments)[:200]
            raise SystemExit(f"{self.root}: python {command} failed:\n{done.stdout}{done.stderr}")
        return done.stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was compared, and how it differs; empty if it does not."""

    name: str
    differences: tuple[str, ...]


def main() -> int:
    """Compare, print a line each; 1 if anything differs."""
    args = read_arguments()
    old = Version(root=args.old.resolve(), train=trainer_of(args.old))
    new = Version(root=ROOT, train=trainer_of(ROOT))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.keep or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        failed = 0
        for comparison in comparisons(old, new, folder, args):
            print(f"{'DIFFERS' if comparison.differences else 'equal':8} {comparison.name}")
            for line in comparison.differences:
                print(f"         {line}")
            failed += bool(comparison.differences)
    print(f"{failed} comparisons differ" if failed else "all equal")
    return 1 if failed else 0


def read_arguments() -> argparse.Namespace:
    """The command line."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="checkout of the older version, with .venv")
    parser.add_argument("--corpus", type=Path, help="folder in LLaVA layout to pack as well")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer for --corpus")
    parser.add_argument("--model", default="internvl_1_5", help="preset for --corpus")
    parser.add_argument("--keep", type=Path, help="folder for what is written, not removed")
    args = parser.parse_args()
    if (args.corpus is None) != (args.tokenizer is None):
        parser.error("--corpus and --tokenizer go together")
    return args


def trainer_of(root: Path) -> tuple[str, ...]:
    """`python -m engine train`, or the example of versions before it."""
    example = root / "examples" / "train_pipeline.py"
    return ("-m", "engine", "train") if (root / "engine" / "train").is_dir() else (str(example),)


def comparisons(
    old: Version, new: Version, folder: Path, args: argparse.Namespace
) -> Iterator[Comparison]:
    """Everything that is compared, one after the other."""
    for name, options in build_cases(folder, args).items():
        for version, label in ((old, "old"), (new, "new")):
            version.run("-m", "packer", "build", *options, "--out", str(folder / label / name))
        yield compare_builds(name, folder / "old" / name, folder / "new" / name)
    build = str(folder / "old" / "demo-arrow")
    yield compare_loaders(old, new, build, folder)
    yield from compare_epochs(old, new, build)
    for name, options in {**PLANS, "build": f"{build} --pp 2"}.items():
        yield from compare_plans(name, options.split(), old, new, folder)
    yield compare_training(old, new, build, folder)


def build_cases(folder: Path, args: argparse.Namespace) -> dict[str, list[str]]:
    """Name of a build -> the options of `packer build`."""
    demo = ["--dataset", "demo", "--model", "tiny"]
    # the demo's files lie in its own output folder, so its refs builds name different folders
    cases = {f"demo-{kind}": [*demo, "--format", kind] for kind in FORMATS if kind != "refs"}
    if args.corpus is None:
        return cases
    options = ["--model", args.model, "--tokenizer", str(args.tokenizer), "--max-rejected", "1"]
    corpus = ["--dataset", str(args.corpus), *options]
    mixture = folder / "mixture.toml"
    mixture.write_text(
        f'[[datasets]]\ndataset = "{args.corpus}"\n'
        f'[[datasets]]\ndataset = "{args.corpus}"\nname = "again"\nlimit = 300\nrepeat = 2.5\n',
        encoding="utf-8",
    )
    return {
        **cases,
        **{f"corpus-{kind}": [*corpus, "--format", kind] for kind in FORMATS},
        "corpus-isf": [*corpus, "--grouping", "isf", "--max-seq-len", "4096"],
        "mixture": ["--dataset", str(mixture), *options],
    }


def compare_builds(name: str, old: Path, new: Path) -> Comparison:
    """All files of two builds, byte for byte."""
    files = [
        {str(path.relative_to(root)) for path in root.rglob("*")} - {SAMPLE_IDS}
        for root in (old, new)
    ]
    differences = [f"only in one: {file}" for file in sorted(files[0] ^ files[1])]
    for file in sorted(files[0] & files[1] - NOT_COMPARED):
        if (old / file).is_file() and content(old / file) != content(new / file):
            differences.append(f"{file} differs")
    return Comparison(name=f"build {name}: {len(files[0])} files", differences=tuple(differences))


def content(path: Path) -> bytes | list[Any] | dict[str, Any]:
    """What must be equal of a file."""
    if path.name == INDEX:
        parts = [path, *([ids] if (ids := path.with_name(SAMPLE_IDS)).is_file() else [])]
        tables = [pa.ipc.open_file(str(part)).read_all() for part in parts]
        return [
            (name, table.column(name).to_pylist())
            for table in tables
            for name in table.schema.names
        ]
    if path.name != "manifest.json":
        return path.read_bytes()
    values: dict[str, Any] = json.loads(path.read_bytes())
    values["files"] = [file for file in values["files"] if file["name"] not in {INDEX, SAMPLE_IDS}]
    return {key: value for key, value in values.items() if key not in VERSION_KEYS}


def compare_loaders(old: Version, new: Version, build: str, folder: Path) -> Comparison:
    """The newer loader takes the older one's steps, and continues from its state."""
    state = str(folder / "loader.json")
    steps = json.loads(old.run("-c", LOADER, build, state, str(LOADER_STEPS)))
    fresh = json.loads(new.run("-c", LOADER, build, f"{folder}/again.json", str(LOADER_STEPS)))
    left = LOADER_STEPS - RESUMED_AFTER
    resumed = json.loads(new.run("-c", LOADER, build, f"{state}resume", str(left)))
    differences = []
    if fresh != steps:
        differences.append("a fresh loader gives other steps")
    if resumed != [taken[RESUMED_AFTER:] for taken in steps]:
        differences.append("a resumed loader gives other steps")
    return Comparison(name="loader", differences=tuple(differences))


def compare_epochs(old: Version, new: Version, build: str) -> Iterator[Comparison]:
    """Orders and tensors of whole epochs, in several settings, on one rank and more."""
    cases = {f"stream, {name}": ("StreamingLoader", build, each) for name, each in STREAMED.items()}
    caps = {"model": "tiny", "max_tokens": 1024, "max_vision": 64, "window": 256}
    cases |= {
        f"without a build, {name}": ("BalancedLoader", "records", caps | each)
        for name, each in WITHOUT_BUILD.items()
    }
    for name, (kind, source, options) in cases.items():
        for world in WORLDS:
            given = json.dumps([kind, source, world, options])
            digests = {version.run("-c", EPOCH, given) for version in (old, new)}
            differences = () if len(digests) == 1 else ("samples or tensors differ",)
            yield Comparison(name=f"epoch, {name}, dp {world}", differences=differences)


def compare_plans(
    name: str, options: list[str], old: Version, new: Version, folder: Path
) -> Iterator[Comparison]:
    """Plans of both versions are equal, and the newer one simulates the older one's."""
    plans = [folder / f"plan-{name}-{label}" for label in ("old", "new")]
    for version, plan in zip((old, new), plans, strict=True):
        version.run("-m", "engine", "plan", *options, "--out", str(plan))
    texts = [(plan / "plan.json").read_text(encoding="utf-8") for plan in plans]
    differences = () if texts[0] == texts[1] else ("plan.json differs",)
    yield Comparison(name=f"plan {name}", differences=differences)
    simulated = [
        json.loads(version.run("-m", "engine", "simulate", str(plans[0] / "plan.json"), "--json"))
        for version in (old, new)
    ]
    differences = () if simulated[0] == simulated[1] else ("simulated steps differ",)
    yield Comparison(name=f"plan {name}, the older one's simulated", differences=differences)


def compare_training(old: Version, new: Version, build: str, folder: Path) -> Comparison:
    """A run of the older version, continued by both from a copy of its state: equal losses."""
    first, last = TRAIN_STEPS
    state = folder / "training"
    train(old, build, state, first)
    losses = []
    for version, label in ((old, "old"), (new, "new")):
        copy = folder / f"training-{label}"
        subprocess.run(["cp", "-r", str(state), str(copy)], check=True)
        losses.append(train(version, build, copy, last)[-(last - first) :])
    differences = () if losses[0] == losses[1] else (f"losses {losses[0]} and {losses[1]}",)
    return Comparison(name=f"training, continued: losses {losses[1]}", differences=differences)


def train(version: Version, build: str, state: Path, steps: int) -> list[float]:
    """Train on two ranks up to a step, saving each; -> the losses of all steps."""
    figures = state.with_name(f"{state.name}-{steps}.jsonl")
    options = ["--state", str(state), "--save-every", "1", "--figures", str(figures)]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    version.run(*launch, *version.train, build, "--steps", str(steps), *options)
    return [json.loads(line)["loss"] for line in figures.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
