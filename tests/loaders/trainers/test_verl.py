"""verl's trainer class, batches and balancing with ours, and the benchmark of both.

They are installed from PyPI into an environment of their own, so not by default:

    pytest -m other_trainers tests/loaders/trainers/test_verl.py
"""

import subprocess

import pytest

from support import ROOT, TESTS, child_env
from support.frameworks.environments import python_of

pytestmark = [pytest.mark.other_trainers, pytest.mark.timeout(1200)]
CHECKS = TESTS / "support" / "frameworks" / "checks" / "verl_checks.py"
BENCHMARK = (ROOT / "benchmarks" / "rollouts.py", "--prompts", "16", "--steps", "1")


@pytest.fixture(scope="module")
def python(pytestconfig):
    return python_of("verl", pytestconfig.cache.mkdir("frameworks"))


def test_its_trainer_balances_by_vision_too(python, tmp_path):
    options = (
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        f"--basetemp={tmp_path / 'checks'}",
    )
    done = run(python, "-m", "pytest", *options, CHECKS)
    assert not done.returncode, done.stdout[-6000:]
    assert " passed" in done.stdout


def test_the_benchmark_runs_verls_and_veomnis_functions(python):
    done = run(python, *BENCHMARK)
    assert not done.returncode, done.stderr[-3000:]
    for name in ("verl, balance_batch", "verl, prompts", "VeOmni", "Isobatch, prompts"):
        assert name in done.stdout


def run(*command):
    return subprocess.run(
        command,
        cwd=ROOT,
        env=child_env(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
