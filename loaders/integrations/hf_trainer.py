"""`StreamingTrainer`: transformers' Trainer on a StreamingLoader.

The one module here that imports transformers. Trainer's own data path does not fit. accelerate
distributes an iterable's batches over the ranks, so each rank would drop what is meant for it. And
a resume skips batches by count, which is wrong on another number of ranks. Here a step is one item,
its micro-batches go through Trainer's gradient accumulation, the loss is divided by the step's
`loss_normalizer`, and the loader's state is in `trainer_state.json` of every checkpoint.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerState, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from balance.errors import ConfigError
from balance.types import LABEL_IGNORE
from loaders.batch.micro_batch import MicroBatch
from loaders.batch.model_inputs.inputs import model_inputs
from loaders.integrations.torch_dataset import Step, StepDataset
from loaders.loader import StreamingLoader
from loaders.step_builder import StepBatches

STATE_KEY = "isobatch_loader"
"""Key of the loader's state among the `stateful_callbacks` of `trainer_state.json`."""

ToInputs = Callable[[MicroBatch], dict[str, Any]]


class StreamingTrainer(Trainer):
    """`Trainer(model, args, ...)` that trains on `loader`: no dataset, no collator.

    The loader's `dp_rank`, `dp_world_size` and `micro_batches_per_step` are `args.process_index`,
    `args.world_size` and `args.gradient_accumulation_steps`. `args.max_steps` ends the training,
    epoch after epoch (`len(loader)` steps each). `trainer.train(resume_from_checkpoint=...)`
    continues with the step after the checkpoint's, on any number of ranks. `to_inputs` makes the
    model's arguments of a micro-batch: by default `model_inputs`, for transformers' VLMs.

    `eval_dataset` may be a loader with `shuffle=False`, or a dict of them: `eval_loss` is then the
    mean over all labels, each sample counted once on any number of ranks.

    Raises ConfigError for arguments that would lose samples or make gradients wrong.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        args: TrainingArguments,
        loader: StreamingLoader,
        to_inputs: ToInputs | None = None,
        **options: Any,
    ) -> None:
        _check(args)
        # the loader resumes by its state; Trainer would read and drop batches up to its count
        args.ignore_data_skip = True
        super().__init__(model=model, args=args, **options)
        if not self.model_accepts_loss_kwargs:
            raise ConfigError(
                f"{type(model).__name__} ignores num_items_in_batch; forward must divide by it"
            )
        self.loader = loader
        self._to_inputs: ToInputs = to_inputs or (lambda batch: model_inputs(batch, model.config))

    def get_train_dataloader(self) -> Any:
        """The steps after the checkpoint; not through accelerate, which would distribute them."""
        return _FromCheckpoint(self)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Step], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], torch.Tensor]:
        """The next step's arguments of the model, and what its losses are divided by."""
        step = next(epoch_iterator)
        if len(step.micro_batches) != num_batches:
            raise ConfigError(
                f"gradient_accumulation_steps is {num_batches}, but the loader's "
                f"micro_batches_per_step {len(step.micro_batches)}; give both the same value"
            )
        # Trainer saves only after a whole step, which is then this one
        _saved_states(self.state)[STATE_KEY] = step.state
        first = step.micro_batches[0]
        self._per_label = first.loss_normalizer / max(1, first.num_loss_tokens)
        inputs = [self._to_inputs(batch) for batch in step.micro_batches]
        return inputs, torch.tensor(first.loss_normalizer)

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        """As Trainer's; -> its part of the step's mean loss per label, which is what is logged."""
        return super().training_step(*args, **options) * self._per_label

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """A whole pass of an evaluation loader; of other datasets what Trainer gives."""
        own: Any = self.eval_dataset
        chosen = own if eval_dataset is None else eval_dataset
        chosen = own[chosen] if isinstance(chosen, str) else chosen
        if not isinstance(chosen, StreamingLoader):
            return super().get_eval_dataloader(eval_dataset)
        if not chosen.is_evaluation:
            raise ConfigError("eval_dataset is a loader that shuffles; give it shuffle=False")
        if self.compute_metrics is not None:
            raise ConfigError(
                "compute_metrics needs a row per sample, but samples are packed; leave it out and "
                "use eval_loss, or iterate over the loader"
            )
        return _EvaluationPass(chosen)

    def evaluation_loop(self, dataloader: Any, *args: Any, **options: Any) -> EvalLoopOutput:
        """As Trainer's; the loss is per label and not per step, and samples are counted."""
        output = super().evaluation_loop(dataloader, *args, **options)
        if not isinstance(dataloader, _EvaluationPass):
            return output
        counts = dataloader.num_labels, dataloader.num_samples
        own = torch.tensor([counts], device=self.args.device)
        num_labels, num_samples = self.accelerator.gather(own).sum(dim=0).tolist()
        metrics = dict(output.metrics or {})
        # of every step and rank the sum of its losses, times the number of ranks
        metrics[next(name for name in metrics if name.endswith("_loss"))] *= (
            dataloader.num_steps / max(1, num_labels)
        )
        return output._replace(metrics=metrics, num_samples=num_samples)

    def prediction_step(
        self, model: torch.nn.Module, inputs: Any, *args: Any, **options: Any
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """The sum of a rank's losses in a step of an evaluation loader; no logits."""
        if not isinstance(inputs, StepBatches):
            return super().prediction_step(model, inputs, *args, **options)
        total, whole = torch.tensor([0.0, 1.0], device=self.args.device)
        with torch.no_grad(), self.compute_loss_context_manager():
            for batch in inputs:
                given = self._prepare_inputs(self._to_inputs(batch))
                # without return_outputs this is the loss alone
                loss = self.compute_loss(model, given, num_items_in_batch=whole)
                total += cast(torch.Tensor, loss)
        return total, None, None

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: torch.nn.Module | None = None
    ) -> None:
        """As Trainer does, and then the weights that it warned it had left out.

        `save_pretrained` gives a VLM's weights the names of its published checkpoints. Trainer does
        not find them, and trains on without (transformers 4.52 to 5.23, issue 43701).
        """
        self._weights_left_out = False
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if not self._weights_left_out:
            return
        target = self.accelerator.unwrap_model(self.model)
        if not isinstance(target, PreTrainedModel):
            raise ConfigError(
                f"{resume_from_checkpoint}: its weights have other names than the model's; load "
                "them first"
            )
        saved = type(target).from_pretrained(resume_from_checkpoint, dtype=target.dtype)
        target.load_state_dict(saved.state_dict())

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        self._weights_left_out = bool(load_result.unexpected_keys)
        super()._issue_warnings_after_load(load_result)


class _FromCheckpoint:
    """Starts when iterated: Trainer asks for its data before it has read the checkpoint."""

    def __init__(self, trainer: StreamingTrainer) -> None:
        self._trainer = trainer

    def __iter__(self) -> Iterator[Step]:
        loader, state = self._trainer.loader, self._trainer.state
        saved = _saved_states(state)
        if STATE_KEY in saved:
            loader.load_state_dict(saved[STATE_KEY])
        elif state.global_step:
            raise ConfigError(
                f"the checkpoint has no loader state ({STATE_KEY}); it is not a StreamingTrainer's"
            )
        loader.check_ranks()  # a worker's loader cannot
        workers = self._trainer.args.dataloader_num_workers
        # not forked: the loader may hold connections, and this process a GPU
        start = "spawn" if workers else None
        dataset = StepDataset(loader)
        return iter(
            DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=start)
        )


class _EvaluationPass:
    """The steps of an evaluation loader once, and what this rank has had of them."""

    def __init__(self, loader: StreamingLoader) -> None:
        self._loader = loader
        self.num_steps, self.num_labels, self.num_samples = 0, 0, 0

    def __iter__(self) -> Iterator[StepBatches]:
        for step in self._loader:
            self.num_steps += 1
            self.num_labels += sum(int((batch.labels != LABEL_IGNORE).sum()) for batch in step)
            self.num_samples += sum(batch.num_samples for batch in step)
            yield step


def _saved_states(state: TrainerState) -> dict[str, Any]:
    """What `trainer_state.json` keeps for callbacks, by name."""
    # declared as a list, it is a dict once made
    return cast(dict[str, Any], state.stateful_callbacks)


def _check(args: TrainingArguments) -> None:
    if args.max_steps <= 0:
        raise ConfigError("max_steps is not set; give TrainingArguments it: len(loader) per epoch")
    if args.n_gpu > 1:
        raise ConfigError(
            f"one process has {args.n_gpu} GPUs (DataParallel); start one per GPU with torchrun"
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ConfigError(
            "average_tokens_across_devices is off; gradients would be divided by the world size"
        )
