"""Options, error lines and exit statuses that `packer` and `engine` share.

Every program here has the exit statuses of `EXIT_STATUSES`; docs/reference/command_line.md has them
and the log for machines.
"""

import ast
import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from itertools import pairwise
from math import inf
from pathlib import Path
from time import perf_counter
from types import GenericAlias
from typing import Annotated, Any, Literal, NoReturn, TypeVar, cast, get_args, get_origin

import typer
from rich.markup import escape

from isobatch.common.config import Option, load_config, options_of, read_toml, typed_values
from isobatch.common.consoles import escape_what_does_not_fit, flush_results, messages, print_line
from isobatch.common.errors import ConfigError, IsobatchError, first_line, os_reason
from isobatch.common.interrupts import StopSignals
from isobatch.common.visible_text import visible_line

DONE, FAILED, WRONG_CALL, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
"""Exit statuses; the last two, by the shells' convention, of what Ctrl-C and SIGTERM stopped."""

EXIT_STATUSES = {
    DONE: "done",
    FAILED: "the data, the build or the machine is at fault",
    WRONG_CALL: "the call or its config is wrong",
    INTERRUPTED: "stopped by Ctrl-C",
    TERMINATED: "stopped by SIGTERM",
}
"""Exit status -> what it means, for `--help` and the docs."""

ADVICE = {
    errno.EACCES: "it needs rights to that place: give them, or another place",
    errno.EEXIST: "a file is where a folder is wanted: give another place",
    errno.EFBIG: "allow larger files (ulimit -f)",
    errno.ENOENT: "give a path that is there",
    errno.ENOSPC: "make room there",
    errno.ENOTDIR: "a file is where a folder is wanted: give another place",
    errno.EROFS: "give a place that can be written to",
}
"""What to do about an error of the system that no command has explained."""

UsageError: Any = typer.BadParameter.__base__
"""What typer raises for a wrong call; it has no public name there."""

ConfigOption = Annotated[
    Path | None, typer.Option(help="TOML file with any of these options, and the rarer ones.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
LOG_KINDS = ("text", "json")
LogOption = Annotated[
    str,
    typer.Option(
        "--log", help="Progress and messages: text, or json, an object a line, for programs."
    ),
]

Config = TypeVar("Config")
Command = TypeVar("Command", bound=Callable[..., None])


def new_app(name: str, text: str) -> typer.Typer:
    """A program with the help `text`, --version and completion for shells, still without commands.

    Its commands are registered on it.
    """
    statuses = ", ".join(f"{status} {meaning}" for status, meaning in EXIT_STATUSES.items())
    app = typer.Typer(
        name=name,
        help=text,
        epilog=f"Exit status: {statuses}.",
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

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


def run_module(module: str) -> None:
    """Run the call in `sys.argv` by `main` of a module that makes an `app`.

    The module is loaded for its commands only. Help, the version, completion and wrong calls take
    the list of commands, which is read from its source: functions after `@app.command()`.
    """
    source = cast(ModuleSpec, find_spec(module)).origin
    body = ast.parse(Path(str(source)).read_text("utf-8")).body
    calls = [node.value for node in body if isinstance(node, ast.Assign)]
    front = next(node for node in calls if ast.unparse(node).startswith("new_app("))
    name, text = map(ast.literal_eval, cast(ast.Call, front).args)
    app = new_app(name, text)
    commands = [
        node
        for node in body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(line) == "app.command()" for line in node.decorator_list)
    ]
    # typer gets the words from the shell that asks for completions
    words = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    word = (sys.argv[1:2] or words.split()[1:2] or [""])[0]
    if word in {command.name for command in commands}:
        import_module(module).main()
        return
    for command in commands:
        app.command(command.name, help=ast.get_docstring(command))(lambda: None)
    run_app(app, name)


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


def with_log(command: Command) -> Command:
    """Give a command the option `--log`, which `run_app` has obeyed already."""
    accepted = signature(command, eval_str=True)
    option = Parameter("log", Parameter.KEYWORD_ONLY, default="text", annotation=LogOption)

    @wraps(command)
    def run(**values: Any) -> None:
        if values.pop("log") not in LOG_KINDS:
            raise ConfigError(f"--log: give {' or '.join(LOG_KINDS)}")
        command(**values)

    run.__signature__ = Signature([*accepted.parameters.values(), option])  # type: ignore[attr-defined]
    return cast(Command, run)


def print_result(values: dict[str, Any], *, as_json: bool) -> bool:
    """Log a result, print it where JSON is asked for; -> whether people still wait for words."""
    messages.event("result", result=values)
    if as_json:
        print(json.dumps(values))
    return not as_json


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
    options = {name: _plain(value) for name, value in _given(kind, context).items()}
    return load_config(kind, context.params.get("config"), options, command=command)


def read_settings(kind: type[Config], context: typer.Context, argument: str) -> Config:
    """The same where the call's argument, a field of `kind`, may be the TOML file instead."""
    options = _given(kind, context)
    file = Path(options[argument])
    if file.suffix != ".toml" or file.is_dir():
        return kind(**_as_tuples(options))
    del options[argument]
    values = typed_values(kind, read_toml(file, str(file), has_inf=True), str(file))
    if argument not in values:
        raise ConfigError(f"{file}: missing key {argument}")
    try:
        return kind(**(values | _as_tuples(options)))
    except ConfigError as error:
        raise ConfigError(f"{error} ({file})") from None


def _given(kind: type, context: typer.Context) -> dict[str, Any]:
    """Options of a call that are fields of a config dataclass, without those left out."""
    known = {field.name for field in fields(kind)}
    given = {name: value for name, value in context.params.items() if name in known}
    return {name: value for name, value in given.items() if value not in (None, [], ())}


def _as_tuples(options: dict[str, Any]) -> dict[str, Any]:
    """Options that may be repeated as fields have them."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }


def run_app(app: typer.Typer, program: str, *, stopped: str = "stopped") -> None:
    """Run the call in `sys.argv`: an error of the user is one line and an exit status."""
    signals = StopSignals()
    begun = perf_counter()
    # before the call is read: the line that says what is wrong with it is an event too
    messages.is_log = "--log=json" in sys.argv or ("--log", "json") in pairwise(sys.argv)
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
    messages.event("end", status=status, seconds=round(perf_counter() - begun, 3))
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
        advice = ADVICE.get(error.errno or 0, "")
        return f"{where}{os_reason(error)}{advice and f'; {advice}'}", FAILED
    except MemoryError as error:
        return f"out of memory: {first_line(error)}", FAILED
    return "", DONE


def require_writable(option: str, path: Path, *, is_file: bool = False) -> None:
    """Raise ConfigError if a folder, or a file with the folders above it, cannot be made there.

    For commands that write at the end of long work; nothing is made.
    """
    if is_file and path.is_dir():
        raise ConfigError(f"{option} {path}: this is a folder; give a file")
    folder = path.absolute().parent if is_file else path.absolute()
    there = next(one for one in (folder, *folder.parents) if one.exists())
    if not there.is_dir():
        what = "this" if there == path.absolute() else there
        raise ConfigError(f"{option} {path}: {what} is a file; give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path}: {there} cannot be written to; give another place")


def fail(message: str, status: int) -> NoReturn:
    """Print one error line and exit with this status."""
    print_error(message)
    sys.exit(status)


def print_error(message: str) -> None:
    """Print one error line."""
    text = escape(visible_line(message))
    if messages.is_log:
        messages.event("error", text=message)
        return
    messages.print(f"[bold red]error:[/] {text}", highlight=False, soft_wrap=True)


def _plain(value: object) -> object:
    """An option's value as a TOML file would give it."""
    if isinstance(value, Path):
        return str(value)
    return tuple(value) if isinstance(value, list | tuple) else value
