"""The Jinja environment of chat templates, with limits of time and memory.

For `counting.text.chat_template`. It offers what transformers offers to templates: a sandbox,
trimmed blocks, loop controls, `raise_exception`, `tojson`, `strftime_now` and `{% generation %}`. A
template comes from wherever a model does, so it is compiled with a counter in each loop and macro,
and with a check of what it joins. Both cost a rendering 1 to 4 %.
"""

import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import wraps
from typing import Any

import jinja2
from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from isobatch.common.errors import ConfigError

MOST_STEPS = 10_000_000
"""Rounds of loops and calls of macros in one rendering: some seconds."""
MOST_SECONDS = 5.0
"""Time of the processor in one rendering; a count of steps would let each of them be long."""
MOST_NESTED = 1_000_000
"""Items of a list with those of the lists in it, each as often as it would be written."""
MOST_CHARS = 2**24
"""Characters of a text that a template makes, and items of a list: 16 books."""

_STEP = "isobatch: a step"
"""A statement of this constant is where steps are counted."""
_TURN = "isobatch_turn"
"""Variable: the function that marks turns."""
_STEPS_PER_LOOK = 63
"""Steps without a look at the clock: one less than a power of two."""
_PIECES = 64
"""Pieces of a text that are written before its length is looked at."""
_MOST_UNCHECKED = 8
"""Operands of a sum that is only written out, which takes no more memory than these."""
_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_ATTRIBUTES = frozenset(("first", "last", "index", "index0", "length", "previtem", "nextitem"))
# What makes a text or a list longer than all that it is made of.
_GROWING_METHODS = frozenset(("replace", "join", "center", "ljust", "rjust", "zfill", "expandtabs"))
_GROWING_FILTERS = (
    *("batch", "center", "e", "escape", "forceescape", "format", "indent", "join", "pprint"),
    *("list", "replace", "slice", "sum", "tojson", "urlencode", "urlize", "wordwrap", "xmlattr"),
)
_WIDTH = re.compile(r"%[^a-zA-Z%]*([0-9]{7}|[*])|[{][^{}]*[0-9]{7}|[{][^{}]+[{]")


class TemplateLimitError(TemplateError):
    """A template takes more time or memory than any conversation needs."""


def compile_template(source: str, day: date, *, marks_turns: bool = False) -> jinja2.Template:
    """A template that is rendered on `day`; ConfigError if it is not Jinja, or nested too deep.

    `marks_turns`: it also writes what the function in its variable `isobatch_turn` returns, which
    is called with a message where its part of the text begins, and with None at a loop's end.
    """
    try:
        return _environment(day, marks_turns=marks_turns).from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from None
    # the parsers of Jinja and Python follow the nesting of the template
    except (RecursionError, MemoryError, SyntaxError, OverflowError):
        raise ConfigError("chat template: it is nested too deep to be compiled") from None
    except ValueError as error:
        raise ConfigError(f"chat template: it cannot be compiled: {error}") from None


def reads_the_date(source: str) -> bool:
    """Whether a template uses `strftime_now`, so that its text depends on the day."""
    return "strftime_now" in source


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The text of a template; raises what the template does, TemplateLimitError at a limit."""
    environment: Any = template.environment
    environment.begin()
    try:
        # `template.render` without its work on tracebacks, and with globals in a plain dict: to
        # copy Jinja's chain of dicts takes as long as to render a short conversation
        names = {**environment.globals, **variables}
        context = Context(environment, names, template.name, template.blocks)
        return _joined(template.root_render_func(context))
    except RecursionError:
        raise TemplateLimitError("it calls itself without an end") from None
    except MemoryError:
        raise TemplateLimitError("it takes more memory than there is") from None


def _joined(pieces: Iterable[str]) -> str:
    """All that a template writes, in one text."""
    # in runs, whose lengths are summed up without a loop of our own
    waiting = iter(pieces)
    run = list(itertools.islice(waiting, _PIECES))
    if len(run) < _PIECES:
        if sum(map(len, run)) > MOST_CHARS:
            raise _too_long()
        return "".join(run)
    written: list[str] = []
    length = 0
    while run:
        written.append("".join(run))
        length += len(written[-1])
        if length > MOST_CHARS:
            raise _too_long()
        run = list(itertools.islice(waiting, _PIECES))
    return "".join(written)


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment, quicker with messages, and with limits."""

    intercepted_binops = frozenset(("*", "**", "%"))
    concat = staticmethod(_joined)

    marks_turns = False
    _steps = 0
    _deadline: float | None = None

    def begin(self) -> None:
        """Begin a rendering, which has all steps and seconds."""
        self._steps = 0
        self._deadline = None

    def count_step(self) -> None:
        """Count a round of a loop, or a call of a macro."""
        self._steps = steps = self._steps + 1
        if steps & _STEPS_PER_LOOK == 0:
            if steps > MOST_STEPS:
                raise TemplateLimitError(f"its loops take more than {MOST_STEPS:,} steps")
            now = time.thread_time()
            if self._deadline is None:  # most renderings end before, and need no clock
                self._deadline = now + MOST_SECONDS
            if now > self._deadline:
                raise TemplateLimitError(f"it takes more than {MOST_SECONDS:.0f} s")

    def sized(self, value: Any) -> Any:
        """A text or a list that was made, if it is not too long."""
        if type(value) in _SIZED:
            if len(value) > MOST_CHARS:
                raise _too_long()
            if type(value) is not str:
                self.nested(value)
        return value

    def nested(self, value: Any) -> Any:
        """A list, tuple or dict that was made, if writing it out would end.

        `[a, a]` of such lists, 60 times, takes no memory, and its text more than there is.
        """
        waiting = [value]
        count = 0
        while waiting:
            item = waiting.pop()
            if isinstance(item, Namespace):
                item = item._Namespace__attrs
            if isinstance(item, dict):
                waiting += item.values()
            elif isinstance(item, list | tuple):
                waiting += [one for one in item if type(one) not in _PLAIN]
            else:
                continue
            count += 1 + len(item)
            if count > MOST_NESTED:
                raise TemplateLimitError(f"it makes lists in lists of more than {MOST_NESTED:,}")
        self._steps += count // _STEPS_PER_LOOK * (_STEPS_PER_LOOK + 1)
        return value

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`message.content`, `loop.first`: Jinja tries more, and an exception costs most."""
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _LOOP_ATTRIBUTES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method or a function, unless its result would be too long."""
        name = getattr(obj, "__name__", None)
        if name in _GROWING_METHODS and isinstance(whole := getattr(obj, "__self__", None), str):
            _require_small(name, whole, args, kwargs)
            return self.sized(super().call(context, obj, *args, **kwargs))
        if obj is dict or obj is Namespace:
            return self.nested(super().call(context, obj, *args, **kwargs))
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """`text.format`, unless a width in it is too large."""
        whole = getattr(value, "__self__", None)
        if isinstance(whole, str) and value.__name__ in ("format", "format_map"):
            _require_widths(whole)
        return super().wrap_str_format(value)

    def call_binop(self, context: Context, operator: str, first: Any, second: Any) -> Any:
        """`*`, `**` or `%`, unless the result would be too long."""
        if operator == "%":
            if isinstance(first, str):
                _require_widths(first)
        elif isinstance(first, int) and isinstance(second, int):
            bits = first.bit_length()
            if bits + second.bit_length() > 4096 if operator == "*" else bits * abs(second) > 4096:
                raise TemplateLimitError("it computes a number of more than 1,000 digits")
        elif operator == "*":
            size, times = (second, first) if isinstance(first, int) else (first, second)
            if isinstance(times, int) and hasattr(size, "__len__"):
                _require_length(len(size) * times)
        return self.sized(super().call_binop(context, operator, first, second))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        if self.marks_turns:
            _mark_turns(tree)
        for loop in tree.find_all(nodes.For):
            loop.body.insert(0, nodes.ExprStmt(nodes.Const(_STEP)))
        for macro in tree.find_all(nodes.Macro):
            macro.body.insert(0, nodes.ExprStmt(nodes.Const(_STEP)))
        return tree


# ruff: noqa: N802  (the methods of a code generator are named after nodes)
class _Generator(CodeGenerator):
    """Python code of a template that counts its steps and checks what it joins."""

    _depth = 0
    """Sums around the one that is written."""
    _is_shown = False
    """Whether the sum is only written out, and kept nowhere."""

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:
        if isinstance(node.node, nodes.Const) and node.node.value is _STEP:
            self.writeline("environment.count_step()")
        else:
            super().visit_ExprStmt(node, frame)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        super()._output_child_pre(node, frame, finalize)
        self._is_shown = isinstance(node, nodes.Add | nodes.Concat)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        self._visit_sum(node, frame, super().visit_Add)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._visit_nested(node, frame, super().visit_List)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._visit_nested(node, frame, super().visit_Tuple)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._visit_nested(node, frame, super().visit_Dict)

    def _visit_nested(self, node: Any, frame: Frame, visit: Callable[[Any, Frame], None]) -> None:
        depth, self._depth = self._depth, 0
        self.write("environment.nested(")
        visit(node, frame)
        self.write(")")
        self._depth = depth

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._visit_sum(node, frame, super().visit_Concat)

    def visit_Mod(self, node: nodes.BinExpr, frame: Frame) -> None:
        """`loop.index0 % 2` is no text's format, and in every turn of many templates."""
        if isinstance(node.left, nodes.Getattr) and node.left.attr.startswith("index"):
            self.write("(")
            self.visit(node.left, frame)
            self.write(" % ")
            self.visit(node.right, frame)
            self.write(")")
        else:
            super().visit_Mod(node, frame)

    def _visit_sum(self, node: Any, frame: Frame, visit: Callable[[Any, Frame], None]) -> None:
        shown, depth = self._is_shown, self._depth
        is_inner = depth % _MOST_UNCHECKED != 0
        checked = not (shown and depth == 0) and not is_inner
        self._is_shown, self._depth = False, depth + 1
        self.write("environment.sized(" if checked else "")
        visit(node, frame)
        self.write(")" if checked else "")
        self._depth = depth

    def signature(self, node: Any, frame: Frame, extra_kwargs: Any = None) -> None:
        """Arguments, whose sums are kept by whoever is called."""
        depth, self._depth = self._depth, 0
        super().signature(node, frame, extra_kwargs)
        self._depth = depth


class _GenerationMarks(Extension):
    """`{% generation %}`: its body, between the two strings of `generation_marks`."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a plain attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @jinja2.pass_context
    def _mark(self, context: Context, caller: Callable[[], str]) -> str:
        first, last = context["generation_marks"]
        return f"{first}{caller()}{last}"


# --- marks of turns ---


def _mark_turns(tree: nodes.Template) -> None:
    """Let each loop write marks where the part of a message begins, and where the loop ends.

    The loop is over messages, or over their numbers: then `set message = messages[number]` begins
    the part. Whether a value is a message is known when the template is rendered.
    """
    numbers = itertools.count()
    for parent in [*tree.find_all(nodes.Node), tree]:
        for _, value in parent.iter_fields():
            if not isinstance(value, list):
                continue
            for place in range(len(value) - 1, -1, -1):
                if isinstance(loop := value[place], nodes.For):
                    number = next(numbers)
                    _mark_loop(loop, number)
                    value.insert(place + 1, _mark_of(nodes.Const(None), number, loop))


def _mark_loop(loop: nodes.For, number: int) -> None:
    if not isinstance(loop.target, nodes.Name):
        return
    name = loop.target.name
    if isinstance(loop.iter, nodes.Call):  # range(...)
        for body in _bodies(loop):
            for place in range(len(body) - 1, -1, -1):
                if (message := _taken(body[place], name)) is not None:
                    body.insert(place + 1, _mark_of(message, number, loop))
    else:
        loop.body.insert(0, _mark_of(nodes.Name(name, "load"), number, loop))


def _bodies(loop: nodes.For) -> Iterator[list[nodes.Node]]:
    """The statements of a loop, and of what it does under conditions."""
    waiting = [loop.body]
    while waiting:
        body = waiting.pop()
        for node in list(body):
            if isinstance(node, nodes.If):
                waiting += [node.body, node.else_, *(branch.body for branch in node.elif_)]
        yield body


def _taken(node: nodes.Node, name: str) -> nodes.Expr | None:
    """What `set message = messages[name]` assigns to."""
    if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
        value = node.node
        if isinstance(value, nodes.Getitem) and isinstance(value.arg, nodes.Name):
            return nodes.Name(node.target.name, "load") if value.arg.name == name else None
    return None


def _mark_of(value: nodes.Expr, number: int, loop: nodes.For) -> nodes.Output:
    function = nodes.Name(_TURN, "load")
    call = nodes.Call(function, [value, nodes.Const(number)], [], None, None)
    output = nodes.Output([call])
    output.set_lineno(loop.lineno)
    if loop.environment is not None:
        output.set_environment(loop.environment)
    return output


# --- limits ---

_SIZED = frozenset((str, list, tuple))
_PLAIN = frozenset((str, int, float, bool, type(None)))


def _too_long() -> TemplateLimitError:
    return TemplateLimitError(f"it makes a text or a list longer than {MOST_CHARS:,}")


def _require_length(length: int) -> None:
    if length > MOST_CHARS:
        raise _too_long()


def _require_widths(form: str) -> None:
    """A format must not ask for a million spaces, nor take a width from its arguments."""
    if _WIDTH.search(form):
        raise TemplateLimitError("it formats with a width of a million or more")


def _require_small(name: str, whole: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """TemplateLimitError if a method of texts would make a much longer one."""
    values = [*args, *kwargs.values()]
    if name == "join":
        for pieces in values:
            if isinstance(pieces, list | tuple):
                length = sum(len(piece) for piece in pieces if isinstance(piece, str))
                _require_length(len(pieces) * len(whole) + length)
    elif name == "replace":
        longest = max((len(value) for value in values[1:2] if isinstance(value, str)), default=0)
        count = whole.count(values[0]) if values and isinstance(values[0], str) else 0
        _require_length(len(whole) + count * longest)
    for value in values:
        if isinstance(value, int):
            _require_length(abs(value))


def _require_small_filter(name: str, values: Sequence[Any]) -> None:
    """TemplateLimitError if a filter would make a much longer text than it is given."""
    texts = [value for value in values if isinstance(value, str)]
    numbers = [abs(value) for value in values if isinstance(value, int)]
    _require_length(max(numbers, default=0))
    if name == "format" and texts:
        _require_widths(texts[0])
    elif name == "replace" and len(texts) > 2:
        _require_small("replace", texts[0], texts[1:], {})
    elif name == "join":
        lists = [value for value in values if isinstance(value, list | tuple)]
        _require_small("join", texts[-1] if texts else "", lists, {})
    elif name == "indent" and texts:
        _require_length(len(texts[0]) + texts[0].count("\n") * max(numbers, default=4))


def _limited(
    filter_name: str, function: Callable[..., Any], sized: Callable[[Any], Any]
) -> Callable[..., Any]:
    """A filter, unless it makes a much longer text than it is given."""

    @wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        _require_small_filter(filter_name, [*args, *kwargs.values()])
        result = function(*args, **kwargs)
        if filter_name in ("batch", "slice"):  # they may repeat what they fill up with
            result = list(result)
        return sized(result)

    return limited


# --- the environment ---


def _environment(day: date, *, marks_turns: bool) -> _Environment:
    extensions = [_GenerationMarks, loopcontrols]
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.code_generator_class = _Generator
    environment.marks_turns = marks_turns
    environment.filters["tojson"] = _to_json
    for name in _GROWING_FILTERS:
        environment.filters[name] = _limited(name, environment.filters[name], environment.sized)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = day.strftime
    environment.globals["lipsum"] = _no_lipsum
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _no_lipsum(*_: Any, **__: Any) -> None:
    raise TemplateError("it writes a text by chance (lipsum)")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    # Jinja's own filter escapes HTML, which is wrong in a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)
