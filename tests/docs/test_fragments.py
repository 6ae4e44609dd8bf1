"""Parts of programs on pages, word for word, one after the other: what stands for the names that
they use is real and small.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import lightning
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
import trl
from datasets import load_dataset
from pyarrow import fs
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    TrainingArguments,
)

import isobatch
from isobatch.engine import Plan
from isobatch.engine.runtime.models.transformers_models import from_transformers
from isobatch.engine.runtime.stage_io import LayerStack
from isobatch.loaders.batch.packed import packed_batch
from support.models.saved_folders import save_folder
from support.pages.blocks import Block
from support.pages.page_data import block, records
from support.pages.readme_folder import FAMILY, readme_folder
from support.pages.runners import BUCKET_FRAGMENTS, PAGE_FILES, PAGE_FRAGMENTS
from support.pages.tutorial import Tutorial

NAME = "Qwen/Qwen3-VL-2B-Instruct"


class Enough(Exception):
    """Ends a loop that has no end."""


class Module(lightning.LightningModule):
    """A model of one number, which ends its training after two steps."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.tokens = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, step, _):
        self.tokens.append(sum(len(batch.input_ids) for batch in step.micro_batches))
        self.trainer.should_stop = len(self.tokens) == 2
        return self.weight * self.tokens[-1]


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What the pages' names stand for, in a folder with a small model, dataset and build."""
    readme_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    dataset = load_dataset("lmms-lab/LLaVA-OneVision-Data", "ai2d(gpt4v)", split="train")
    with isobatch.BalancedLoader(dataset, model=NAME, max_tokens=512) as loader:
        loader.save_build("packed/")
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(NAME))
    model.save_pretrained(NAME)
    return {
        "processor": save_folder(FAMILY, tmp_path / "processor"),
        **{"model": model, "dataset": dataset, "torch": torch, "DataLoader": DataLoader},
        **{"StreamingLoader": isobatch.StreamingLoader, "lightning": lightning},
        **{"BalancedLoader": isobatch.BalancedLoader, "StepDataset": isobatch.StepDataset},
        **{"TrainingArguments": TrainingArguments, "load_dataset": load_dataset},
    }


def test_fragments(names, monkeypatch):
    # its default is bf16 on a GPU
    monkeypatch.setattr(trl, "SFTConfig", partial(trl.SFTConfig, use_cpu=True))
    todo = iter(PAGE_FRAGMENTS)

    def run(page, **stand_ins):
        """The next fragment, which is of this page; -> what it names."""
        at, begin = next(todo)
        assert at == f"docs/{page}.md"
        names.update(stand_ins)
        program = block(at, begin)
        exec(compile(program.code, program.place, "exec"), names)
        return names

    loader = isobatch.StreamingLoader("packed")
    batch = next(iter(loader))[0]
    model = names["model"]
    tokenizer = names["processor"].tokenizer
    vocabulary = len(tokenizer)
    head = torch.nn.Embedding(vocabulary, vocabulary)
    run("load/loss", model=lambda batch: head(batch.input_ids), batch=batch)
    assert head.weight.grad.abs().sum() > 0
    run("load/metrics")
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    run("load/metrics", train=lambda step: float(len(step)), schedule=schedule)
    names["loader"].close()
    assert any(Path("runs/first").iterdir())
    own_samples(run, names)
    shares(run, names, model)
    trainers(run, names, model, tokenizer)
    columns(run, names)
    monkeypatch.undo()
    left_out = run("pack")["function"]
    assert left_out({"score": 0.4}) == "score below .5"
    assert left_out({"score": 0.6, "chat": []})["messages"] == []
    assert not list(todo)


def own_samples(run, names):
    """Samples of a function, and streams."""
    texts = [f"<|image_pad|> is picture {'and more ' * n}" for n in range(9)]
    pictures = names["dataset"]["image"]
    rows = [{"images": [pictures[n]], "text": text} for n, text in enumerate(texts)]
    processor = names["processor"]
    processor.image_processor.size = {"shortest_edge": 1024, "longest_edge": 65536}

    def process(images, text):
        return processor(images=images, text=text, return_tensors="pt")

    stand_ins = {"dataset": rows, "processor": process, "my_labels": lambda ids: ids}
    with run("load/own_samples", **stand_ins)["loader"] as loader:
        (batch,) = next(iter(loader))
    assert len(batch.sample_ids) == 9
    assert "image_grid_thw" in batch.processed
    items = [{"input_ids": list(range(5, 9 + n))} for n in range(6)]
    with run("load/own_samples", processed=items)["loader"] as loader:
        assert sum(len(batch.sample_ids) for step in loader for batch in step) == 24


def shares(run, names, model):
    """A context-parallel rank's share of a row, and a group of one that encodes its images."""
    loader = isobatch.BalancedLoader(names["dataset"], model=NAME, max_tokens=512, pad_each_to=4)
    batch = next(batch for step in loader for batch in step if len(batch.image_grid_thw) > 1)
    stand_ins = {"packed_batch": packed_batch, "cp_size": 2, "cp_rank": 1, "model": model}
    run("load/packed", batch=batch, **stand_ins)
    assert 2 * len(names["shard"].input_ids) == len(names["row"].input_ids)
    dist.init_process_group(
        "gloo", init_method=f"file://{Path('store').resolve()}", rank=0, world_size=1
    )
    try:
        run("load/packed", mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("cp",)))
    finally:
        dist.destroy_process_group()
    assert len(names["features"]) == sum(load // 4 for load in names["loads"])


def trainers(run, names, model, tokenizer):
    """Trainers that resume what they have trained."""
    names["model"] = model
    run("load/trainers/hf_trainer")
    steps = names["trainer"].state.global_step
    assert Path("out", f"checkpoint-{steps}").exists()
    names["trainer"].train(
        resume_from_checkpoint=True
    )  # as the comment says: there is no step left
    assert names["trainer"].state.global_step == steps
    for page in ("load/trainers/hf_trainer", "load/without_a_build", "load/without_a_build"):
        run(page)
    run("load/trainers/trl", processor=tokenizer)
    assert names["trainer"].state.global_step == steps
    module = Module()
    loader = isobatch.StreamingLoader("packed", micro_batches_per_step=2)
    run("load/trainers/lightning", module=module, loader=loader)
    assert len(module.tokens) == 2
    saved = []

    def save(state):
        saved.append(state)
        if len(saved) == 2:
            raise Enough

    with pytest.raises(Enough):
        run("load/trainers/dataloader", save=save)
    loader.load_state_dict(saved[-1])
    del names["steps"]


def columns(run, names):
    """Columns of records, a plan, and a model for the engine."""
    save_folder("qwen2_5_vl", Path("small"))
    rows = [row | {"weight": number / 2} for number, row in enumerate(records(Path(), 0, 24))]
    Path("docs.json").write_text(json.dumps(rows))
    shutil.rmtree("packed")
    commands = """
packer build --dataset docs.json --data-root images --model small --keep-columns weight --out packed
python -m engine plan --model tiny --images 1 --seq-len 512 --pp 2 --micro-batches 4 --out plan
"""
    Tutorial([Block("columns", 1, "", "bash", commands)], Path.cwd()).follow()
    with run("load/evaluation_and_mixing")["documents"] as loader:
        batch = next(iter(loader))[0]
    run("load/options", batch=batch)
    assert names["weights"].tolist() == [int(name[5:]) / 2 for name in batch.sample_ids]
    plan = run("plan")["plan"]
    assert isinstance(plan, Plan)
    assert len(plan.borders) == 3
    stand_ins = {"AutoModelForImageTextToText": AutoModelForImageTextToText, "folder": NAME}
    run("train", from_transformers=from_transformers, **stand_ins)
    assert isinstance(names["layers"], LayerStack)


def test_descriptions_of_datasets(tmp_path):
    """A mixture of a known size, which is tried, and names of one's own, which are packed."""
    readme_folder(tmp_path)
    save_folder("qwen2_5_vl", tmp_path / "model")
    rows = records(tmp_path, 0, 40)
    for folder in ("llava", "coyo"):
        (tmp_path / folder).mkdir()
    shutil.copytree(tmp_path / "images", tmp_path / "llava" / "images")
    (tmp_path / "llava" / "annotations.json").write_text(json.dumps(rows))
    shutil.copy(tmp_path / "lmms-lab" / "LLaVA-OneVision-Data" / "train.parquet", tmp_path / "coyo")
    own = [{"my_conv": row["conversations"], "pics": [row["image"]]} for row in rows]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, own)))
    said = []
    for number, place in enumerate(PAGE_FILES):
        code = block(*place).code
        name = f"mix{number}.toml"
        (tmp_path / name).write_text(code)
        command = f"packer build --dataset {name} --model model --max-seq-len 2048 --out p{number}"
        command += " --dry-run" * ("num_samples" in code) + " --data-root images" * (number == 1)
        said.append(Tutorial([Block(name, 1, "", "bash", command)], tmp_path).follow())
    assert "64 read + 999,936 repeated = 1,000,000 packed" in said[0]
    assert pq.read_table(tmp_path / "p1" / "counts.parquet").num_rows == 20


@pytest.mark.server
def test_fragments_that_read_a_bucket(names, s3, monkeypatch):
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    files, _ = fs.FileSystem.from_uri(
        f"{s3.uri}?endpoint_override={s3.endpoint}&scheme=http&allow_bucket_creation=true"
    )
    for folder in ("bucket/packed", "data/web", "data/charts"):
        files.create_dir(folder.partition("/")[0])
        fs.copy_files("packed", folder, destination_filesystem=files)
    for place in BUCKET_FRAGMENTS:
        program = block(*place)
        exec(compile(program.code, program.place, "exec"), names)
        assert next(iter(names["loader"]))[0].sample_ids
        names["loader"].close()
