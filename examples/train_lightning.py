"""Train with Lightning: its checkpoints hold the loader's state, and a second call goes on exactly.

    python examples/train_lightning.py BUILD_DIR OUT_DIR [--steps 20]

A "batch" of Lightning's is a step: a list of micro-batches with the loader's state behind it. The
optimization is manual, so that each micro-batch's graph is freed before the next one runs and the
loss is divided once, by the step's labels over all ranks. Lightning fetches one step ahead; what is
saved is the state of the step trained on.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_vlm import token_losses
from torch.utils.data import DataLoader
from train_tiny import make_model

from balance.errors import IsobatchError
from loaders import StreamingLoader
from loaders.integrations.torch_dataset import Step, StepDataset


class VisionLanguageModule(lightning.LightningModule):
    """TinyVLM with its loader; a model of transformers would run `self.model(**model_inputs(batch,
    config)).loss`.
    """

    def __init__(self, build: str, micro_batches_per_step: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.build, self.micro_batches_per_step = build, micro_batches_per_step
        torch.manual_seed(0)  # the same weights on all ranks
        self.model = make_model(self._make_loader(dp_rank=0, dp_world_size=1))
        self.loader_state: dict[str, Any] | None = None

    def _make_loader(self, dp_rank: int, dp_world_size: int) -> StreamingLoader:
        return StreamingLoader(
            self.build,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            micro_batches_per_step=self.micro_batches_per_step,
        )

    def train_dataloader(self) -> DataLoader[Step]:
        """Called when the ranks are known and a checkpoint is loaded."""
        loader = self._make_loader(self.global_rank, self.trainer.world_size)
        if self.loader_state is not None:
            loader.load_state_dict(self.loader_state)
        return DataLoader(StepDataset(loader), batch_size=None)

    def training_step(self, step: Step, number: int) -> None:
        """One optimizer step."""
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for place, batch in enumerate(step.micro_batches):
            is_last = place == len(step.micro_batches) - 1
            # ranks exchange gradients once per step, behind the last micro-batch
            with contextlib.nullcontext() if is_last else self._no_sync():
                loss = token_losses(self.model(batch), batch).sum() / max(1, batch.num_loss_tokens)
                # DDP divides by the number of ranks, but the loss is that of the whole step already
                self.manual_backward(loss * self.trainer.world_size)
        optimizer.step()
        self.loader_state = step.state

    def _no_sync(self) -> contextlib.AbstractContextManager[None]:
        wrapped = self.trainer.strategy.model
        return wrapped.no_sync() if hasattr(wrapped, "no_sync") else contextlib.nullcontext()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The state of the last step trained on, the same on all ranks."""
        checkpoint["loader"] = self.loader_state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """For `train_dataloader`, which Lightning calls later."""
        self.loader_state = checkpoint["loader"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As in train_tiny.py."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or go on from the last checkpoint in OUT_DIR; 2 if the build cannot be used."""
    parser = argparse.ArgumentParser(
        description="Train a tiny vision-language model with Lightning"
    )
    parser.add_argument("build", help="output directory of `packer build --model tiny`")
    parser.add_argument("out", help="directory for checkpoints")
    parser.add_argument("--steps", type=int, default=20, help="steps of all calls together")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--micro-batches-per-step", type=int, default=2)
    args = parser.parse_args(argv)
    try:
        module = VisionLanguageModule(args.build, args.micro_batches_per_step)
        trainer = lightning.Trainer(
            max_steps=args.steps,
            accelerator="cpu",  # tiny tensors; "auto" to train on GPUs
            logger=False,
            enable_progress_bar=False,
            callbacks=[
                ModelCheckpoint(args.out, save_last=True, every_n_train_steps=args.save_every)
            ],
        )
        last = Path(args.out) / "last.ckpt"
        # it advises to save the weights from before the step; those behind it are what fits the
        # loader's state
        warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
        trainer.fit(module, ckpt_path=last if last.exists() else None)
    except IsobatchError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
