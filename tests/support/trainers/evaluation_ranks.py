"""On each of two ranks: a step of BalancedTrainer by DDP on records, and evaluations; rank 0 writes
the losses and the weights into OUT. Then steps whose gradients each rank writes next to OUT.

python evaluation_ranks.py FOLDER OUT
"""

import json
import os
import sys
from pathlib import Path

import torch
from tiny_internvl import make_internvl
from transformers import TrainingArguments

from isobatch.loaders import BalancedLoader, BalancedTrainer
from support.loading.online_data import OPTIONS
from support.trainers.step_gradients import gradients_of_trainer


def main():
    folder, out = map(Path, sys.argv[1:])
    rows = json.loads((folder / "rows.json").read_text())
    packing = OPTIONS | {"data_root": str(folder), "max_tokens": 300}
    args = TrainingArguments(
        output_dir=out.parent,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        max_steps=1,
        save_strategy="no",
        gradient_accumulation_steps=2,
    )
    trainer = BalancedTrainer(
        model=make_internvl(BalancedLoader(rows, **packing)),
        args=args,
        train_dataset=rows,
        eval_dataset={"all": rows, "two": rows[:2], "one": rows[:1]},
        loader_options=packing,
    )
    trainer.train()
    metrics = trainer.evaluate()
    again = trainer.evaluate()
    if os.environ["RANK"] == "0":
        losses = {name: value for name, value in metrics.items() if name.endswith("_loss")}
        assert all(again[name] == value for name, value in losses.items())
        torch.save({"losses": losses, "weights": trainer.model.state_dict()}, out)
    for normalizer in ("epoch", "step"):
        options = packing | {"loss_normalizer": normalizer}
        found = gradients_of_trainer(rows, options, out.parent / normalizer, accumulation=2)
        torch.save(found, out.with_name(f"{normalizer}-{os.environ['RANK']}.pt"))


if __name__ == "__main__":
    main()
