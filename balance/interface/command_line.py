"""Options, error lines and exit statuses that `packer` and `engine` share.

Exit status: 0 done, 1 the data or the build is bad, 2 the call is wrong, 130 interrupted by Ctrl-C,
143 ended by SIGTERM.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from inspect import Parameter, Signature, signature
from math import inf
from pathlib import Path
from types import FrameType, GenericAlias
from typing import Annotated, Any, Literal, NoReturn, TypeVar, cast, get_args, get_origin

import typer
from rich.console import Console
from rich.markup import escape

from balance.config import Option, load_config, options_of
from balance.errors import ConfigError, IsobatchError

FAILED, WRONG_CALL, INTERRUPTED, TERMINATED = 1, 2, 130, 143
"""Exit statuses; the last two, by the shells' convention, of what Ctrl-C and SIGTERM stopped."""

SAME_PRESS_S = 1.0
"""Interrupts that come within this time of one are the same wish."""

UsageError: Any = typer.BadParameter.__base__
"""What typer raises for a wrong call; it has no public name there."""

ConfigOption = Annotated[
    Path | None, typer.Option(help="TOML file with any of these options, and the rarer ones.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

messages = Console(stderr=True)
"""Progress and messages; standard output is for results."""

PIPE_WIDTH = 10_000
"""Columns of results that go to a file or another program: lines are not wrapped there."""

Config = TypeVar("Config")
Command = TypeVar("Command", bound=Callable[..., None])


def results() -> Console:
    """Standard output; wrapped on a terminal only, or to the COLUMNS that are asked for."""
    console = Console()
    fits = console.is_terminal or "COLUMNS" in os.environ
    return console if fits else Console(width=PIPE_WIDTH)


def new_app(name: str, text: str) -> typer.Typer:
    """An empty program with the help `text`; its commands are registered on it."""
    return typer.Typer(
        name=name,
        help=text,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def with_options(kind: type, *names: str) -> Callable[[Command], Command]:
    """Give a command an option for each of these fields of a config dataclass.

    Their values are for `read_config`: None unless given, so that a TOML file can give them.
    """
    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name, *rest))
        for name, *rest in options_of(kind)
        if name in names
    ]

    def decorate(command: Command) -> Command:
        own = signature(command, eval_str=True).parameters
        keywords = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in own.values()]

        @wraps(command)
        def run(**given: Any) -> None:
            command(**{name: given[name] for name in own})

        run.__signature__ = Signature([*parameters, *keywords])  # type: ignore[attr-defined]
        return cast(Command, run)

    return decorate


def _annotation(name: str, kind: Any, option: Option) -> Any:
    """The annotation that typer needs for an option that may be left out."""
    if get_origin(kind) is Literal:
        kind = str  # the config checks the choice
    if get_origin(kind) is tuple:
        kind = GenericAlias(list, get_args(kind)[:1])  # an option that may be repeated
    names = [f"--{name.replace('_', '-')}"] if kind is bool else []  # without a --no-...
    least = None if option.least == -inf else option.least
    return Annotated[kind | None, typer.Option(*names, help=option.help, min=least)]


def read_config(kind: type[Config], context: typer.Context, *, command: str) -> Config:
    """A call's config: options that are fields of `kind`, over the --config file, over defaults."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    options = {name: _plain(value) for name, value in context.params.items() if name in known}
    return load_config(kind, context.params.get("config"), options, command=command)


def run_app(app: typer.Typer, program: str, *, stopped: str = "stopped") -> None:
    """Run the call in `sys.argv`: an error of the user is one line and an exit status."""
    came = _interrupt_once()
    try:
        if len(sys.argv) == 1:
            sys.argv.append("--help")
        # typer turns an interrupt into this status
        if app(standalone_mode=False) == INTERRUPTED:
            raise KeyboardInterrupt
    except UsageError as error:
        fail(f"{error.format_message()} ({program} --help, {program} COMMAND --help)", WRONG_CALL)
    except (typer.Abort, KeyboardInterrupt):
        _set_handlers(signal.SIG_IGN)  # nothing may come before the line below
        print_error(stopped)
        _set_handlers(signal.SIG_DFL)  # a second signal ends the cleaning up at once
        sys.exit(TERMINATED if signal.SIGTERM in came else INTERRUPTED)
    except ConfigError as error:
        fail(str(error), WRONG_CALL)
    except IsobatchError as error:
        fail(str(error), FAILED)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}", FAILED)


def _interrupt_once() -> list[int]:
    """Make SIGTERM as clean as Ctrl-C, and Ctrl-C pressed twice at once as clean as once; the list
    has what has come.

    Shells make background jobs of scripts ignore Ctrl-C, and only that. What a second interrupt
    raises in the middle of cleaning up, perhaps nobody can catch.
    """
    came: list[int] = []
    again = 0.0

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal again
        came.append(number)
        if time.monotonic() >= again:
            again = time.monotonic() + SAME_PRESS_S
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)
    return came


def _set_handlers(handler: signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def fail(message: str, status: int) -> NoReturn:
    """Print one error line and exit with this status."""
    print_error(message)
    sys.exit(status)


def print_error(message: str) -> None:
    """Print one error line."""
    messages.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)


def _plain(value: object) -> object:
    """An option's value as a TOML file would give it."""
    if isinstance(value, Path):
        return str(value)
    return (tuple(value) or None) if isinstance(value, list | tuple) else value
