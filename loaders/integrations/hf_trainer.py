"""`BalancedMixin`, `BalancedTrainer`: Hugging Face's trainers on a loader.

Only this module and its parts import transformers. Trainer's own data path does not fit. accelerate
distributes an iterable's batches over the ranks, so each rank would drop what is meant for it. And
a resume skips batches by count, which is wrong on another number of ranks. Here a step is one item,
its micro-batches go through Trainer's gradient accumulation, the loss is divided by the step's
`loss_normalizer`, and the loader's state is in `trainer_state.json` of every checkpoint.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from isobatch.common.errors import ConfigError
from isobatch.common.types import LABEL_IGNORE
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.batch.model_inputs.inputs import FAMILIES, model_inputs
from isobatch.loaders.batch.model_inputs.labelled_logits import Logits
from isobatch.loaders.integrations._trainer_args import (
    check_arguments,
    check_loader,
    evaluation_of,
    loader_of,
    logits_of,
)
from isobatch.loaders.integrations._trainer_steps import STATE_KEY, TrainSteps, saved_states
from isobatch.loaders.integrations.torch_dataset import Step
from isobatch.loaders.metrics import MetricsWindow
from isobatch.loaders.step_builder import StepBatches
from isobatch.loaders.step_stream import StepStream

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object

ToInputs = Callable[[MicroBatch], dict[str, Any]]


class BalancedMixin(_Base):
    """Trains on a loader: `class MyTrainer(BalancedMixin, SFTTrainer)`, for any kind of Trainer.

    `train_dataset` is a loader whose `dp_rank`, `dp_world_size` and `micro_batches_per_step` are
    `args.process_index`, `args.world_size` and `args.gradient_accumulation_steps`; or a dataset of
    records, of which a `BalancedLoader` is made with `loader_options`: `max_tokens` and others, and
    `model`, `processor` or `encode` where the model does not know its name.

    Training ends after the loader's `args.num_train_epochs`, or after `args.max_steps`.
    `train(resume_from_checkpoint=...)` continues with the step after the checkpoint's, on any
    number of ranks. `to_inputs` makes the model's arguments of a micro-batch: by default
    `model_inputs`, for transformers' VLMs.

    `eval_dataset` is what the trainer takes, or a loader with `shuffle=False`, or a dict of them: a
    loader's `eval_loss` is the mean over all labels, each sample counted once on any ranks. Where
    the training's loader is made here, one in order is made of an `eval_dataset` of records too,
    with the same options but for transforms.

    `logits`: "labelled", the model computes those of tokens whose next one has a label, and its
    loss in chunks (`chunked_loss`); "all"; by default "labelled" where the model can and nothing
    else may read the others: `compute_metrics`, or a loss of the user's or of another trainer's.

    Raises ConfigError for arguments that would be ignored, lose samples or make gradients wrong.
    """

    def __init__(  # noqa: PLR0913 - options by name
        self,
        *,
        model: Any,
        args: TrainingArguments,
        train_dataset: Any,
        eval_dataset: Any = None,
        loader_options: Mapping[str, Any] | None = None,
        to_inputs: ToInputs | None = None,
        logits: Logits | None = None,
        **options: Any,
    ) -> None:
        if options.get("formatting_func") is not None:
            raise ConfigError("formatting_func is given; leave it out: samples are tokenised")
        if not isinstance(loader_options, Mapping | None):
            raise ConfigError(f"loader_options is {loader_options!r}; give a dict of options")
        eval_dataset = evaluation_of(eval_dataset, train_dataset, args, model, loader_options or {})
        shown = _StandIns(eval_dataset)
        check_arguments(args, has_other_data=shown.has_other_data)
        loader = loader_of(train_dataset, args, model, loader_options or {})
        check_loader(args, loader)
        args.per_device_train_batch_size = 1  # so that Trainer's counts are micro-batches
        options |= {"train_dataset": shown.train, "eval_dataset": shown.evaluation}
        super().__init__(model=model, args=args, **options)
        check_loader(args, loader)  # Trainer changes them by accelerator_config
        # of the model before it is wrapped
        whole: Any = self.model
        plain = whole
        config = getattr(plain, "config", None)
        if hasattr(plain, "get_base_model"):  # that PEFT has wrapped
            plain = plain.get_base_model()
        if not _takes_divisor(plain):
            raise ConfigError(
                f"{type(plain).__name__} ignores num_items_in_batch; forward must divide by it"
            )
        self.model_accepts_loss_kwargs = True  # see `_takes_divisor`
        self.loader = self.train_dataset = loader
        self.eval_dataset = datasets = shown.with_loaders(self.eval_dataset)
        for dataset in datasets.values() if isinstance(datasets, dict) else [datasets]:
            # now, and not after the steps until the first evaluation
            self._check_evaluation(dataset)
        self._to_inputs: ToInputs = to_inputs or (lambda batch: model_inputs(batch, config))
        if to_inputs is None and logits_of(self, logits, BalancedMixin) == "labelled":
            self._to_inputs = lambda batch: model_inputs(batch, whole, logits="labelled")
        self._train_steps: TrainSteps | None = None
        self._window: MetricsWindow | None = None
        self._num_own_tokens = 0
        self._weights_left_out = False

    def get_train_dataloader(self, *_: Any) -> Any:
        """The steps after the checkpoint; not through accelerate, which would distribute them."""
        self._train_steps = TrainSteps(self.loader, self.args, lambda: self.state)
        self._num_samples = 0
        self._window = None
        if self.args.report_to and self.is_world_process_zero():
            if self.args.dataloader_num_workers:
                warnings.warn(
                    "the loader's figures are not reported: it runs in a worker; give"
                    " dataloader_num_workers=0, it decodes in threads",
                    stacklevel=2,
                )
            else:
                self._window = self.loader.metrics_window()
        return self._train_steps

    def set_initial_training_values(self, *args: Any) -> Any:
        """As Trainer's, but its epochs are not over before a loader's whose epochs vary."""
        num_epochs, *others = super().set_initial_training_values(*args)
        return num_epochs if self._ending is None else 2 * num_epochs, *others

    def create_scheduler(self, num_training_steps: int, *args: Any, **options: Any) -> Any:
        """As Trainer's; where the number of steps is an estimate, `_fit_schedule` corrects it."""
        self._schedule_steps = num_training_steps
        return super().create_scheduler(num_training_steps, *args, **options)

    def _fit_schedule(self, num_left: int) -> None:
        """Let the schedule's next step bring it nearer to its end, as the run's does.

        So it has neither ended before the run's last step, nor is it cut off there. The warm-up
        has the steps that were asked for.
        """
        if not self._created_lr_scheduler or not isinstance(self.lr_scheduler, LambdaLR):
            return
        schedule: Any = self.lr_scheduler
        if schedule.last_epoch >= self.args.get_warmup_steps(self._schedule_steps):
            # its position, which it adds 1 to after the step, and keeps in checkpoints
            steps_left = self._schedule_steps - schedule.last_epoch
            schedule.last_epoch += steps_left / (1 + num_left) - 1

    @property
    def _ending(self) -> TrainSteps | None:
        """The training's steps if they know where it ends, and not Trainer."""
        steps = self._train_steps
        return steps if steps is not None and steps.ends_with_loader else None

    def train(self, *args: Any, **options: Any) -> Any:
        """As Trainer's; then the loader's threads end."""
        try:
            return super().train(*args, **options)
        finally:
            if self._train_steps is not None:
                self._train_steps.close()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Step], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], torch.Tensor | None]:
        """The next step's arguments of the model, and what its losses are divided by."""
        if self._ending is not None and self._ending.are_over:
            self.control.should_training_stop = True  # resumed after the last step
            return [], None
        step = next(epoch_iterator, None)
        if step is None:
            raise ConfigError("the loader has no more steps; leave out its `epochs`")
        if self._ending is not None:
            done, whole = self.state.global_step + 1, self.state.max_steps  # with this step
            self.state.max_steps = done if self._ending.are_over else max(whole, done + 1)
            self._fit_schedule(self._ending.num_left)
        # Trainer saves only after a whole step, which is then this one
        saved_states(self.state)[STATE_KEY] = step.state
        first = step.micro_batches[0]
        self._per_label = first.loss_normalizer / max(1, first.num_loss_tokens)
        self._num_samples += first.num_step_samples
        self._num_own_tokens += sum(len(batch.input_ids) for batch in step.micro_batches)
        self._count_tokens(step.micro_batches)
        # Trainer multiplies by the number of ranks itself
        batches = [replace(batch, num_ranks=1) for batch in step.micro_batches]
        inputs = [self._to_inputs(batch) for batch in batches]
        for arguments in inputs:  # the trainer gives it to the model, or divides by it
            arguments.pop("num_items_in_batch", None)
        return inputs, torch.tensor(first.loss_normalizer)

    def _count_tokens(self, batches: list[MicroBatch]) -> None:
        """Add a step's tokens on all ranks, without blank images, to `num_input_tokens_seen`."""
        if (kind := self.args.include_num_input_tokens_seen) == "no":
            return
        num_own = sum(
            batch.num_samples * batch.max_seqlen
            if batch.is_padded and kind == "all"
            else len(batch.input_ids)
            for batch in batches
        )
        local_count = torch.tensor(num_own, device=self.args.device)
        self.state.num_input_tokens_seen += int(self.accelerator.gather(local_count).sum())

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Do nothing: Trainer would take masks of packed samples for their tokens."""

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        """As Trainer's; -> its part of the step's mean loss per label, which is what is logged."""
        return super().training_step(*args, **options) * self._per_label

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """As the trainer's, but TRL's figures leave out masks and micro-batches without labels.

        It takes the sum of a mask of packed samples for tokens.
        """
        masks = inputs.get("attention_mask")
        if isinstance(masks, dict) or (masks is not None and masks.dim() > 2):
            model = partial(model, attention_mask=masks)
            inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
        loss = super().compute_loss(model, inputs, *args, **options)
        is_trl = hasattr(self, "_total_train_tokens")
        for figures in getattr(self, "_metrics", {}).values() if is_trl else ():
            names = [name for name in ("entropy", "mean_token_accuracy") if name in figures]
            # no probabilities have both: so it writes that no rank has labels
            if any(figures[name][-1] for name in names):
                continue
            for name in names:
                figures[name].pop()
                if not figures[name]:
                    del figures[name]
        return loss

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """As the trainer's, with our samples and tokens: it counts micro-batches and rows.

        What `report_to` names also gets the loader's figures.
        """
        if "loss" in logs and self._window is not None:
            logs |= self._window.take()
        if "train_samples_per_second" in logs:
            logs["train_samples_per_second"] = round(self._num_samples / logs["train_runtime"], 3)
        metrics = getattr(self, "_metrics", None) if hasattr(self, "_total_train_tokens") else None
        shown = [part for part in (metrics or {}).values() if "num_tokens" in part]
        if shown:
            local_count = torch.tensor(self._num_own_tokens, device=self.args.device)
            total = int(self.accelerator.gather(local_count).sum())
            for part in shown:
                part["num_tokens"] = [total]
        super().log(logs, *args, **options)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **options: Any) -> dict[str, float]:
        """As the trainer's; also of a loader, which TRL would prepare."""
        if not isinstance(eval_dataset, StepStream):
            return super().evaluate(eval_dataset, *args, **options)
        before, self.eval_dataset = self.eval_dataset, eval_dataset
        try:
            return super().evaluate(None, *args, **options)
        finally:
            self.eval_dataset = before

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """A whole pass of an evaluation loader; of other datasets what Trainer gives."""
        datasets: Any = self.eval_dataset
        chosen = datasets if eval_dataset is None else eval_dataset
        chosen = datasets[chosen] if isinstance(chosen, str) else chosen
        if not isinstance(chosen, StepStream):
            return super().get_eval_dataloader(eval_dataset)
        self._check_evaluation(chosen)
        return _EvaluationPass(chosen)

    def _check_evaluation(self, dataset: Any) -> None:
        """ConfigError for a loader that cannot be evaluated."""
        if not isinstance(dataset, StepStream):
            return
        if not dataset.is_evaluation:
            raise ConfigError("eval_dataset is a loader that shuffles; give it shuffle=False")
        if self.compute_metrics is not None:
            raise ConfigError("compute_metrics needs a row per sample; leave it out, use eval_loss")
        is_split = self.args.world_size > 1 and dataset.config.step_config().remainder == "split"
        if is_split and hasattr(self, "_total_train_tokens"):
            raise ConfigError(
                "eval_dataset is a loader whose last ranks may have a micro-batch less, and TRL "
                "waits for all; give it remainder='pad'"
            )

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """As `get_eval_dataloader`: `predict` gives a loader's loss, and no logits."""
        if isinstance(test_dataset, StepStream):
            return self.get_eval_dataloader(test_dataset)
        return super().get_test_dataloader(test_dataset)

    def evaluation_loop(self, dataloader: Any, *args: Any, **options: Any) -> EvalLoopOutput:
        """As Trainer's; the loss is per label and not per step, and samples are counted."""
        output = super().evaluation_loop(dataloader, *args, **options)
        if not isinstance(dataloader, _EvaluationPass):
            return output
        counts = dataloader.num_labels, dataloader.num_samples
        local_counts = torch.tensor([counts], device=self.args.device)
        num_labels, num_samples = self.accelerator.gather(local_counts).sum(dim=0).tolist()
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
                arguments = self._prepare_inputs(self._to_inputs(batch))
                # without return_outputs this is the loss alone
                loss = self.compute_loss(model, arguments, num_items_in_batch=whole)
                total += cast(torch.Tensor, loss)
        return total, None, None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any) -> None:
        """As Trainer does, and then the weights that it warned it had left out.

        `save_pretrained` gives a VLM's weights the names of its published checkpoints. Trainer does
        not find them, and trains on without (transformers 4.52 to 5.24, issue 43701).
        """
        super()._load_from_checkpoint(resume_from_checkpoint, *args)
        self._load_left_out(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        """As `_load_from_checkpoint`; else the last weights would be taken for the best."""
        super()._load_best_model()
        self._load_left_out(cast(str, self.state.best_model_checkpoint))

    def _load_left_out(self, checkpoint: str) -> None:
        left_out, self._weights_left_out = self._weights_left_out, False
        if not left_out:
            return
        target = self.accelerator.unwrap_model(self.model)
        if not isinstance(target, PreTrainedModel):
            raise ConfigError(
                f"{checkpoint}: its weights have other names than the model's; load them first"
            )
        saved = type(target).from_pretrained(
            checkpoint, dtype=target.dtype, trust_remote_code=False
        )
        target.load_state_dict(saved.state_dict())

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        self._weights_left_out = bool(load_result.unexpected_keys)
        super()._issue_warnings_after_load(load_result)


class BalancedTrainer(BalancedMixin, Trainer):
    """transformers' Trainer on a loader, or on a dataset through a `BalancedLoader`."""


class _EvaluationPass:
    """The steps of an evaluation loader once, and what this rank has had of them."""

    def __init__(self, loader: StepStream) -> None:
        self._loader = loader
        self.num_steps, self.num_labels, self.num_samples = 0, 0, 0

    def __iter__(self) -> Iterator[StepBatches]:
        for step in self._loader:
            self.num_steps += 1
            self.num_labels += sum(int((batch.labels != LABEL_IGNORE).sum()) for batch in step)
            self.num_samples += sum(batch.num_samples for batch in step)
            yield step


class _StandIns:
    """What TRL, which reads a sample of its datasets, sees of loaders.

    Datasets to make a trainer with; loaders among `eval_dataset` have stand-ins.

    The evaluation's own samples say what kind they are (with images, with prompts); the training's
    are never looked at.
    """

    def __init__(self, eval_dataset: Any) -> None:
        self._eval_dataset = eval_dataset
        named = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
        others = [
            dataset for dataset in named.values() if not isinstance(dataset, StepStream | None)
        ]
        self.has_other_data = bool(others)
        self.train: Any = _first_of(others[0] if others else None)
        self.evaluation: Any = self._replace(eval_dataset)

    def with_loaders(self, prepared: Any) -> Any:
        """What the trainer has made of `evaluation`, with the loaders in their places."""
        datasets = self._eval_dataset
        if not isinstance(datasets, Mapping):
            return datasets if isinstance(datasets, StepStream) else prepared
        return {
            name: dataset if isinstance(dataset, StepStream) else prepared[name]
            for name, dataset in datasets.items()
        }

    def _replace(self, dataset: Any) -> Any:
        if isinstance(dataset, Mapping):
            return {name: self._replace(part) for name, part in dataset.items()}
        return self.train if isinstance(dataset, StepStream) else dataset


def _first_of(dataset: Any) -> Any:
    """A dataset of the first sample of `dataset`, or of one that is tokenised."""
    for first, argument in (("select", [0]), ("take", 1)):
        if hasattr(dataset, first):
            return getattr(dataset, first)(argument)
    rows = [{"input_ids": [0], "labels": [0]}]
    if find_spec("datasets") is None:
        return rows  # then it is no trainer of TRL's
    from datasets import Dataset  # noqa: PLC0415  slow to import

    return Dataset.from_list(rows)


def _takes_divisor(model: Any) -> bool:
    """Whether its loss is divided by `num_items_in_batch`, as Trainer finds it out.

    transformers denies it of many models with images, whose losses do it: of all that are known.
    """
    if getattr(getattr(model, "config", None), "model_type", None) in FAMILIES:
        return True
    if (accepts := getattr(model, "accepts_loss_kwargs", None)) is not None:
        return bool(accepts)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
