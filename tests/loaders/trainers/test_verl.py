"""verl's trainer class, batches and balancing with ours, and the benchmark of both.

They are installed from PyPI into an environment of their own, so not by default:

    pytest -m other_trainers tests/loaders/trainers/test_verl.py
"""

import subprocess

import pytest

from support import ROOT, child_env
from support.frameworks.environments import python_of, run_checks

pytestmark = [pytest.mark.other_trainers, pytest.mark.timeout(1200)]
BENCHMARK = (ROOT / "benchmarks" / "rollouts.py", "--prompts", "16", "--steps", "1")


def test_its_trainer_balances_by_vision_too(pytestconfig, tmp_path):
    run_checks("verl", "checks/verl_checks.py", pytestconfig, tmp_path)


def test_the_benchmark_runs_verls_and_veomnis_functions(pytestconfig):
    done = subprocess.run(
        [python_of("verl", pytestconfig.cache.mkdir("frameworks")), *BENCHMARK],
        cwd=ROOT,
        env=child_env(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert not done.returncode, done.stderr[-3000:]
    for name in ("verl, balance_batch", "verl, prompts", "VeOmni", "Isobatch, prompts"):
        assert name in done.stdout
