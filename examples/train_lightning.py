"""Train with Lightning: its checkpoints hold the loader's state, so a run resumes exactly.

python examples/train_lightning.py BUILD OUT [--steps 20]
"""

import contextlib

import lightning
import torch
from arguments import parse
from tiny_vlm import make_model, token_losses

from isobatch import StepDataset, StreamingLoader


class Module(lightning.LightningModule):
    def __init__(self, build, **options):
        super().__init__()
        self.automatic_optimization = False  # the loss is divided once, by the whole step's divisor
        self.build, self.options, self.loader_state = build, options, None
        self.model = make_model(StreamingLoader(build))

    def train_dataloader(self):  # called when the ranks are known and a checkpoint is loaded
        loader = StreamingLoader(self.build, **self.options)
        if self.loader_state is not None:
            loader.load_state_dict(self.loader_state)
        return torch.utils.data.DataLoader(StepDataset(loader), batch_size=None)

    def training_step(self, step, number):
        (optimizer := self.optimizers()).zero_grad()
        no_sync = getattr(self.trainer.strategy.model, "no_sync", contextlib.nullcontext)
        for batch in step.micro_batches:  # ranks exchange gradients after the last one
            with contextlib.nullcontext() if batch is step.micro_batches[-1] else no_sync():
                self.manual_backward(batch.reduce_loss(token_losses(self.model(batch), batch)))
        optimizer.step()
        self.loader_state = step.state  # not the loader's: Lightning has fetched the next step

    def on_save_checkpoint(self, checkpoint):
        checkpoint["loader"] = self.loader_state

    def on_load_checkpoint(self, checkpoint):
        self.loader_state = checkpoint["loader"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(argv=None):
    args = parse(__doc__, argv)
    module = Module(args.build, micro_batches_per_step=args.micro_batches_per_step)
    options = {"save_last": True, "every_n_train_steps": args.save_every}
    save = lightning.pytorch.callbacks.ModelCheckpoint(args.out, **options)
    trainer = lightning.Trainer(max_steps=args.steps, accelerator="cpu", callbacks=[save])
    trainer.fit(module, ckpt_path="last")  # if there is one


if __name__ == "__main__":
    main()
