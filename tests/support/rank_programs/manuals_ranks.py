"""What each rank runs for `test_manuals_training`: a model of transformers in a pipeline, saved and
continued.
"""

from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from isobatch.engine.runtime.checkpoints.training_state import Progress, load_state, save_state
from isobatch.engine.runtime.models.transformers_models import from_transformers
from isobatch.engine.runtime.models.weights import gather_shards, names_of, state_dict_of
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from support.models.manuals_models import endless, load, make_model, make_optimizer

STEPS, SAVED_BEHIND = 4, 2
"""Steps in all, and those until the state is saved."""


class Run:
    """A pipeline of all ranks with loader and optimizer; without `state` from the beginning, else
    from there on.
    """

    def __init__(self, name, build, borders, *, seed=0, state=None, **options):
        ranks = list(range(dist.get_world_size()))
        # only the first stage sees pixels
        self.loader = load(build, images="encoded" if dist.get_rank() else "patches")
        self.model = make_model(name, self.loader, seed)
        layered = from_transformers(self.model)
        self.prefixes = names_of(self.model, layered.layers)
        recompute = [place % 3 == 1 for place in range(len(layered.layers))]
        self.pipeline = Pipeline(layered, borders, recompute, [ranks], PipelineOptions(**options))
        self.optimizer = make_optimizer(self.pipeline.parameters())
        self.step = 0
        if state is not None:
            progress = load_state(state, self.pipeline.layers, self.optimizer)
            self.loader.load_state_dict(progress.loader)
            self.step = progress.step

    def train(self, until):
        """-> the losses of the steps until then."""
        losses = []
        for batches in islice(endless(self.loader), until - self.step):
            self.optimizer.zero_grad()
            losses.append(self.pipeline.step(batches, batches[0].num_loss_tokens).loss)
            self.pipeline.reduce_gradients()
            self.optimizer.step()
        self.step = until
        return losses

    def save(self, folder):
        save_state(
            folder,
            self.pipeline.layers,
            self.optimizer,
            Progress(step=self.step, loader=self.loader.state_dict()),
        )

    def weights(self):
        """Of the whole model, on the first rank."""
        local = state_dict_of(self.pipeline.layers, self.prefixes)
        (weights,) = gather_shards(self.model, local, self.model.get_parameter)
        return weights or None


def train_on_two_ranks(said, name, folder, borders, others, options):
    """Train in one go, saved on the way; then once more from what was saved, with other stages."""
    folder = Path(folder)
    run = Run(name, folder / "build", borders)
    said["losses"] = run.train(SAVED_BEHIND)
    run.save(folder / "states")
    said["losses"] += run.train(STEPS)
    keep(run.weights(), folder / "weights.pt")
    # other weights, so that all must be read
    run = Run(name, folder / "build", others, seed=1, state=folder / "states", **options)
    said["goes on behind"] = run.step
    said["continued"] = run.train(STEPS)
    keep(run.weights(), folder / "continued.pt")


def keep(weights, path):
    if dist.get_rank() == 0:
        torch.save(weights, path)
