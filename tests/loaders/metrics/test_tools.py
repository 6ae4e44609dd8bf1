"""Where loaders, BalancedTrainer and `engine train` log: what the tools have kept, read back."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
import torch

from isobatch.loaders import StreamingLoader
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples
from support.trainers.engine_train import main
from support.workers.read_logs import read_events, read_wandb

NAMES = [
    *("waiting_vision", "waiting_llm", "waiting_attention"),
    *("fill", "tokens", "epoch", "rejected"),
]
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    root = tmp_path_factory.mktemp("logged") / "build"
    return write_tabled(root, group_samples(make_samples(60)))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(build, log_to, every=2):
    """A run without a trainer; -> what it should have written, by name."""
    expected = {name: [] for name in ("step", *NAMES)}

    def keep(figures, step):
        expected["step"].append(step)
        for name in NAMES:
            expected[name].append(figures[f"isobatch/{name}"])

    for place in (keep, log_to):
        with StreamingLoader(build, workers=0, log_to=place, log_every=every) as loader:
            list(loader)
    return expected


def test_tensorboard(build, folder):
    pytest.importorskip("tensorboard")
    expected = run(build, "tensorboard:runs/one")
    events = read_events(folder / "runs" / "one")
    for name in NAMES:
        steps, values = zip(*events[f"isobatch/{name}"], strict=True)
        assert list(steps) == expected["step"]
        assert list(values) == pytest.approx(expected[name], rel=1e-6)
    run(build, "tensorboard")
    (default,) = [path for path in (folder / "runs").iterdir() if path.name != "one"]
    assert read_events(default)["isobatch/fill"] == events["isobatch/fill"]


def test_wandb_offline(build, folder, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_DIR", str(folder))
    expected = run(build, "wandb:tests")
    wandb.teardown()
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    history = read_wandb(file)
    assert history["isobatch/step"] == expected["step"]
    for name in NAMES:
        assert history[f"isobatch/{name}"] == pytest.approx(expected[name])


def test_wandb_run_of_the_users_own_goes_on(build, folder, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=folder) as active:
        with StreamingLoader(build, workers=0, log_to="wandb", log_every=2) as loader:
            for _ in loader:
                wandb.log({"loss": 1.0})
        assert wandb.run is active
        wandb.log({"loss": 2.0})
    wandb.teardown()  # its process has written all
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    history = read_wandb(file)

    assert history["loss"] == [1.0] * len(loader) + [2.0]
    assert len(history["isobatch/fill"]) == -(-len(loader) // 2)


@pytest.mark.filterwarnings("ignore")
def test_mlflow(build, folder, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(folder / "mlruns")
    expected = run(build, "mlflow:tests")
    client = mlflow.MlflowClient()
    (kept,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert kept.info.status == "FINISHED"
    for name in NAMES:
        history = client.get_metric_history(kept.info.run_id, f"isobatch/{name}")
        assert [(of.step, of.value) for of in history] == list(
            zip(expected["step"], expected[name], strict=True)
        )


TRACKIO = """
import sys
from isobatch.loaders import StreamingLoader

with StreamingLoader(sys.argv[1], workers=0, log_to="trackio:tests", log_every=2) as loader:
    list(loader)
"""


def test_trackio(build, folder):
    pytest.importorskip("trackio")
    expected = run(build, lambda figures, step: None)
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "TRACKIO_DIR": str(folder / "kept"), "PYTHONPATH": paths}
    command = [sys.executable, "-c", TRACKIO, str(build)]  # its folder is chosen on import
    subprocess.run(command, env=environment, check=True)
    with closing(sqlite3.connect(folder / "kept" / "tests.db")) as tables:
        rows = tables.execute("select step, metrics from metrics order by step").fetchall()
    assert [step for step, _ in rows] == expected["step"]
    for name in NAMES:
        assert [json.loads(of)[f"isobatch/{name}"] for _, of in rows] == expected[name]


def test_the_engines_trainer_logs_its_loss_beside(build, folder):
    pytest.importorskip("tensorboard")
    figures = folder / "figures.jsonl"
    options = ["--plan=auto", "--steps=12", "--device=cpu", f"--figures={figures}"]
    try:
        assert main([str(build), *options, "--log-to=tensorboard:runs/x"]) == 0
        assert main([str(build), "--plan=auto", "--device=cpu", "--log-to=nothing"]) == 2
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    events = read_events(folder / "runs" / "x")
    losses = [json.loads(line)["loss"] for line in figures.read_text().splitlines()]
    logged = events["isobatch/loss"]
    assert [step for step, _ in logged][-1] == 12
    assert logged[0][1] == pytest.approx(sum(losses[: logged[0][0]]) / logged[0][0], rel=1e-5)
    assert {f"isobatch/{name}" for name in (*NAMES, "waiting_pipeline")} <= events.keys()


class TokenModel(torch.nn.Module):
    """The smallest model that a Trainer takes."""

    def __init__(self, vocab_size):
        super().__init__()
        self.head = torch.nn.Embedding(vocab_size, vocab_size)

    def forward(self, input_ids, labels, num_items_in_batch=None, **options):
        loss = torch.nn.functional.cross_entropy(
            self.head(input_ids)[:-1], labels[1:], reduction="sum"
        )
        return {"loss": loss / num_items_in_batch}


def test_balanced_trainer_reports_where_its_trainer_does(build, folder):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    pytest.importorskip("tensorboard")
    from isobatch.loaders import BalancedTrainer  # noqa: PLC0415

    expected = []

    def train(loader=None, **options):
        args = transformers.TrainingArguments(
            output_dir=str(folder / "out"),
            disable_tqdm=True,
            use_cpu=True,
            gradient_accumulation_steps=2,
            save_steps=3,
            **{"max_steps": 6, "logging_steps": 2, "report_to": ["tensorboard"], **options},
        )
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "runs")
        loader = loader or StreamingLoader(build, micro_batches_per_step=2)
        trainer = BalancedTrainer(
            model=TokenModel(loader.vocab_size),
            args=args,
            train_dataset=loader,
            to_inputs=lambda of: {"input_ids": of.input_ids, "labels": of.labels},
        )
        trainer.train(resume_from_checkpoint=options.get("max_steps", 6) > 6)
        return trainer

    logged = {"log_to": lambda figures, step: expected.append(figures), "log_every": 2}
    train(StreamingLoader(build, micro_batches_per_step=2, **logged))
    resumed = train(max_steps=8)
    events = read_events(folder / "runs")
    for name in (name for name in NAMES if name != "epoch"):
        logged = dict(events[f"train/isobatch/{name}"])
        assert list(logged) == [2, 4, 6, 8]
        values = [figures[f"isobatch/{name}"] for figures in expected[:3]]
        assert [logged[step] for step in (2, 4, 6)] == pytest.approx(values, rel=1e-5), name
    assert "isobatch/fill" in resumed.state.log_history[-2]
    assert not any("isobatch/fill" in of for of in train(report_to=[]).state.log_history)
    with pytest.warns(UserWarning, match="dataloader_num_workers=0"):
        train(dataloader_num_workers=1, max_steps=2)
