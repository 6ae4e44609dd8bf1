"""Logits of all tokens against those of labelled ones: memory and time of a micro-batch.

    python benchmarks/labelled_logits.py [--tokens 4096 8192 16384] [--labels 6 18] [--turns 1]
                                         [--in transformers engine]

A small Qwen2.5-VL in float32 (two layers, 256 wide) with that family's own vocabulary of 151,936
runs one micro-batch forward and backward: samples of 1,024 tokens, a row each, so that attention
costs what it does within samples; an answer of so many per cent is at the end of each. In the
engine the model runs as layers, whose loss overwrites the logits; "all" is what it did before.
Memory is what is live at most beyond weights, gradients of weights included. Time is CPU seconds of
one thread, the best turn's; the methods take turns. What does not fit into the free memory is not
run: "of all" is per token, of the first method in the smallest micro-batch.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tables import console, new_table
from torch import Tensor

from isobatch import MicroBatch, chunked_loss, model_inputs
from isobatch.common.types import LABEL_IGNORE
from isobatch.engine.runtime.cpu_memory import LiveBytes
from isobatch.engine.runtime.models.transformers_models import from_transformers
from isobatch.tensors.token_loss import loss_sum, shift_labels

VOCABULARY, WIDTH, SAMPLE = 151_936, 256, 1_024
SHARE = 0.6
"""Of the free memory, that a method may take."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Method:
    """A way to compute logits and loss."""

    name: str
    logits: str
    is_chunked: bool
    bytes_per_logit: int
    """A first guess, by which what does not fit is left out."""


METHODS = {
    "transformers": (
        Method("all, transformers' loss", "all", False, 12),
        Method("all, `chunked_loss`", "all", True, 8),
        Method("labelled, transformers' loss", "labelled", False, 12),
        Method("labelled, `chunked_loss`", "labelled", True, 8),
    ),
    "engine": (
        Method("all, engine", "all", True, 4),
        Method("labelled, engine", "labelled", True, 4),
    ),
}


@dataclass(slots=True)
class Figures:
    """What one method took."""

    gib: float = 0.0
    seconds: float = float("inf")
    loss: float = 0.0

    def scaled(self, factor: float) -> Figures:
        """The same for so many times the tokens."""
        return Figures(self.gib * factor, self.seconds * factor)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; -> exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[4_096, 8_192, 16_384])
    parser.add_argument("--labels", type=int, nargs="+", default=[6, 18], help="per cent of tokens")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--in", dest="places", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args(arguments)
    columns = ["tokens", "labels", "logits", "GiB", "of all", "CPU s", "of all"]
    table = new_table("One micro-batch, forward and backward", columns)
    torch.set_num_threads(1)
    model = make_model()
    all_methods = [method for place in options.places for method in METHODS[place]]
    first = None
    for tokens in options.tokens:
        # how many have labels does not matter to all logits: they are run once
        for place, percent in enumerate(options.labels):
            methods = [item for item in all_methods if not place or item.logits == "labelled"]
            results = compare(model, make_batch(tokens, percent), methods, options.turns)
            if first is None and methods[0] in results:
                first = results[methods[0]].scaled(1 / tokens)
            _add_rows(table, tokens, percent, methods, results, first)
    console.print(table)
    return 0


def make_model() -> Any:
    """The model, with random weights."""
    import transformers  # noqa: PLC0415  slow to import

    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6}
    text = {
        **{"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        "rope_parameters": rope,
    }
    vision = {"depth": 1, "hidden_size": 64, "num_heads": 2, "out_hidden_size": WIDTH}
    vision |= {"intermediate_size": 128, "fullatt_block_indexes": [0]}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return transformers.AutoModelForImageTextToText.from_config(config).train()


def make_batch(tokens: int, percent: int) -> MicroBatch:
    """Text samples of one length, of which the last `percent` are an answer."""
    number = tokens // SAMPLE
    generator = torch.Generator().manual_seed(tokens)
    plain_ids = min(100_000, VOCABULARY)  # before those of images
    ids = torch.randint(0, plain_ids, (number, SAMPLE), generator=generator)
    labels = ids.clone()
    labels[:, : SAMPLE - round(SAMPLE * percent / 100)] = -100
    num_labels = int((labels != -100).sum())
    return MicroBatch(
        sample_ids=tuple(map(str, range(number))),
        input_ids=ids.flatten(),
        labels=labels.flatten(),
        position_ids=torch.arange(SAMPLE).repeat(number),
        cu_seqlens=SAMPLE * torch.arange(number + 1, dtype=torch.int32),
        pixel_values=torch.zeros(0, 3 * 2 * 14 * 14),
        patches_per_image=torch.zeros(0, dtype=torch.long),
        image_sizes=torch.zeros(0, 2, dtype=torch.long),
        image_grid_thw=torch.zeros(0, 3, dtype=torch.long),
        num_loss_tokens=num_labels,
        num_step_samples=number,
        loss_normalizer=float(num_labels),
        is_padded=True,
    )


def compare(
    model: Any, batch: MicroBatch, methods: Sequence[Method], turns: int
) -> dict[Method, Figures]:
    """Figures of each method that fits."""
    results: dict[Method, Figures] = {}
    for turn in range(turns):
        for method in methods:
            rows = batch.num_loss_tokens if method.logits == "labelled" else len(batch.labels)
            needed = rows * VOCABULARY * method.bytes_per_logit
            fits = method in results if turn else needed < SHARE * free_bytes()
            if fits:
                run(model, batch, method, results.setdefault(method, Figures()))
    losses = [figures.loss for figures in results.values()]
    if max(losses) - min(losses) > 1e-5 * max(losses):
        raise RuntimeError(f"the methods' losses differ: {losses}")
    return results


def run(model: Any, batch: MicroBatch, method: Method, figures: Figures) -> None:
    """One micro-batch forward and backward; keeps the best time and the peak."""
    loss_of = engine_loss if method in METHODS["engine"] else transformers_loss
    model.zero_grad(set_to_none=True)
    gc.collect()
    start = time.process_time()
    with LiveBytes() as memory:
        loss = loss_of(model, batch, method)
        loss.backward()
    figures.seconds = min(figures.seconds, time.process_time() - start)
    figures.gib = max(figures.gib, memory.peak_bytes / GIB)
    figures.loss = loss.item()
    done = f"{method.name}: {figures.gib:.2f} GiB, {figures.seconds:.1f} s"
    print(f"{len(batch.labels):,} tokens, {done}", file=sys.stderr, flush=True)


def transformers_loss(model: Any, batch: MicroBatch, method: Method) -> Tensor:
    """The loss of the model itself."""
    from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: PLC0415  slow to import

    model.loss_function = chunked_loss if method.is_chunked else ForCausalLMLoss
    inputs = model_inputs(batch, model, always_encode=False, logits=method.logits)
    loss: Tensor = model(**inputs).loss
    return loss


def engine_loss(model: Any, batch: MicroBatch, method: Method) -> Tensor:
    """The loss of the model's layers, as a pipeline runs them."""
    *layers, head = from_transformers(model).layers
    tensors: dict[str, Tensor] = {}
    for layer in layers:
        tensors = layer(tensors, batch)
    if method.logits == "labelled":
        total: Tensor = head(tensors, batch)["loss"]
        return total / batch.loss_normalizer
    targets = shift_labels(batch.labels, batch.cu_seqlens)
    labelled = targets != LABEL_IGNORE
    logits = head.lm_head(head.norm(tensors["hidden"][0]))
    total = loss_sum(logits, targets.where(labelled, 0), labelled.float(), overwrite=True)
    return total / batch.loss_normalizer


def free_bytes() -> int:
    """Memory of the machine that is free or can be freed."""
    lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    values = dict(line.split(":") for line in lines)
    return 1024 * int(values["MemAvailable"].split()[0])


def _add_rows(
    table: Any,
    tokens: int,
    percent: int,
    methods: Sequence[Method],
    results: dict[Method, Figures],
    first: Figures | None,
) -> None:
    for method in methods:
        labels = f"{percent} %" if method.logits == "labelled" else ""
        cells = [f"{tokens:,}", labels, method.name]
        if (figures := results.get(method)) is None:
            table.add_row(*cells, "does not fit", "", "", "")
            continue
        shares = ["", ""]
        if first is not None:
            whole = first.scaled(tokens)
            shares = [f"{figures.gib / whole.gib:.3f}", f"{figures.seconds / whole.seconds:.3f}"]
        table.add_row(*cells, f"{figures.gib:.2f}", shares[0], f"{figures.seconds:.1f}", shares[1])


if __name__ == "__main__":
    raise SystemExit(main())
