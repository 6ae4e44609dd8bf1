"""On each rank, over gloo: a program of docs/load/trainers/deepspeed.md, word for word.

    torchrun deepspeed_ranks.py FOLDER PROGRAM DATA OUT MICRO_BATCHES [CHECKPOINT]

FOLDER has model, a saved one, and packed, a build, or records.json. DATA: `build`, or what the page
gives the program instead, `loader` or `records`. Rank 0 writes losses and weights into OUT.pt; of
the program for Accelerate with another number, why it is refused. CHECKPOINT: a universal one, to
go on from.
"""

import json
import os
import sys
from pathlib import Path

import accelerate
import deepspeed
import torch
import transformers

from isobatch.common.errors import ConfigError
from support.frameworks.model_and_data import MAX_TOKENS
from support.frameworks.page_programs import json_block, program

OPTIONS = {
    **{"use_cpu": True, "report_to": [], "disable_tqdm": True, "num_train_epochs": 1},
    **{"optim": "adamw_torch", "learning_rate": 3e-3, "lr_scheduler_type": "constant"},
    **{"save_steps": 1, "logging_steps": 1},
}


WITH_BUILD = 'StreamingLoader("packed", micro_batches_per_step=2)'


def main(folder, name, data, out, micro_batches, checkpoint=None):
    os.chdir(folder)
    torch.set_num_threads(1)
    # what Accelerate does on GPUs; it starts DeepSpeed on no CPU
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    config = json.loads(json_block("deepspeed"))
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # else all are too small
    config["checkpoint"] = {"load_universal": checkpoint is not None}
    if os.environ["RANK"] == "0":
        Path("zero3.json").write_text(json.dumps(config))
    torch.distributed.barrier()
    code = on_data(program("deepspeed", name), data).replace("steps=2", f"steps={micro_batches}")
    code = code.replace("per_step=2", f"per_step={micro_batches}")
    if checkpoint is not None:
        code = code.replace("train()", f"train(resume_from_checkpoint={checkpoint!r})")
    train = with_trainer if name == "deepspeed" else with_accelerate
    records = Path("records.json")
    scope = {"records": json.loads(records.read_text()) if records.exists() else None}
    found = train(code, scope)
    if os.environ["RANK"] == "0":
        torch.save(found, f"{out}.pt")


def on_data(code, data):
    """The program on what the page says for records: a loader of them, or them alone."""
    if data == "build":
        return code
    assert code.count(WITH_BUILD) == 1
    if data == "loader":
        online = program("deepspeed", "deepspeed_records").replace("16_384", str(MAX_TOKENS))
        lines, loader = online.rsplit("\n\n", 1)
        return f"{lines}\n" + code.replace(f"loader = {WITH_BUILD}\n", loader)
    code = code.replace(f"loader = {WITH_BUILD}\n", "")
    options = f"train_dataset=records, loader_options={{'max_tokens': {MAX_TOKENS}}}"
    return code.replace("train_dataset=loader", options)


def with_trainer(code, scope):
    scope["options"] = OPTIONS
    code = code.replace('"out",\n', '"out",\n    **options,\n')
    exec(code, scope)
    trainer = scope["trainer"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {"losses": losses, "weights": weights, "kind": type(trainer.model_wrapped).__name__}


def with_accelerate(code, scope):
    accelerate.PartialState(cpu=True)
    model = transformers.AutoModelForImageTextToText.from_pretrained("model")
    scope |= {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    try:
        exec(code, scope)
    except ConfigError as error:
        return {"refused": str(error)}
    accelerator, model = scope["accelerator"], scope["model"]
    position = scope["loader"].state_dict()
    accelerator.save_state("saved")
    for _ in scope["loader"]:  # the next epoch moves it
        break
    accelerator.load_state("saved")
    assert scope["loader"].state_dict() == position
    weights = accelerator.get_state_dict(model)
    return {"losses": [], "weights": weights, "kind": type(model).__name__}


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]), *sys.argv[6:])
