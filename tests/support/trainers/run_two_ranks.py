"""On each of two ranks: train with each trainer by plain SGD, and write the weights into
DIR/NAME.pt; evaluate with Trainer, and write its loss into DIR/evaluation.json.

python run_two_ranks.py BUILD DIR STEPS LEARNING_RATE
"""

import json
import os
import sys
from itertools import islice
from pathlib import Path

import lightning
import torch
import train_accelerate
import train_hf_trainer
import train_lightning
from accelerate import Accelerator
from tiny_internvl import make_internvl

from isobatch.loaders import StreamingLoader

WORLD_SIZE, MICRO_BATCHES = 2, 2


def main() -> None:
    build, out, steps, rate = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    for name, train in (
        ("hf_trainer", hf_trainer),
        ("accelerate", accelerate),
        ("lightning", with_lightning),
    ):
        weights = train(build, str(out / name), steps, rate)
        if os.environ["RANK"] == "0":
            torch.save(weights, out / f"{name}.pt")


def hf_trainer(build, out, steps, rate):
    trainer = train_hf_trainer.make_trainer(
        build,
        out,
        max_steps=steps,
        gradient_accumulation_steps=MICRO_BATCHES,
        learning_rate=rate,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        use_cpu=True,
    )
    trainer.train()
    metrics = trainer.evaluate(StreamingLoader(build, shuffle=False))
    if os.environ["RANK"] == "0":
        Path(out).with_name("evaluation.json").write_text(json.dumps(metrics))
    return trainer.model.state_dict()


def accelerate(build, out, steps, rate):
    accelerator = Accelerator(cpu=True)
    loader = StreamingLoader(
        build,
        dp_rank=accelerator.process_index,
        dp_world_size=accelerator.num_processes,
        micro_batches_per_step=MICRO_BATCHES,
    )
    plain = make_internvl(loader)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=rate))
    for batches in islice(loader, steps):
        optimizer.zero_grad()
        train_accelerate.train_step(accelerator, model, batches)
        optimizer.step()
    return plain.state_dict()


def with_lightning(build, out, steps, rate):
    class Module(train_lightning.Module):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=rate)

    module = Module(build, micro_batches_per_step=MICRO_BATCHES)
    options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", devices=WORLD_SIZE, strategy="ddp", **options
    )
    trainer.fit(module)
    return module.model.state_dict()


if __name__ == "__main__":
    main()
