"""A model folder fine-tuned by one TOML file, killed at random points and resumed, to a folder that
transformers and peft load, with the loss that training ended with.
"""

import json
import random
import time
import tomllib

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import transformers

from isobatch.engine.runtime.checkpoints.training_state import newest_state
from isobatch.engine.train.models._transformers_files import MROPE, TEXT, make_config
from isobatch.loaders import StreamingLoader
from support import ROOT
from support.builds.manuals_build import build_manuals
from support.models.manuals_models import loss_alone
from support.pages.blocks import blocks_of
from support.ranks import kill_once, launch, start

pytestmark = pytest.mark.slow

STEPS, KILLS = 10, 2
TOLERANCE = 1e-5
"""Of a loss, relative, against transformers, sample by sample."""
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 1,
    "intermediate_size": 24,
    "out_hidden_size": TEXT["hidden_size"],
    "window_size": 112,
    "fullatt_block_indexes": [1],
}
(EXAMPLE,) = (
    block.code
    for block in blocks_of(ROOT / "docs/train.md")
    if block.mark == "settings: fine-tuning"
)
"""The page's own file, with other folders."""
LORA = 'lora_rank = 4\nlora_parts = ["vision", "projector", "llm"]\nlora_dropout = 0.1\n'

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "internvl"])
def base(request, tmp_path_factory):
    """(build, folder of `save_pretrained`) of a tiny model."""
    root = tmp_path_factory.mktemp(request.param)
    build = build_manuals(root, request.param)
    loader = StreamingLoader(build)
    config = (
        qwen_config(loader) if request.param == "qwen2_5_vl" else make_config("internvl", loader)
    )
    loader.close()
    torch.manual_seed(1)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(root / "base")
    return build, root / "base"


def internvl_config(loader):
    return make_config("internvl", loader)


def qwen_config(loader):
    video = loader.video_token_id
    return transformers.Qwen2_5_VLConfig(
        vision_config=VISION,
        text_config=TEXT | {"vocab_size": loader.vocab_size, "rope_parameters": MROPE},
        image_token_id=loader.image_token_id,
        video_token_id=loader.vocab_size if video is None else video,
    )


def settings(base, folder, more):
    """A run's TOML file."""
    folder.mkdir()
    build, model = base
    files = {"state": folder / "state", "export": folder / "export", "figures": folder / "figures"}
    files |= {
        "build": build,
        "eval": build,
        "config": model,
        "log_to": f"tensorboard:{folder}/runs",
    }
    values = tomllib.loads(EXAMPLE) | {name: str(file) for name, file in files.items()}
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
    (folder / "run.toml").write_text(text + more)
    return folder / "run.toml"


def figures(folder):
    path = folder / "figures"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(folder):
    """(step, loss, loss of the evaluation) of each line."""
    return [(line["step"], line["loss"], line.get("eval_loss")) for line in figures(folder)]


@pytest.mark.parametrize("more", ["", LORA], ids=["all", "lora"])
def test_a_folder_is_fine_tuned_killed_and_resumed_to_one_of_the_same_loss(base, tmp_path, more):
    whole = settings(base, tmp_path / "whole", more)
    result = launch(2, tmp_path / "printed", "engine", "train", whole)
    assert result.returncode == 0, result.stderr[-3000:]
    expected = losses(whole.parent)
    assert [step for step, *_ in expected] == list(range(STEPS))
    killed = settings(base, tmp_path / "killed", more)
    drawn = random.Random(str(base[0].parent.name) + more)
    for number in range(KILLS):
        done = len({step for step, *_ in losses(killed.parent)})
        after, wait_s = drawn.randint(0, 2), drawn.uniform(0, 0.3)
        ranks = start(2, tmp_path / "killed ranks", "engine", "train", killed)

        def is_time(number=number, done=done, after=after, wait_s=wait_s):
            if number and newest_state(killed.parent / "state") is None:
                return False
            if len({step for step, *_ in losses(killed.parent)}) <= min(done + after, STEPS - 4):
                return False
            time.sleep(wait_s)
            return True

        kill_once(ranks, is_time, 120)
    result = launch(2, tmp_path / "resumed", "engine", "train", killed)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "resumes after step" in result.stdout
    # steps that a kill lost are repeated, with the same losses
    assert set(losses(killed.parent)) == set(expected)
    for folder in (whole.parent, killed.parent):
        assert loss_of(folder / "export", base) == pytest.approx(expected[-1][2], rel=TOLERANCE)


def loss_of(folder, base):
    """Of the build, by transformers alone."""
    read = transformers.AutoModelForImageTextToText.from_pretrained
    if (folder / "adapter_config.json").exists():
        model = read(base[1], dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(model, folder, is_trainable=True)
    else:
        model = read(folder, dtype=torch.float32)
    loader = StreamingLoader(base[0], shuffle=False)
    total, labels = 0.0, 0
    for (batch,) in loader:
        # it divides by them, as transformers does
        total += loss_alone(model.eval(), batch, loader.model.vision) * batch.num_loss_tokens
        labels += batch.num_loss_tokens
    loader.close()
    return total / labels
