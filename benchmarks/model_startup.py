"""Host memory of each rank at start: a model of 1 B parameters, read from its folder.

    python benchmarks/model_startup.py [--ranks 2 4] [--work FOLDER]

A Qwen2-VL of a billion random parameters is written in float32 and in bf16 (6 GB in all), and its
layers are cut evenly among the ranks of a pipeline. `whole` is what each rank did before: all of
the model by `from_pretrained`. Both are peaks of a process until its layers are there and have been
touched once, beyond what it had after its imports and before the model, which is the last column.
Every line is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import transformers
from tables import console, new_table

from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.engine.planning.partition import even_partition
from isobatch.engine.runtime.models.transformers_models import from_transformers
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions, layers_of_rank
from isobatch.engine.train.models._transformers_files import write_model
from isobatch.engine.train.models.open_model import open_model
from isobatch.models.presets import load_model

MIB = 1 << 20
IMAGE, VIDEO, VOCAB = 151655, 151656, 151936
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 14,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [16, 24, 24],
        "rope_theta": 1_000_000.0,
    },
}
VISION = {"depth": 16, "embed_dim": 768, "num_heads": 12, "hidden_size": 1536}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--work", type=Path, help="folder for the models")
    arguments = parser.parse_args()
    table = new_table(
        "peak host memory at start, MiB",
        ["file", "ranks", "rank", "its layers", "whole", "now", "now / layers", "before the model"],
    )
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        for dtype in (torch.float32, torch.bfloat16):
            folder = Path(work) / str(dtype)
            _in_processes(1, work, write, (folder, dtype))
            for count in arguments.ranks:
                now = _in_processes(count, work, load_layers, (folder,))
                for rank, (layers, peak, base) in enumerate(now):
                    ((_, whole, _),) = _in_processes(1, work, load_whole, (folder, rank, count))
                    name = str(dtype).removeprefix("torch.")
                    cells = (f"{number / MIB:,.0f}" for number in (layers, whole, peak))
                    table.add_row(
                        name,
                        *map(str, (count, rank)),
                        *cells,
                        f"{peak / layers:.2f}",
                        f"{base / MIB:,.0f}",
                    )
    console.print(table)


def write(rank: int, folder: Path, dtype: torch.dtype) -> None:
    """The model, a shard at a time."""
    config = transformers.Qwen2VLConfig(
        text_config=TEXT,
        vision_config=VISION,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=True,
    )
    with accelerate.init_empty_weights():
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.tie_weights()
    shapes = [(name, weight.shape) for name, weight in model.named_parameters()]
    shards = [shapes[first : first + 30] for first in range(0, len(shapes), 30)]
    write_model(
        model,
        folder,
        ({name: torch.rand(shape).to(dtype) for name, shape in shard} for shard in shards),
    )


def load_layers(rank: int, folder: Path) -> tuple[int, int, int]:
    """This rank's layers alone; -> their bytes, peak, and what the process had before."""
    base = _memory("VmRSS")
    source: Any = SimpleNamespace(
        model=load_model("qwen2_vl"),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=None,
        vocab_size=VOCAB,
    )
    stack = open_model(None, folder, source).stack
    count = len(stack.layers)
    ranks = list(range(dist.get_world_size()))
    options = PipelineOptions(mode=TrainingMode(precision="fp32", zero_stage=0))
    pipeline = Pipeline(stack, _even(count, len(ranks)), [False] * count, [ranks], options)
    num_bytes = _touch(list(pipeline.layers.values()))
    peak = _memory("VmHWM") - base
    dist.barrier()
    return num_bytes, peak, base


def load_whole(rank: int, folder: Path, stage: int, count: int) -> tuple[int, int, int]:
    """The same after the whole model was read, as each rank did."""
    base = _memory("VmRSS")
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    layers = from_transformers(model).layers
    indices = layers_of_rank(_even(len(layers), count), stage, count)
    num_bytes = _touch([layers[index] for index in indices])
    return num_bytes, _memory("VmHWM") - base, base


def _even(num_layers: int, count: int) -> list[int]:
    borders: list[int] = even_partition([1] * num_layers, count).tolist()
    return borders


def _touch(layers: list[torch.nn.Module]) -> int:
    """Read all weights of layers; -> their bytes, shared ones once."""
    weights = {weight for layer in layers for weight in layer.parameters()}
    for weight in weights:
        assert weight.detach().sum().isfinite()
    return sum(weight.nbytes for weight in weights)


def _memory(name: str) -> int:
    """A line of this process's status, in bytes."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) * 1024


def _in_processes(count: int, work: str, call: Any, arguments: tuple[Any, ...]) -> list[Any]:
    """Results of new processes, by rank."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=_run, args=(rank, count, folder, call, arguments))
            for rank in range(count)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            assert process.exitcode == 0
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(count)]


def _run(rank: int, count: int, folder: str, call: Any, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count
    )
    (Path(folder) / str(rank)).write_text(json.dumps(call(rank, *arguments)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
