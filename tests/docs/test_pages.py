"""Commands and programs of other pages than the tutorials, word for word, with stand-ins for what
they name: small data, a small model.
"""

import json
import shutil

import numpy as np
import pytest
import torch
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForImageTextToText

import isobatch
from isobatch.packer.verify import require_intact, verify_build
from isobatch.shards.manifest import read_manifest
from support.builds.packed import quiet
from support.models.saved_folders import save_folder
from support.pages.blocks import Block
from support.pages.page_data import block, records
from support.pages.readme_folder import readme_folder
from support.pages.runners import PAGE_COMMANDS, PAGE_PROGRAMS
from support.pages.tutorial import Tutorial

MODEL = "path/to/Qwen2.5-VL-7B-Instruct"


@pytest.fixture
def folder(tmp_path):
    """An empty one."""
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def test_commands_of_pages(folder):
    save_folder("qwen2_5_vl", folder / MODEL)
    (folder / "annotations.json").write_text(json.dumps(records(folder, 0, 40)))
    (folder / "new.json").write_text(json.dumps(records(folder, 40, 44)))
    (folder / "build.toml").write_text(
        f'dataset = "annotations.json"\ndata_root = "images"\nmodel = "{MODEL}"\nout = "packed"\n'
    )
    (folder / "ids.txt").write_text("page-3\n")
    lengths = [{"vit_num": 1, "token_num": 300 + n} for n in range(50)]
    (folder / "lengths.json").write_text(json.dumps(lengths))
    commands = [block(*command) for command in PAGE_COMMANDS]
    first, (changing, *after) = commands[:3], commands[3:]
    Tutorial(first, folder).follow()
    # another build of the same caps, for `merge`
    limits = read_manifest(folder / "packed").limits
    caps = f"--max-seq-len {limits.max_seq_len} --max-vision {limits.max_vision}"
    (folder / "others.json").write_text(json.dumps(records(folder, 44, 48)))
    command = f"packer build --dataset others.json --data-root images/ --model {MODEL} {caps}"
    Tutorial([Block("other", 1, "", "bash", f"{command} --out other/")], folder).follow()
    # the data of the page before is in the build already
    (folder / "new.json").write_text(json.dumps(records(folder, 48, 52)))
    Tutorial([changing, *after], folder).follow()
    require_intact(verify_build(folder / "packed", quiet(), workers=1))


def test_programs_of_pages(folder, monkeypatch):
    readme_folder(folder)
    monkeypatch.chdir(folder)
    dataset = load_dataset("lmms-lab/LLaVA-OneVision-Data", "ai2d(gpt4v)", split="train")
    name = "Qwen/Qwen3-VL-2B-Instruct"
    with isobatch.BalancedLoader(dataset, model=name, max_tokens=512) as loader:
        loader.save_build("packed/")
    for other in ("packed-a", "packed-b"):
        shutil.copytree("packed", other)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(name))
    saved = []
    names = {
        **{"model": model, "model_id": name, "dataset": dataset, "save": saved.append},
        **{"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "torch": torch, "np": np},
        **{"StreamingLoader": isobatch.StreamingLoader, "DataLoader": torch.utils.data.DataLoader},
        **{"flops": np.arange(1, 65) * 1e12, "num_tokens": np.full(64, 512), "rank": 0},
    }
    for page, begin in PAGE_PROGRAMS:
        program = block(page, begin)
        exec(compile(program.code, program.place, "exec"), names)
    assert saved
