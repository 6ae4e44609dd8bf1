"""On each of two ranks: an epoch with BalancedTrainer by DDP and by FSDP, resumed from its middle;
rank 0 writes losses and weights into DIR/NAME.pt.

python fsdp_ranks.py BUILD DIR LEARNING_RATE
"""

import os
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from tiny_internvl import make_internvl
from transformers import TrainingArguments

from isobatch.loaders import BalancedTrainer, StreamingLoader

MICRO_BATCHES, SAVED = 2, 1


def main():
    build, out, rate = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    for name in ("ddp", "fsdp"):
        whole = make_trainer(name, build, out / name, rate)
        whole.train()
        weights = whole.accelerator.get_state_dict(whole.model_wrapped)
        resumed = make_trainer(name, build, out / name, rate)
        resumed.train(resume_from_checkpoint=str(out / name / f"checkpoint-{SAVED}"))
        again = resumed.accelerator.get_state_dict(resumed.model_wrapped)
        if os.environ["RANK"] == "0":
            found = {"whole": (losses(whole), weights), "resumed": (losses(resumed), again)}
            found["kind"] = type(whole.model_wrapped).__name__
            torch.save(found, out / f"{name}.pt")


def make_trainer(name, build, out, rate):
    shards = {"auto_wrap_policy": "NO_WRAP"}
    args = TrainingArguments(
        output_dir=out,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        num_train_epochs=1,
        gradient_accumulation_steps=MICRO_BATCHES,
        learning_rate=rate,
        optim="adamw_torch",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_steps=SAVED,
        logging_steps=1,
        **({"fsdp": True, "fsdp_config": shards} if name == "fsdp" else {}),
    )
    AcceleratorState._reset_state()
    if name == "fsdp":
        # Accelerate shards on accelerators only, and asks nothing more of them
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    loader = StreamingLoader(build, micro_batches_per_step=MICRO_BATCHES)
    return BalancedTrainer(model=make_internvl(loader), args=args, train_dataset=loader)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
