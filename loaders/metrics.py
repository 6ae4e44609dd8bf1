"""Figures of steps for TensorBoard, W&B, MLflow, Trackio: `MetricsLogger`.

For `StepStream`, whose option `log_to` asks for it, and for trainers that log by themselves
(`MetricsWindow`). All figures are of what a `Meter` has counted anyway; only attention is computed
because somebody asks. A tool takes up to .5 ms a call, so several steps share one.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from isobatch.common.errors import ConfigError, first_line
from isobatch.loaders.stats import Meter, mean_ratios

Write = Callable[[dict[str, float], int], object]
"""Takes figures by name, and the number of the training's step that they are of."""
Tool = tuple[Write, Callable[[], object]]
"""How to write to a tool, and how to end what was begun for it."""

PREFIX = "isobatch/"
NAMES = {"vit": "waiting_vision", "llm": "waiting_llm", "attention": "waiting_attention"}
"""Load (`stats.LOADS`) -> what its dist ratio is called."""


class MetricsWindow:
    """What a loader did since it was last asked."""

    def __init__(self, meter: Meter, position: Callable[[], dict[str, float]]) -> None:
        """`position` gives the figures that say how far the training is."""
        self._meter, self._position = meter, position
        self._before = meter.sums()
        self.begin()

    def begin(self) -> None:
        """Time counts from now on."""
        self._begun = time.perf_counter()

    def take(self) -> dict[str, float]:
        """Figures of the steps since the last call, by name; {} without any step."""
        before, after, now = self._before, self._meter.sums(), time.perf_counter()
        seconds, steps = now - self._begun, after.steps - before.steps
        if not steps:
            return {}
        self._before, self._begun = after, now
        tokens, waiting_s = after.tokens - before.tokens, after.waiting_s - before.waiting_s
        ratios = mean_ratios(after.rounds - before.rounds)
        figures = {
            "tokens_per_second": tokens / seconds,
            **{NAMES[name]: ratio for name, ratio in ratios.items()},
            "fill": tokens / max(1, after.room - before.room),
            "data_wait_ms": 1e3 * waiting_s / steps,
            "data_wait_share": waiting_s / seconds,
            "skipped": after.skipped_samples,
            **self._position(),
        }
        return {PREFIX + name: value for name, value in figures.items()}


class MetricsLogger:
    """Writes a loader's figures, and the trainer's, as means of every few steps."""

    def __init__(self, log_to: str | Write, every: int, window: MetricsWindow) -> None:
        self._log_to, self._every, self._window = log_to, every, window
        self._write, self._close = (log_to, _nothing) if callable(log_to) else _open(log_to)
        self._num_waiting = 0
        self._values: dict[str, list[float]] = {}

    def begin(self) -> None:
        """An iterator begins: what was done since the last one took none of its time."""
        self._window.begin()

    def add(self, figures: Mapping[str, float]) -> None:
        """Figures of the trainer's, of its last step."""
        for name, value in figures.items():
            self._values.setdefault(name, []).append(float(value))

    def step(self, number: int) -> None:
        """Another step is trained on, the training's `number`."""
        self._num_waiting += 1
        if self._num_waiting == self._every:
            self.flush(number)

    def flush(self, number: int) -> None:
        """Write what is not written yet, if anything."""
        if not (figures := self._window.take()):
            return
        figures |= {PREFIX + name: sum(of) / len(of) for name, of in self._values.items()}
        self._num_waiting, self._values = 0, {}
        try:
            self._write(figures, number)
        except Exception as error:  # whatever a tool raises: the training is worth more
            if callable(self._log_to):
                raise
            what = f"log_to={self._log_to!r}: {first_line(error)}"
            warnings.warn(f"{what}; nothing more is logged there", stacklevel=2)
            self._write = _nothing

    def close(self, number: int) -> None:
        """Write the rest, and end a run that began here."""
        self.flush(number)
        self._close()
        self._write = self._close = _nothing


def check_tool(log_to: str | Write | None) -> None:
    """ConfigError unless the tool is known and installed."""
    if not isinstance(log_to, str):
        return
    tool = log_to.partition(":")[0]
    if tool not in _TOOLS:
        raise ConfigError(
            f"log_to is {log_to!r}; use one of {', '.join(_TOOLS)}, if you like with its folder or"
            " project after a colon (tensorboard:runs/x), or give a function of figures and step"
        )
    if find_spec(tool) is None:
        there = [name for name in _TOOLS if find_spec(name)]
        others = f", or use {' or '.join(there)}, which you have" if there else ""
        raise ConfigError(
            f"log_to is {log_to!r}, which is not installed: pip install {tool}{others}"
        )


def _open(log_to: str) -> Tool:
    tool, _, place = log_to.partition(":")
    return _TOOLS[tool](place)


def _nothing(*_: object) -> None:
    """Do nothing."""


def _open_tensorboard(folder: str) -> Tool:
    # as SummaryWriter does, but all figures in one event, in a twentieth of the time
    from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: PLC0415  slow, as all
    from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

    writer: Any = EventFileWriter(folder or time.strftime("runs/%Y-%m-%d_%H-%M-%S"))

    def write(figures: dict[str, float], step: int) -> None:
        values = [
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in figures.items()
        ]
        summary = summary_pb2.Summary(value=values)
        writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))
        writer.flush()

    return write, writer.close


def _open_wandb(project: str) -> Tool:
    import wandb  # noqa: PLC0415

    close = _nothing if wandb.run else wandb.finish
    run: Any = wandb.run or wandb.init(project=project or "isobatch")
    # an axis of its own: W&B drops what comes after a larger step of its own
    run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")
    return lambda figures, step: run.log({**figures, f"{PREFIX}step": step}), close


def _open_mlflow(experiment: str) -> Tool:
    import mlflow  # noqa: PLC0415

    close = _nothing if mlflow.active_run() else mlflow.end_run
    if close is not _nothing:
        mlflow.set_experiment(experiment or "isobatch")
        mlflow.start_run()
    return lambda figures, step: mlflow.log_metrics(figures, step=step), close


def _open_trackio(project: str) -> Tool:
    import trackio  # noqa: PLC0415

    run = trackio.context_vars.current_run.get()
    close = _nothing if run else trackio.finish
    run = run or trackio.init(project=project or "isobatch")
    return lambda figures, step: run.log(figures, step=step), close


_TOOLS: dict[str, Callable[[str], Tool]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
    "trackio": _open_trackio,
}
