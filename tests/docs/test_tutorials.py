"""The tutorials, word for word and in order, each in an empty folder: three_lines, pack,
from_a_bucket, pipeline, coming_from.

A shell reads the commands; they run in processes that are forked, which have imported already what
takes seconds. What the pages download is in the folder: small models, and data of each tool.
"""

import json
import os
import re
import shutil

import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from isobatch.loaders import StreamingLoader
from support.builds.layouts import write_mds, write_prepared
from support.models.saved_folders import save_folder
from support.pages.readme_folder import readme_folder
from support.pages.tutorial import tutorial


@pytest.fixture
def folder(tmp_path):
    """An empty one."""
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def put_model(folder):
    """The model that pages name, as its repository has it, but for the weights."""
    save_folder("qwen2_5_vl", folder / "Qwen" / "Qwen2.5-VL-3B-Instruct")


def test_three_lines(folder):
    readme_folder(folder)
    said = tutorial("three_lines", folder).follow()
    assert re.search(r"^step 0: \d+ samples, [\d,]+ tokens$", said, re.MULTILINE)
    assert re.search(r"^loss \d+\.\d+$", said, re.MULTILINE)
    for rank in (0, 1):
        assert re.search(rf"rank {rank}, step 0: \[\d+", said)
    assert re.search(r"steps that are left: \d+", said)


def test_pack(folder):
    put_model(folder)
    page = tutorial("pack", folder)
    said = page.follow()
    # what the page shows is what it prints
    shown = [block.code for block in page.blocks if not block.language]
    for line in filter(None, "".join(shown).splitlines()):
        assert line in said, line
    assert pq.read_table(folder / "packed" / "rejected.parquet").num_rows == 1
    assert (folder / "group.html").exists()
    assert re.search(r"^\d+ samples, \d+ tokens$", said, re.MULTILINE)


@pytest.mark.server
def test_from_a_bucket(folder, s3, tmp_path):
    bucket = f"{s3.uri}/tutorial-{os.getpid()}"
    said = tutorial("from_a_bucket", folder, BUCKET=bucket, **s3.environment).follow()
    assert re.search(r"step 2: \[\d+, \d+\] samples", said)
    assert re.search(r"read [\d,]+ bytes", said)
    assert any((folder / "cache").rglob("*"))


def test_pipeline(folder):
    said = tutorial("pipeline", folder).follow()
    assert json.loads((folder / "plan" / "plan.json").read_text())
    losses = re.findall(r"^step +(\d) +loss", said, re.MULTILINE)
    assert losses == [*"01234567"]


def test_coming_from(folder):
    put_model(folder)
    for write in (energon_data, mds, llama_factory, swift):
        write(folder)
    tutorial("coming_from", folder).follow()
    for name in ("energon", "energon_mix", "mds", "llama_factory", "swift"):
        loader = StreamingLoader(folder / f"from_{name}", dp_rank=0, dp_world_size=1)
        ids = [name for step in loader for batch in step for name in batch.sample_ids]
        assert len(set(ids)) == len(ids) == (8 if name == "energon_mix" else 4), name


def picture(folder, number):
    path = folder / "images" / f"{number}.png"
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (60 + number, 80), "white").save(path)
    return path


def energon_data(folder):
    """Two prepared folders, and a metadataset of both."""
    for first, name in ((0, "energon_data"), (4, "more")):
        samples = [
            (f"{number}", {"png": picture(folder, number).read_bytes(), "txt": b"A page."})
            for number in range(first, first + 4)
        ]
        about = {
            "sample_type": {"__module__": "megatron.energon", "__class__": "CaptioningSample"},
            "field_map": {"image": "png", "caption": "txt"},
        }
        write_prepared(folder / name, {"shard_0.tar": samples}, about=about)
    mix = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {
            "train": {"blend": [{"path": f"./{name}"} for name in ("energon_data", "more")]}
        },
    }
    (folder / "energon_mix.yaml").write_text(yaml.safe_dump(mix))


def mds(folder):
    rows = [
        {"id": f"m{number}", "image": picture(folder, number).read_bytes(), "caption": "A page."}
        for number in range(4)
    ]
    write_mds(folder / "mds", {"id": "str", "image": "png", "caption": "str"}, rows)


CONVERSATIONS = [
    {
        "messages": [
            {"role": "user", "content": "<image>What is it?"},
            {"role": "assistant", "content": "A page."},
        ],
        "images": [f"images/{number}.png"],
    }
    for number in range(4)
]
"""Records of LLaMA-Factory and ms-swift."""


def llama_factory(folder):
    (folder / "data").mkdir()
    shutil.copytree(folder / "images", folder / "data" / "images")
    (folder / "data" / "pages.json").write_text(json.dumps(CONVERSATIONS))
    tags = {"role_tag": "role", "content_tag": "content"}
    tags |= {"user_tag": "user", "assistant_tag": "assistant"}
    about = {
        "file_name": "pages.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": tags,
    }
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"pages": about}))


def swift(folder):
    (folder / "swift.jsonl").write_text("\n".join(map(json.dumps, CONVERSATIONS)))
