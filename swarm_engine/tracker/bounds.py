"""A Jinja sandbox whose templates are bounded in size and time: what a template makes of a conversation, it pays for.

Jinja's sandbox keeps a template from what it may not touch, not from `'x' * 10**10`, a loop in a loop in a loop, or a
list that holds itself twice forty times over. Here every operation whose price depends on its operands is charged
before it is done, in units of about a character's handling, and a rendering that has spent its units is given up. This
is done in place and not in a process that may be killed, for every call renders, and sending the conversation to
another process and waiting for it would cost each of them as much as the rendering itself. The price is counted, not
timed, so the same conversation is refused everywhere or nowhere; the clock is looked at only should a price be far off.

Where a price comes from:

- loops pay for all their turns when they begin, a turn the size of the loop's body; macros and blocks when called;
- what is printed, joined with `~`, compared or searched pays for its whole size (`Meter.weigh`), and so do the
  arguments of filters, tests and calls, except where only a length or a key is looked at;
- what makes text or lists pays for what it makes; where that is not known beforehand (a filter or method that is not
  listed below), for the product of its arguments, numbers by their value: safe, if often too much.

Nothing is computed while a template is compiled: what is not a constant as it stands is left for the rendering.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set, ValuesView
from contextlib import nullcontext
from functools import wraps
from threading import Lock
from types import BuiltinMethodType, GeneratorType
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg
from jinja2.visitor import NodeTransformer

from swarm_engine.waiting import TakesLongError

MAX_UNITS = 1 << 26
"""Of one rendering. A conversation of five million characters, more than a million tokens, needs half of it."""
MAX_WAITING_UNITS = 1 << 22
"""Of one that others wait for, about 50 ms at the worst."""
MAX_CPU_S = 5.0
"""Should the units be far off."""
CHECK_EVERY = 1 << 22
"""Units between two looks at the clock."""
NODE = 16
"""Units of one operation of a loop's body, done or not."""
CALL = 64 * NODE
"""Units of a call."""
MADE = 2
"""Units of a character that is made, not only read."""
ITEM = 16
"""Units of an item in a list that is made, when the item is there already."""
OBJECT = 64
"""Units of one that is made with it."""
MAX_BITS = 8192
"""Of an integer."""
SMALL = 1 << 64
"""Integers below this need no look at their size."""
MAX_SOURCE_CHARS = 1 << 20

REMOVED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap")
"""For pages; what they take depends on more than lengths."""

LINEAR_METHODS = frozenset({
    "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
    "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower",
    "partition", "removeprefix", "removesuffix", "startswith", "swapcase", "title", "upper",
})  # fmt: skip
"""Of texts: they read themselves and their arguments, and make no more than that."""
NUMBERS = (int, float, complex)
STRIPPING_METHODS = frozenset({"strip", "lstrip", "rstrip"})
"""That are like those while it is blanks that they strip."""
KEYED_METHODS = frozenset({"get", "items", "keys", "values"})
"""Of dictionaries."""
SHALLOW_FILTERS = frozenset({"count", "d", "default", "first", "last", "length"})
LINEAR_FILTERS = frozenset({
    "abs", "attr", "capitalize", "e", "escape", "float", "forceescape", "int", "items", "lower", "map",
    "reject", "rejectattr", "reverse", "safe", "select", "selectattr", "string", "title", "trim", "upper", "urlencode",
    "wordcount",
})  # fmt: skip
SORTING_FILTERS = frozenset({"dictsort", "groupby", "max", "min", "sort", "unique"})
LONGEST_SORT = 32
"""Comparisons of an item, at most."""
SHALLOW_TESTS = frozenset({
    "boolean", "callable", "defined", "divisibleby", "escaped", "even", "false", "filter", "float", "integer",
    "iterable", "mapping", "none", "number", "odd", "sameas", "sequence", "string", "test", "true", "undefined",
})  # fmt: skip

ONE_AT_A_TIME = Lock()
"""Of renderings on threads: they would take the interpreter from each other, and from the event loop as often, and what
they make would be in memory together."""

STEPS, TEXT, READ, SEARCHED, KEY, CUT = "loop turns", "printed", "compared", "searched", "a key", "cut out"
"""Filters that the template's own syntax tree is given; with a blank in the name no template can name them."""


class TooMuchError(Exception):
    """A rendering has spent its units."""


class Meter:
    """What a rendering may still spend."""

    __slots__ = ("_end_s", "_is_waited_for", "_sizes", "left", "next_look")

    def __init__(self, *, is_waited_for: bool) -> None:
        """The rendering begins.

        Args:
            is_waited_for: by everybody, so that it has to be short.
        """
        self._is_waited_for = is_waited_for
        self.left = MAX_WAITING_UNITS if is_waited_for else MAX_UNITS
        self.next_look = self.left - CHECK_EVERY
        """What is left when `look` is due."""
        self._end_s = time.thread_time() + MAX_CPU_S
        self._sizes: dict[int, tuple[Any, int]] = {}

    def spend(self, units: int) -> None:
        """Pay.

        Raises:
            TooMuchError: more than there is.
        """
        self.left -= units
        if self.left < self.next_look:
            self.look()

    def look(self) -> None:
        """See whether units and time are left."""
        if self.left < 0:
            if self._is_waited_for:
                raise TakesLongError
            raise TooMuchError(f"more than {MAX_UNITS // MADE:,} characters, or as much work")
        self.next_look = max(self.left - CHECK_EVERY, 0)
        if time.thread_time() > self._end_s:
            raise TooMuchError(f"more than {MAX_CPU_S:.0f} s of computing")

    def weigh(self, value: Any) -> int:
        """The size of a value as text, about: what holds another one twice has it twice."""
        if isinstance(value, str | bytes):
            return len(value)
        if isinstance(value, int):
            return 1 + value.bit_length() // 3
        if isinstance(value, Mapping):
            return self._weigh_once(value, lambda: (part for pair in value.items() for part in pair))
        if isinstance(value, list | tuple | Set | ValuesView):
            return self._weigh_once(value, lambda: value)
        if isinstance(value, range):
            return OBJECT * (len(value) + 1)
        if isinstance(value, Namespace):
            # It may hold itself, and change after it was weighed.
            raise TooMuchError("a namespace as a value")
        return ITEM

    def _weigh_once(self, value: Any, parts: Callable[[], Iterable[Any]]) -> int:
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        self.spend(OBJECT + 2 * NODE * (len(value) + 1))
        size, weigh = 2, self.weigh
        for part in parts():
            size += 4 + (len(part) if type(part) is str else weigh(part))
        # Not more than there is to spend: a sum that doubles again and again would itself become long.
        size = min(size, 2 * MAX_UNITS)
        # Kept as long as its id is, which would else name another value.
        self._sizes[id(value)] = value, size
        return size

    def worth(self, value: Any) -> int:
        """The size of an argument that may say how long something is to be."""
        if isinstance(value, int):
            return min(abs(value), 2 * MAX_UNITS)
        if isinstance(value, float):
            return int(min(abs(value), 2.0 * MAX_UNITS)) if value == value else 0
        if isinstance(value, tuple):
            return sum(map(self.worth, value)) + 2
        return self.weigh(value)

    def product(self, values: Iterable[Any]) -> int:
        """More than anything that is made of some values has."""
        units = 1
        for value in values:
            units = min(units * (self.worth(value) + 1), 2 * MAX_UNITS)
        return MADE * units

    def pay_replace(self, text: Any, old: Any = "", new: Any = "") -> None:
        """Pay for a text with one part put for another wherever it is."""
        if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
            grown = text.count(old) * len(new) if len(new) > len(old) else 0
            self.spend(CALL + MADE * (len(text) + grown))
        else:
            self.spend(self.product((text, old, new)))

    def pay_format(self, form: Any, sign: str, values: Iterable[Any]) -> None:
        """Pay for a text with places for values: no field is longer than its width, or than all values together."""
        self.spend(self.weigh(form))
        text = str(form)
        widths = [int(digits[:10]) for digits in re.findall(r"\d+", text)]
        each = max(widths, default=0) + sum(map(self.worth, values)) + ITEM
        self.spend(MADE * (len(text) + text.count(sign) * each))


class BoundedContext(Context):
    """What a template's code has at hand, its meter included."""

    meter: Meter

    def derived(self, locals: dict[str, Any] | None = None) -> Context:  # the base class calls it so
        """The context of a block."""
        context = super().derived(locals)
        assert isinstance(context, BoundedContext), "the environment makes no other"
        context.meter = self.meter
        return context


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox in which nothing is free of charge; its templates run by `render` alone."""

    context_class = BoundedContext
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in REMOVED_FILTERS:
            del self.filters[name]
        # The words it makes up depend on chance besides.
        del self.globals["lipsum"]
        self.filters = {name: self._charged_filter(name, run) for name, run in self.filters.items()}
        self.filters |= {STEPS: _steps, TEXT: _printed, READ: _read, SEARCHED: _searched, KEY: _key, CUT: _cut}
        tests: Mapping[str, Any] = self.tests
        self.tests = {name: run if name in SHALLOW_TESTS else self._charged_test(run) for name, run in tests.items()}

    def add_filter(self, name: str, run: Callable[..., Any]) -> None:
        """Give templates another filter, charged as one that reads its arguments and makes no more than that."""
        self.filters[name] = self._charged_filter(name, run, is_linear=True)

    def render(self, template: Template, *, is_waited_for: bool, **values: Any) -> str:
        """Render one of the environment's templates.

        Args:
            is_waited_for: by everybody, so that it has to be short.

        Raises:
            TooMuchError: it makes too much.
            TakesLongError: it may, and everybody waits for it.
            Exception: whatever the template's code raises.
        """
        context = template.new_context(values)
        assert isinstance(context, BoundedContext), "the environment makes no other"
        with nullcontext() if is_waited_for else ONE_AT_A_TIME:
            context.meter = Meter(is_waited_for=is_waited_for)
            return "".join(template.root_render_func(context))

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        return super()._generate(_Charging().visit(source), *arguments, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do an operation, paid for."""
        meter = _meter_of(context)
        if type(left) is str and type(right) is str and operator == "+":
            meter.spend(MADE * (len(left) + len(right)))
            return left + right
        if type(left) is int and type(right) is int and operator != "**" and -SMALL < left < SMALL > right > -SMALL:
            return self.binop_table[operator](left, right)
        if operator == "%" and isinstance(left, str | bytes):
            meter.pay_format(left, "%", right if isinstance(right, tuple) else (right,))
        elif isinstance(left, NUMBERS) and isinstance(right, NUMBERS):
            _check_integers(operator, left, right)
        else:
            pair = (left, right)
            sizes = [len(one) * (1 if isinstance(one, str) else ITEM) for one in pair if hasattr(one, "__len__")]
            times = max((meter.worth(one) for one in pair if isinstance(one, int)), default=1)
            meter.spend(MADE * (sum(sizes) * (times if operator == "*" else 1) + ITEM))
        return self.binop_table[operator](left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call something, paid for."""
        # Named as in the base class, for the names of keyword arguments are the template's.
        args = tuple(list(one) if type(one) is GeneratorType else one for one in args)
        if isinstance(__obj, LoopContext) and args:
            # A loop that calls itself, on what it is given.
            args = (_steps(__context, args[0], CALL), *args[1:])
        else:
            _pay_call(_meter_of(__context), __obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def _charged_filter(self, name: str, run: Callable[..., Any], *, is_linear: bool = False) -> Callable[..., Any]:
        wants, is_shallow = _wanted(self, run), name in SHALLOW_FILTERS
        is_linear = is_linear or name in LINEAR_FILTERS
        if is_shallow:

            def pay(meter: Meter, given: tuple[Any, ...]) -> None:  # noqa: ARG001
                meter.spend(NODE)
        elif name == "list":

            def pay(meter: Meter, given: tuple[Any, ...]) -> None:
                each = OBJECT if isinstance(given[0], str) else 1
                meter.spend(NODE + each * meter.weigh(given[0]))
        elif name in ("batch", "slice"):

            def pay(meter: Meter, given: tuple[Any, ...]) -> None:
                meter.spend(OBJECT * sum(map(meter.worth, given)) + NODE)
        elif name == "tojson":

            def pay(meter: Meter, given: tuple[Any, ...]) -> None:
                value, *options = given
                meter.spend(MADE * (meter.weigh(value) + ITEM) * (1 + sum(map(meter.worth, options))))
        elif is_linear:

            def pay(meter: Meter, given: tuple[Any, ...]) -> None:
                meter.spend(MADE * sum(map(meter.weigh, given)) + NODE)
        elif name in SORTING_FILTERS:

            def pay(meter: Meter, given: tuple[Any, ...]) -> None:
                meter.spend(LONGEST_SORT * sum(map(meter.weigh, given)) + NODE)
        elif name == "format":

            def pay(meter: Meter, given: tuple[Any, ...]) -> None:
                meter.pay_format(given[0], "%", given[1:])
        elif name == "replace":

            def pay(meter: Meter, given: tuple[Any, ...]) -> None:
                meter.pay_replace(*given[:3])
        elif name == "sum":

            def pay(meter: Meter, given: tuple[Any, ...]) -> None:
                meter.spend(meter.product((given[0], given[0])))
        else:

            def pay(meter: Meter, given: tuple[Any, ...]) -> None:
                meter.spend(meter.product(given))

        @pass_context
        @wraps(run)
        def charged(context: Context, *args: Any, **kwargs: Any) -> Any:
            meter = _meter_of(context)
            if len(args) == 1 and type(args[0]) is str and is_linear and not kwargs:
                meter.spend(MADE * len(args[0]) + NODE)
                return run(*wants(context), *args)
            if not is_shallow and GeneratorType in map(type, args):
                args = tuple(list(one) if type(one) is GeneratorType else one for one in args)
            pay(meter, (*args, *kwargs.values()) if kwargs else args)
            made = run(*wants(context), *args, **kwargs)
            return _counted(meter, made) if type(made) is GeneratorType else made

        return charged

    def _charged_test(self, run: Callable[..., Any]) -> Callable[..., Any]:
        wants = _wanted(self, run)

        @pass_context
        @wraps(run)
        def charged(context: Context, *args: Any) -> Any:
            meter = _meter_of(context)
            meter.spend(sum(map(meter.weigh, args)) + NODE)
            return run(*wants(context), *args)

        return charged


def _wanted(environment: BoundedEnvironment, run: Callable[..., Any]) -> Callable[[Context], tuple[Any, ...]]:
    """What a filter or test is to be given before its own arguments."""
    wants: dict[Any, Callable[[Context], tuple[Any, ...]]] = {
        None: lambda _: (),
        _PassArg.context: lambda context: (context,),
        _PassArg.eval_context: lambda context: (context.eval_ctx,),
        _PassArg.environment: lambda _: (environment,),
    }
    return wants[_PassArg.from_obj(run)]


def _meter_of(context: Context) -> Meter:
    meter: Meter = context.meter  # type: ignore[attr-defined]  # every context here is a `BoundedContext`
    return meter


# The filters that syntax trees are given. With the context they are not folded into constants, paid for once.


@pass_context
def _steps(context: Context, values: Any, units: int) -> Any:
    try:
        count = len(values)
    except TypeError:
        return _counted(_meter_of(context), values, units)
    _meter_of(context).spend((count + 1) * units)
    return values


def _counted(meter: Meter, values: Iterable[Any], units: int = OBJECT) -> Iterator[Any]:
    for value in values:
        meter.spend(units + (len(value) if type(value) is str else meter.weigh(value)))
        yield value


def _passing(factor: int, free: type | None = None) -> Callable[[Context, Any], Any]:
    """A filter that gives back what it is given, paid for by its size unless its type costs nothing there."""

    @pass_context
    def paid(context: Context, value: Any) -> Any:
        kind = type(value)
        if kind is not free:
            meter = _meter_of(context)
            meter.spend(factor * (len(value) if kind is str else meter.weigh(value)))
        return value

    return paid


_printed, _read = _passing(MADE), _passing(1)
_searched, _key = _passing(1, free=dict), _passing(1, free=int)


@pass_context
def _cut(context: Context, value: Any) -> Any:
    size = len(value) if hasattr(value, "__len__") else 0
    _meter_of(context).spend(size if isinstance(value, str) else ITEM * size)
    return value


def _pay_call(meter: Meter, called: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Pay for a call: methods by what is known of them, all else by what it is given."""
    # The sandbox puts a function of its own in front of `format`.
    method = getattr(called, "__wrapped__", called)
    owner = method.__self__ if type(method) is BuiltinMethodType else None
    given = (*args, *kwargs.values()) if kwargs else args
    if isinstance(owner, str | bytes):
        name = method.__name__
        if name in LINEAR_METHODS or (name in STRIPPING_METHODS and not given):
            meter.spend(CALL + MADE * (len(owner) + sum(map(meter.weigh, given))))
        elif name in ("split", "splitlines") or (name == "rsplit" and not given):
            meter.spend(CALL + MADE * len(owner) + OBJECT * _num_parts(owner, *args[:1]))
        elif name in ("encode", "decode"):
            # Some codecs take the square of the length.
            meter.spend(meter.product((owner, owner)))
        elif name in ("format", "format_map"):
            meter.pay_format(owner, "{", given)
        elif name == "replace":
            meter.pay_replace(owner, *args[:2])
        else:
            meter.spend(meter.product((owner, *given)))
    elif isinstance(owner, list | tuple | int | float) or (
        isinstance(owner, dict) and method.__name__ not in KEYED_METHODS
    ):
        meter.spend(meter.product((owner, *given)))
    else:
        meter.spend(CALL + sum(meter.weigh(one) for one in given if type(one) is not Namespace))


def _num_parts(text: str | bytes, separator: Any = None) -> int:
    """The most parts that a text can be split into."""
    if isinstance(separator, str) and isinstance(text, str) and separator:
        return text.count(separator) + 1
    return len(text) + 1


def _check_integers(sign: str, left: complex, right: complex) -> None:
    """See that a number made of two others has a size that can be computed with.

    Raises:
        TooMuchError: it hasn't.
    """
    if not isinstance(left, int) or not isinstance(right, int):
        return
    bits = left.bit_length() + right.bit_length()
    if sign == "**" and right > 0:
        bits = left.bit_length() * min(right, MAX_BITS + 1) if abs(left) > 1 else 1
    if bits > MAX_BITS:
        raise TooMuchError(f"an integer of more than {MAX_BITS} bits")


class _Charging(NodeTransformer):
    """Puts the filters that charge into a template's syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        units = _units_of(node)
        self.generic_visit(node)
        node.iter = _charge(node.iter, STEPS, nodes.Const(units))
        return self._entered(node, units) if node.recursive else node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._entered(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._entered(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._entered(node)

    def _entered(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block, units: int = 0) -> nodes.Node:
        if not units:
            units = _units_of(node)
            self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_charge(nodes.Const(()), STEPS, nodes.Const(units))))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [_unless_constant(one, TEXT) for one in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        self.generic_visit(node)
        node.nodes = [_charge(one, TEXT) for one in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        node.expr = _charge_side(sides[0], sides[1], node.ops[0].op)
        for place, operand in enumerate(node.ops):
            operand.expr = _charge_side(operand.expr, sides[place], operand.op, is_right=True)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _charge(node, CUT) if node.ctx == "load" else node
        node.arg = _unless_constant(node.arg, KEY)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        node.key = _unless_constant(node.key, KEY)
        return node


def _charge(node: Any, name: str, *arguments: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


def _charge_side(node: nodes.Expr, other: nodes.Expr, sign: str, *, is_right: bool = False) -> nodes.Expr:
    """One side of a comparison; beside a constant it costs no more than that is long."""
    if sign in ("in", "notin") and is_right:
        return node if _is_listed(node) else _charge(node, SEARCHED)
    return node if _is_plain(other) else _unless_constant(node, READ)


def _is_plain(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const | nodes.TemplateData)


def _is_listed(node: nodes.Node) -> bool:
    return _is_plain(node) or (isinstance(node, nodes.List | nodes.Tuple) and all(map(_is_plain, node.items)))


def _unless_constant(node: Any, name: str) -> Any:
    return node if _is_plain(node) else _charge(node, name)


def _units_of(node: nodes.Node) -> int:
    """What one turn through a body may take, all its branches and texts together."""
    text = sum(len(one.data) for one in node.find_all(nodes.TemplateData))
    return NODE * sum(1 for _ in node.find_all(nodes.Node)) + MADE * text
