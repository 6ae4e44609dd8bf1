"""On each of two ranks, over gloo: VeOmni's trainer on a build, by the program of its page; then
its loaders in a Ulysses group. Rank 0 writes what they gave into OUT.pt.

    torchrun ranks.py FOLDER OUT MASK

FOLDER has packed, model and veomni.yaml; MASK is a further argument of `register`, or empty.
torch.cpu is given what VeOmni asks of a GPU's module, and the group is there before, since it knows
no gloo.
"""

import os
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from veomni.data import MainCollator, build_dataloader, build_dataset
from veomni.distributed.parallel_state import clear_parallel_state, init_parallel_state
from veomni.trainer import vlm_trainer

from isobatch import StreamingLoader
from isobatch.common.errors import ConfigError
from isobatch.loaders.integrations.veomni import register
from support.frameworks.page_programs import program

GPU_FIGURES = "max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"


class Trainer(vlm_trainer.VLMTrainer):
    """VeOmni's, with each step's loss; without a processor, which needs torchvision."""

    def _build_model_assets(self):
        self.base.processor = self.base.chat_template = None
        self.base.model_assets = [self.base.model_config]
        self.base.destroy_distributed = lambda: None  # the group is used again
        self.losses, self.given = [], []

    def on_train_begin(self):
        super().on_train_begin()
        weights = self.base.model.state_dict()
        self.begun = {name: value.full_tensor().clone() for name, value in weights.items()}

    def on_step_begin(self, micro_batches=None):
        self.given.append([sorted(batch) for batch in micro_batches])
        super().on_step_begin(micro_batches=micro_batches)

    def on_step_end(self, loss=None, **others):
        self.losses.append(loss)
        super().on_step_end(loss=loss, **others)


def main(folder, out, mask):
    os.chdir(folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in GPU_FIGURES:
        setattr(torch.cpu, name, lambda *_: 1)
    torch.cpu.memory_stats = lambda *_: {"num_alloc_retries": 0}
    torch.cpu.get_device_name, torch.cpu.empty_cache = lambda *_: "cpu", lambda: None
    vlm_trainer.VLMTrainer = Trainer
    scope = {}
    code = program("veomni", "veomni")
    assert code.count('from_pretrained("model"))') == 1
    exec(code.replace('from_pretrained("model"))', f'from_pretrained("model"){mask})'), scope)
    found = {"losses": scope["trainer"].losses, "given": scope["trainer"].given}
    found["weights"] = scope["trainer"].begun
    found["state"] = scope["trainer"].base.train_dataloader.state_dict()
    found["steps"] = scope["trainer"].base.train_steps
    clear_parallel_state()
    if mask:
        found["shards"] = in_ulysses_group()
    joined = [None] * dist.get_world_size()
    dist.all_gather_object(joined, found)
    if dist.get_rank() == 0:
        torch.save(joined, f"{out}.pt")
    dist.barrier()
    os._exit(0)


def in_ulysses_group():
    """The micro-batches of a step on a rank of two that share sequences, by `build_dataloader`."""
    init_parallel_state(dp_size=1, ulysses_size=2, device_type="cpu")
    about = {"micro_batch_size": 1, "global_batch_size": 2, "dyn_bsz": False, "seed": 3}
    dataset = build_dataset("isobatch")
    register(partial(StreamingLoader, "packed"), name="masked")
    with pytest.raises(ConfigError, match="'sdpa', which has no Ulysses shards"):
        build_dataloader("masked", dataset=build_dataset("masked"), collate_fn=None, **about)
    loader = build_dataloader("isobatch", dataset=dataset, collate_fn=MainCollator(), **about)
    return len(dataset), next(iter(loader))


if __name__ == "__main__":
    folder, out, mask = sys.argv[1:]
    sys.argv[1:] = ["veomni.yaml"]
    main(folder, out, mask)
