"""On each of two ranks: what trainers are asked for next to training; each writes DIR/RANK.json.

python edge_ranks.py DIR BUILD

DIR/rows.json has records. Schedules and tokens of Trainer and TRL on them, TRL's figures of a build
whose last step has a round without samples, Lightning's and Accelerate's schedules, and what
Accelerate is given wrongly.
"""

import json
import math
import sys
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path

import lightning
import torch
import train_accelerate
import train_lightning
from accelerate import Accelerator, DataLoaderConfiguration
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny_internvl import make_internvl
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainingArguments

from isobatch.common.errors import ConfigError
from isobatch.loaders import BalancedLoader, StepDataset, StreamingLoader
from isobatch.loaders.integrations.hf_trainer import BalancedTrainer
from support.loading.online_data import OPTIONS
from support.trainers.killed_training import COMMON, make_sft

EPOCHS, MICRO_BATCHES, STEPS, RATE = 3, 2, 5, 1e-3
SEEDS = 0, 5
"""Where the first estimate is a quarter too short, and a third too long."""
SCHEDULE = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "num_train_epochs": EPOCHS}


class Rates(TrainerCallback):
    """The rate of each step, and that after the last."""

    def __init__(self):
        self.found = []

    def on_step_begin(self, args, state, control, *, optimizer, **_):
        self.found.append(optimizer.param_groups[0]["lr"])

    def on_train_end(self, args, state, control, *, optimizer, **_):
        self.found.append(optimizer.param_groups[0]["lr"])


def main():
    folder, build = Path(sys.argv[1]), sys.argv[2]
    rows = json.loads((folder / "rows.json").read_text())
    said = {
        "trainer": [of_trainer(rows, folder, seed) for seed in SEEDS],
        "sft": of_sft(rows, folder),
        "figures": figures_of_sft(build, folder),
        "lightning": with_lightning(build),
        "accelerate": with_accelerate(build),
        "wrong": wrongly_prepared(build),
    }
    rank = Accelerator().process_index
    (folder / f"{rank}.json").write_text(json.dumps(said))
    torch.distributed.barrier()  # rank 0 has the store that loaders of others still read


def open_loader(rows, folder, seed=SEEDS[0]):
    options = {**OPTIONS, "window": 10, "max_tokens": 300, "data_root": str(folder)}
    return BalancedLoader(rows, micro_batches_per_step=MICRO_BATCHES, seed=seed, **options)


def of_trainer(rows, folder, seed):
    """Rates and tokens of a whole training, and of one resumed from its middle; its estimate."""
    found, whole = [], folder / f"whole-{seed}"
    for out, resume in ((whole, None), (folder / f"again-{seed}", whole / "checkpoint-4")):
        counts = {"include_num_input_tokens_seen": "non_padding"}
        given = COMMON | SCHEDULE | counts | {"save_steps": 4}
        args = TrainingArguments(str(out), **given)
        loader, rates = open_loader(rows, folder, seed), Rates()
        trainer = BalancedTrainer(
            model=make_internvl(loader), args=args, train_dataset=loader, callbacks=[rates]
        )
        trainer.train(resume_from_checkpoint=resume and str(resume))
        counts = trainer.state.num_input_tokens_seen, trainer.state.max_steps
        found.append((rates.found, *counts, trainer._schedule_steps))
    return found


def of_sft(rows, folder):
    rates = Rates()
    trainer = make_sft(
        "sft", lambda: open_loader(rows, folder), folder / "sft", [rates], **SCHEDULE
    )
    trainer.train()
    return rates.found


def figures_of_sft(build, folder):
    """Entropy and accuracy of each step, of weights that stay."""
    loader = StreamingLoader(build, micro_batches_per_step=MICRO_BATCHES)
    given = {"learning_rate": 0.0, "max_steps": len(loader), "save_steps": 99}
    trainer = make_sft("sft", lambda: loader, folder / "figures", [], **given)
    trainer.train()
    # one rank has no sample: TRL would wait for it
    one = {"shuffle": False, "limit": 1}
    with suppress(ConfigError):
        trainer.evaluate(StreamingLoader(build, **one))
        raise AssertionError
    assert trainer.evaluate(StreamingLoader(build, **one, remainder="pad"))["eval_entropy"] > 0
    logs = [each for each in trainer.state.log_history if "entropy" in each]
    return [(each["entropy"], each["mean_token_accuracy"]) for each in logs]


def with_lightning(build):
    rates = []

    class Module(train_lightning.Module):
        def configure_optimizers(self):
            self.optimizer = torch.optim.SGD(self.parameters(), lr=RATE)
            steps = self.trainer.estimated_stepping_batches
            self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
            return self.optimizer

        def training_step(self, step, number):
            rates.append(self.schedule.get_last_lr()[0])
            super().training_step(step, number)
            self.schedule.step()

    module = Module(build, micro_batches_per_step=MICRO_BATCHES)
    options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=2, strategy="ddp", **options
    )
    trainer.fit(module)
    # Lightning would divide losses by them, as Accelerate does
    with suppress(MisconfigurationException):
        lightning.Trainer(max_steps=1, accelerator="cpu", accumulate_grad_batches=2, **options).fit(
            module
        )
        raise AssertionError
    return [*rates, module.schedule.get_last_lr()[0]]


def with_accelerate(build):
    accelerator = Accelerator(cpu=True)
    loader = StreamingLoader(build, micro_batches_per_step=MICRO_BATCHES)
    plain = make_internvl(loader)
    own = torch.optim.SGD(plain.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(own, STEPS)
    model, optimizer, prepared = accelerator.prepare(plain, own, loader)
    assert prepared is loader
    rates = []
    for batches in islice(train_accelerate.endless(loader), STEPS):
        rates.append(schedule.get_last_lr()[0])
        optimizer.zero_grad()
        train_accelerate.train_step(accelerator, model, batches)
        optimizer.step()
        schedule.step()
    return [*rates, schedule.get_last_lr()[0]]


def wrongly_prepared(build):
    """What is said, and after how many seconds."""
    found, begun = {}, time.monotonic()

    def refused(name, work):
        try:
            work()
        except ConfigError as error:
            found[name] = str(error), time.monotonic() - begun

    def data():
        return DataLoader(StepDataset(StreamingLoader(build)), batch_size=None)

    for name, dispatches in (("dispatched", None), ("sharded", False)):
        options = DataLoaderConfiguration(dispatch_batches=dispatches)
        accelerator = Accelerator(cpu=True, dataloader_config=options)
        refused(name, lambda: next(iter(accelerator.prepare(data()))))  # noqa: B023
    Accelerator(cpu=True, gradient_accumulation_steps=2)
    refused("accumulated", lambda: next(iter(StreamingLoader(build))))
    worker = {"batch_size": None, "num_workers": 1, "multiprocessing_context": "spawn"}
    refused("worker", lambda: next(iter(DataLoader(StepDataset(StreamingLoader(build)), **worker))))
    evaluation = StreamingLoader(build, shuffle=False)
    found["evaluated"] = len(list(evaluation)), math.inf
    Accelerator(cpu=True)
    next(iter(StreamingLoader(build)))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
