"""On each rank: train with a KIND of trainer on records, from the last checkpoint if there is one.

python killed_training.py KIND DIR NAME [KILLED]

KIND is trainer, sft, lora or fsdp. The records are in DIR/rows.json, checkpoints go into DIR/NAME.
After the step KILLED all ranks kill themselves, with what their threads are doing; else rank 0
writes losses and sums of the weights into DIR/NAME.json.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from tiny_internvl import make_internvl
from transformers import PreTrainedTokenizerFast, TrainerCallback, TrainingArguments

from isobatch.loaders import BalancedLoader
from isobatch.loaders.integrations.hf_trainer import BalancedMixin, BalancedTrainer
from support import TESTS
from support.loading.online_data import OPTIONS

MICRO_BATCHES, SAVED = 2, 2
COMMON = {
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "num_train_epochs": 2,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "learning_rate": 1e-3,
    "save_steps": SAVED,
    "logging_steps": 1,
}


class KillAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    kind, folder, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    out = folder / name
    callbacks = [KillAfter(int(sys.argv[4]))] if len(sys.argv) > 4 else []
    trainer = make_trainer(kind, folder, out, callbacks)
    trainer.train(resume_from_checkpoint=any(out.glob("checkpoint-*")) or None)
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if os.environ.get("RANK", "0") == "0":
        found = {
            "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
            "weights": {key: float(each.double().sum()) for key, each in weights.items()},
            "kind": type(trainer.model_wrapped).__name__,
        }
        out.with_suffix(".json").write_text(json.dumps(found))


def make_trainer(kind, folder, out, callbacks):
    rows = json.loads((folder / "rows.json").read_text())
    if kind in ("sft", "lora"):
        return make_sft(kind, lambda: open_loader(folder, rows), out, callbacks)
    shards = {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}}
    args = TrainingArguments(str(out), **COMMON, **(shards if kind == "fsdp" else {}))
    if kind == "fsdp":
        # Accelerate shards on accelerators only, and asks nothing more of them
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    loader = open_loader(folder, rows)
    model = make_internvl(loader)
    return BalancedTrainer(model=model, args=args, train_dataset=loader, callbacks=callbacks)


def make_sft(kind, opened, out, callbacks, **options):
    """`opened` gives the loader, after the arguments have found the ranks."""
    from peft import LoraConfig  # noqa: PLC0415  seconds that others need not wait
    from trl import SFTConfig, SFTTrainer  # noqa: PLC0415

    class PackedSFT(BalancedMixin, SFTTrainer):
        pass

    given = COMMON | {"bf16": False, "gradient_checkpointing": False} | options
    args = SFTConfig(str(out), **given)
    loader = opened()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TESTS / "data/tokenizers/byte_level")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return PackedSFT(
        model=make_internvl(loader),
        args=args,
        train_dataset=loader,
        processing_class=tokenizer,
        peft_config=adapters if kind == "lora" else None,
        callbacks=callbacks,
    )


def open_loader(folder, rows):
    options = {**OPTIONS, "max_tokens": 300, "data_root": str(folder)}
    return BalancedLoader(rows, micro_batches_per_step=MICRO_BATCHES, **options)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
