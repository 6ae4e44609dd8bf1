"""LLaMA-Factory, ms-swift and Axolotl on a datasets.Dataset, by the code of docs/load/trainers.

Each is installed from PyPI into an environment of its own, kept in pytest's cache (1.1 GB), and
runs by its own command. Not by default, since that takes minutes and the network:

    pytest -m other_trainers tests/loaders/integrations/test_other_trainers.py
"""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass

import pytest

from support import ROOT, TESTS, child_env
from support.frameworks.environments import python_of

pytest.importorskip("transformers")
pytest.importorskip("datasets")
safetensors = pytest.importorskip("safetensors.torch")

from support.frameworks.model_and_data import write_dataset, write_model  # noqa: E402

pytestmark = [pytest.mark.other_trainers, pytest.mark.timeout(1200)]

SAMPLES, EPOCHS, ACCUMULATED, SAVED = 60, 2, 2, 4
KILLED = 2 * 6 + 1
"""Micro-batch: the first of the two of step 7, after the checkpoint of step 4."""
MAX_TOKENS = "16_384", "600"
"""Of docs/load/trainers, and for the short samples of the test."""
RUN_S = 300


@dataclass(frozen=True)
class Framework:
    """How a framework is started."""

    command: tuple[str, ...]
    """After the folder of its environment's programs."""
    settings: dict[str, object]
    file: str = ""
    """For the settings; without one they are options of the command."""
    resume: str = "--resume_from_checkpoint={}"
    environment: tuple[tuple[str, str], ...] = ()
    all_logits: tuple[tuple[str, object], ...] = ()
    """Settings by which it computes logits of all tokens, if that is its own choice."""


TRAINING = {
    "output_dir": "out",
    "gradient_accumulation_steps": ACCUMULATED,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_steps": SAVED,
}
FRAMEWORKS = {
    "llamafactory": Framework(
        ("python", "packed.py", "train.yaml"),
        {
            **TRAINING,
            "model_name_or_path": "model",
            "stage": "sft",
            "finetuning_type": "full",
            "freeze_vision_tower": False,
            "freeze_multi_modal_projector": False,
            "template": "default",
            "do_train": True,
            "dataset": "any",
            "num_train_epochs": EPOCHS,
            "use_cpu": True,
            "report_to": "none",
        },
        file="train.yaml",
        resume="resume_from_checkpoint={}",
    ),
    "ms_swift": Framework(
        ("swift", "sft", "--external_plugins", "packed.py", "--dataloader_num_workers", "0"),
        {
            **TRAINING,
            "model": "model",
            "model_type": "llava1_5_hf",
            "tuner_type": "full",
            "freeze_vit": False,
            "freeze_aligner": False,
            "torch_dtype": "float32",
            "dataset": "any",
            "num_train_epochs": EPOCHS,
            "use_cpu": True,
            "report_to": "none",
            "add_version": False,  # to the name of the output's folder
            "check_model": False,  # asks ModelScope for a newer one
            "use_hf": True,
        },
        all_logits=(("use_logits_to_keep", False),),
    ),
    "axolotl": Framework(
        ("axolotl", "train", "train.yaml", "--launcher", "python"),
        {
            **TRAINING,
            "base_model": "model",
            "plugins": ["packed.PackedPlugin"],
            "datasets": [{"path": "any", "type": "chat_template"}],
            "num_epochs": EPOCHS,
            "micro_batch_size": 1,
            "dataloader_num_workers": 0,
            "optimizer": "adamw_torch",
            "lr_scheduler": "cosine",
            "save_total_limit": 9,
            **dict.fromkeys(("bf16", "fp16", "tf32"), False),
        },
        file="train.yaml",
        resume="--resume-from-checkpoint={}",
        environment=(("AXOLOTL_DO_NOT_TRACK", "1"),),
    ),
}


@pytest.fixture(scope="module")
def environments(request):
    return request.config.cache.mkdir("frameworks")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_model(folder / "model")
    return folder, write_dataset(folder / "train.parquet", SAMPLES)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_killed_training_of_another_framework_resumes_as_if_it_had_not_been(
    name, environments, data, tmp_path
):
    python, (files, ids) = python_of(name, environments), data
    whole, killed, all_logits = (
        Run(name, python, files, tmp_path / name / kind) for kind in ("whole", "killed", "all")
    )
    whole.start()
    killed.start(WATCHED_KILL=str(KILLED))
    whole.join()
    killed.join(by_kill=True)
    all_logits.start()
    all_logits.join()
    check_logits(whole, all_logits)
    assert killed.checkpoints() == [SAVED]
    before = killed.ids()[: SAVED * ACCUMULATED]
    assert len(killed.ids()) > len(before)
    killed.start(resume=f"out/checkpoint-{SAVED}")
    killed.join()
    # every sample once per epoch, in the same micro-batches
    given = [each for batch in whole.ids() for each in batch]
    assert sorted(given[:SAMPLES]) == sorted(given[SAMPLES:]) == sorted(ids)
    assert before + killed.ids() == whole.ids()
    # losses are logged with four digits, the weights have all that went before them
    assert len(whole.losses()) == whole.checkpoints()[-1] > 2 * SAVED
    assert killed.losses() == whole.losses()
    weights, others = whole.weights(), killed.weights()
    assert weights.keys() == others.keys()
    assert all(each.equal(others[key]) for key, each in weights.items())
    initial = safetensors.load_file(files / "model" / "model.safetensors")
    trained = [key for key in weights if "layers.0.mlp" in key or "projector" in key]
    assert len(trained) > 8  # of the vision tower, the projector and the language model
    assert not any(weights[key].equal(initial[key]) for key in trained)


def check_logits(labelled, all_logits):
    """Losses are equal, and only labelled tokens had logits."""
    assert all_logits.ids() == labelled.ids()
    assert all_logits.count("logits") >= labelled.count("tokens")  # of blank images too
    assert labelled.count("logits") < 0.9 * labelled.count("tokens")
    assert labelled.losses() == pytest.approx(all_logits.losses(), rel=1e-5)


class Run:
    """Trainings in a folder, one after another: the same command, from a checkpoint or not."""

    def __init__(self, name, python, files, folder):
        self.framework, self.python, self.folder = FRAMEWORKS[name], python, folder
        code, self.settings = block_of(name), dict(self.framework.settings)
        if folder.name == "all":
            code = code.replace('logits="labelled"', 'logits="all"')
            self.settings |= self.framework.all_logits
        folder.mkdir(parents=True)
        for each in files.iterdir():
            (folder / each.name).symlink_to(each)
        (folder / "packed.py").write_text(f"import watched_steps\n{code}")
        if self.framework.file:
            (folder / self.framework.file).write_text(json.dumps(self.settings))

    def start(self, resume="", **environment):
        framework, programs = self.framework, self.python.parent
        command = [str(programs / framework.command[0]), *framework.command[1:]]
        if not framework.file:
            command += [f"--{key}={value}" for key, value in self.settings.items()]
        if resume:
            command.append(framework.resume.format(resume))
        (self.folder / "ids").write_text("")
        path = (".", TESTS / "support" / "frameworks", ROOT)
        told = {
            **child_env(),
            **dict(framework.environment),
            **environment,
            "PATH": os.pathsep.join((str(programs), os.environ["PATH"])),
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "HOME": str(self.folder / "home"),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "WATCHED_IDS": str(self.folder / "ids"),
        }
        self.log = (self.folder / f"log{time.monotonic_ns()}").open("w+")
        self.process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=told,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def join(self, *, by_kill=False):
        try:
            status = self.process.wait(RUN_S)
        finally:
            with suppress(ProcessLookupError):  # those that it has started, after their time
                os.killpg(self.process.pid, signal.SIGKILL)
        self.log.seek(0)
        printed = self.log.read()
        # a program whose part was killed says so in its own status
        assert (status % 256 == -signal.SIGKILL % 256) == by_kill, (status, printed[-3000:])
        assert by_kill or status == 0, printed[-3000:]

    def ids(self):
        return [json.loads(line) for line in (self.folder / "ids").read_text().splitlines()]

    def count(self, name):
        """Tokens or logits of all micro-batches."""
        return sum(int(line) for line in (self.folder / f"ids.{name}").read_text().split())

    def checkpoints(self):
        found = (self.folder / "out").glob("checkpoint-*")
        return sorted(int(each.name.partition("-")[2]) for each in found)

    def last(self):
        return self.folder / "out" / f"checkpoint-{self.checkpoints()[-1]}"

    def losses(self):
        state = json.loads((self.last() / "trainer_state.json").read_text())
        return [each["loss"] for each in state["log_history"] if "loss" in each]

    def weights(self):
        return safetensors.load_file(self.last() / "model.safetensors")


def block_of(name):
    """The code of docs/load/trainers after the comment that names the framework."""
    pages = sorted((ROOT / "docs" / "load" / "trainers").glob("*.md"))
    text = "\n".join(page.read_text("utf-8") for page in pages)
    (block,) = re.findall(rf"<!-- runs in {name} -->\n```python\n(.*?)```", text, re.DOTALL)
    assert block.count(MAX_TOKENS[0]) == 1
    return block.replace(*MAX_TOKENS)
