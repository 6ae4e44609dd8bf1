"""Options, error lines and exit statuses that `packer` and `engine` share.

Exit status: 0 done, 1 the data or the build is bad, 2 the call is wrong, 130 interrupted by Ctrl-C,
143 ended by SIGTERM.
"""

import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from importlib.metadata import version
from inspect import Parameter, Signature, signature
from math import inf
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal, NoReturn, TypeVar, cast, get_args, get_origin

import typer
from rich.markup import escape

from isobatch.common.config import Option, load_config, options_of
from isobatch.common.consoles import escape_what_does_not_fit, flush_results, messages, print_line
from isobatch.common.errors import ConfigError, IsobatchError, first_line, os_reason
from isobatch.common.interrupts import StopSignals
from isobatch.common.visible_text import visible_line

DONE, FAILED, WRONG_CALL, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
"""Exit statuses; the last two, by the shells' convention, of what Ctrl-C and SIGTERM stopped."""

UsageError: Any = typer.BadParameter.__base__
"""What typer raises for a wrong call; it has no public name there."""

ConfigOption = Annotated[
    Path | None, typer.Option(help="TOML file with any of these options, and the rarer ones.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

Config = TypeVar("Config")
Command = TypeVar("Command", bound=Callable[..., None])


def new_app(name: str, text: str) -> typer.Typer:
    """A program with the help `text`, --version and completion for shells, still without commands.

    Its commands are registered on it.
    """
    app = typer.Typer(name=name, help=text, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.callback(invoke_without_command=True)
    def front(
        context: typer.Context,
        show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    ) -> None:
        if show_version:
            print_line(version("isobatch"))
        elif context.invoked_subcommand is None:
            print_line(context.get_help())

    return app


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
        accepted = signature(command, eval_str=True).parameters
        keywords = [
            parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in accepted.values()
        ]

        @wraps(command)
        def run(**values: Any) -> None:
            command(**{name: values[name] for name in accepted})

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
    names = names if option.flag is None else [option.flag]
    min_value = None if option.min == -inf else option.min
    return Annotated[kind | None, typer.Option(*names, help=option.help, min=min_value)]


def read_config(kind: type[Config], context: typer.Context, *, command: str) -> Config:
    """A call's config: options that are fields of `kind`, over the --config file, over defaults."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    options = {name: _plain(value) for name, value in context.params.items() if name in known}
    return load_config(kind, context.params.get("config"), options, command=command)


def run_app(app: typer.Typer, program: str, *, stopped: str = "stopped") -> None:
    """Run the call in `sys.argv`: an error of the user is one line and an exit status."""
    signals = StopSignals()
    try:
        try:
            signals.begin()
            message, status = _outcome(app, program)
        finally:
            signals.hold()  # nothing may come before a line, or in the middle of it
    except (typer.Abort, KeyboardInterrupt):
        message, status = stopped, INTERRUPTED
    except SystemExit:  # who raised it has said why
        signals.end(has_line=True)
        raise
    except Exception:
        # an interrupt in the middle of an import or of a library's code may come out as another one
        if not signals.came:
            raise
        message, status = stopped, INTERRUPTED
    if signals.came and status != DONE:  # a worker that got the signal too has perhaps failed first
        is_term = signal.SIGTERM in signals.came
        message, status = stopped, TERMINATED if is_term else INTERRUPTED
    if status != DONE:
        print_error(message)
    signals.end(has_line=status != DONE)  # a second signal ends the cleaning up at once
    if status != DONE:
        sys.exit(status)


def _outcome(app: typer.Typer, program: str) -> tuple[str, int]:
    """Run the call; -> the line that says what is wrong, and the exit status."""
    escape_what_does_not_fit()
    try:
        if len(sys.argv) == 1:
            sys.argv.append("--help")
        # typer turns an interrupt into this status
        if app(standalone_mode=False) == INTERRUPTED:
            raise KeyboardInterrupt
        flush_results()
    except UsageError as error:
        said = f"{error.format_message()} ({program} --help, {program} COMMAND --help)"
        return said, WRONG_CALL
    except ConfigError as error:
        return str(error), WRONG_CALL
    except IsobatchError as error:
        return str(error), FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{os_reason(error)}", FAILED
    except MemoryError as error:
        return f"out of memory: {first_line(error)}", FAILED
    return "", DONE


def fail(message: str, status: int) -> NoReturn:
    """Print one error line and exit with this status."""
    print_error(message)
    sys.exit(status)


def print_error(message: str) -> None:
    """Print one error line."""
    text = escape(visible_line(message))
    messages.print(f"[bold red]error:[/] {text}", highlight=False, soft_wrap=True)


def _plain(value: object) -> object:
    """An option's value as a TOML file would give it."""
    if isinstance(value, Path):
        return str(value)
    return (tuple(value) or None) if isinstance(value, list | tuple) else value
