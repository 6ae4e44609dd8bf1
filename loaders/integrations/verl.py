"""`BalancedRollouts`: verl's rollouts to ranks by vision, LLM and attention.

verl's trainer reorders a step's rollouts so that each rank's equal part takes equally long by LLM
tokens. This reorders them by what images cost too; all else is verl's: dispatch, micro-batches,
losses. The trainer has no hook for it, so a method of a private name is overridden, and the version
is checked. verl is imported only when a step is balanced.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch

from isobatch.balance.dispatching.even_ranks import slot_loads
from isobatch.balance.dispatching.rollouts import assign_rollouts
from isobatch.common.errors import ConfigError, DataError
from isobatch.common.types import FloatArray, IntArray
from isobatch.loaders.ranks.rebalance import SampleCosts
from isobatch.models.presets import ModelPreset

TESTED = ("0.9.1",)
"""Versions whose `_balance_batch` this is made for."""


class BalancedRollouts:
    """Put it before `verl.trainer.ppo.ray_trainer.RayPPOTrainer` among a class's bases.

    `rollout_model` is the model, as `packer build --model` takes it; `trainer.balance_batch` stays
    True. ConfigError at start for another version of verl than was tested.
    """

    rollout_model: str | ModelPreset

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version()
        if not hasattr(self, "rollout_model"):
            raise ConfigError(
                "BalancedRollouts needs rollout_model: set it on your trainer's class"
            )
        super().__init__(*args, **kwargs)

    def _balance_batch(
        self,
        batch: Any,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> None:
        """Reorder a DataProto of rollouts; verl cuts it into equal parts, one per rank.

        ConfigError for rollouts that make no whole mini-batches, or that do not fit the ranks.
        """
        from verl.utils.seqlen_balancing import log_seqlen_unbalance  # noqa: PLC0415

        trainer: Any = self
        num_ranks = trainer._get_dp_size(trainer.actor_rollout_wg, "actor")
        is_grouped = getattr(self, "use_prefix_grouper", False)
        costs, tokens = rollout_costs(batch, self.rollout_model)
        # as in verl: without names of prompts nothing stays together, else mini-batches do not
        prompts = batch.non_tensor_batch.get("uid") if is_grouped else None
        size = len(tokens)
        if keep_minibatch and prompts is None:
            size = trainer.config.actor_rollout_ref.actor.get("ppo_mini_batch_size")
        if not size or len(tokens) % size:
            raise ConfigError(
                f"{len(tokens)} rollouts are no multiple of ppo_mini_batch_size, {size}; change "
                "that, or set trainer.balance_batch to False"
            )
        ranks = [list[int]() for _ in range(num_ranks)]
        for part in np.arange(len(tokens)).reshape(-1, size):
            plan = assign_rollouts(
                costs[part],
                tokens[part],
                num_ranks=num_ranks,
                prompts=None if prompts is None else list(prompts[part]),
                equal_sizes=True,
            )
            for rank, groups in enumerate(plan.micro_batches):
                rows = part[groups.samples]
                if not is_grouped:  # as in verl: short ones at both ends, for pipelines
                    rows = rows[np.argsort(costs[rows].sum(axis=1), kind="stable")]
                    rows = np.concatenate([rows[::2], rows[1::2][::-1]])
                ranks[rank] += rows.tolist()
        batch.reorder(torch.tensor([row for rows in ranks for row in rows]))
        metrics.update(log_seqlen_unbalance(tokens.tolist(), ranks, logging_prefix))
        slots = np.repeat(np.arange(num_ranks), [len(rows) for rows in ranks])
        loads = slot_loads(costs[np.concatenate(ranks)], slots, num_ranks)[0]
        waits = 1 - loads.mean(axis=0) / np.maximum(loads.max(axis=0), 1e-9)
        for name, wait in zip(("vision", "llm", "attention"), waits, strict=True):
            metrics[f"{logging_prefix}/wait_{name}"] = float(wait)


def rollout_costs(batch: Any, model: str | ModelPreset) -> tuple[FloatArray, IntArray]:
    """ms of vision, LLM and attention, float64, (rollouts, 3), and LLM tokens, of a DataProto.

    From `attention_mask` and the grids of `multi_modal_inputs`, of models of native resolution.
    DataError for pixels without a grid.
    """
    tokens = batch.batch["attention_mask"].sum(dim=-1).numpy().astype(np.int64)
    media = batch.non_tensor_batch.get("multi_modal_inputs")
    images, vit_tokens = np.zeros_like(tokens), np.zeros_like(tokens)
    for row, inputs in enumerate(() if media is None else media):
        grids = [grid for name, grid in (inputs or {}).items() if name.endswith("_grid_thw")]
        if not grids and any(name.startswith("pixel_values") for name in inputs or {}):
            raise DataError(
                f"rollout {row} has pixels without a grid; models of crops are not known"
            )
        for grid in grids:
            rows = np.asarray(grid).reshape(-1, 3)
            images[row] += rows[:, 0].sum()
            vit_tokens[row] += rows.prod(axis=1).sum()
    costs = SampleCosts(model)
    return costs.phases_of_lengths(images, vit_tokens, tokens), tokens


def check_version() -> None:
    """ConfigError unless verl is there, of a version that was tested."""
    try:
        found = version("verl")
    except PackageNotFoundError as error:
        raise ConfigError("verl is not installed: pip install verl==" + TESTED[-1]) from error
    if found not in TESTED:
        raise ConfigError(
            f"verl is {found}; BalancedRollouts was tested with {', '.join(TESTED)}. Install that,"
            " or call isobatch.assign_rollouts yourself"
        )
