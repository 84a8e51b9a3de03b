"""The sandbox of chat templates: jinja2's, with every operation that can grow or go on measured.

jinja2 keeps a template from reaching Python; it does not keep it from taking minutes or gigabytes. Here the parsed
template is rewritten so that each turn of a loop and each call is a step of the rendering's `RenderMeter`, and what
makes text or lists (operators, filters, methods, literals, slices) asks the meter first. The meter lies among the
variables, under a name that no template can spell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
from jinja2.visitor import NodeTransformer

from stageline.checkpoint.template_growth import FILTER_CHECKS, METHOD_CHECKS, check_format, check_printf
from stageline.checkpoint.template_meter import (
    ENTRY_CHARS,
    MAX_INTEGER_BITS,
    LimitReached,
    RenderLimits,
    RenderMeter,
    check_integer,
)

_METER = "the rendering's meter"
# Filters by names that no template can spell; the rewritten template uses them.
_STEP, _CONCAT, _LITERAL, _SLICE = "a step", "a concatenation", "a literal", "a slice"
# Slower than linear in C or Python code that cannot be stopped, and of no use in a prompt.
_FILTERS_LEFT_OUT = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_METHODS_LEFT_OUT = {"encode", "expandtabs", "format_map", "from_bytes", "maketrans", "to_bytes", "translate"}


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2's sandbox with a meter; templates made here are rendered by `render_bounded`."""

    intercepted_binops = frozenset({"+", "*", "/", "//", "%", "**"})

    def __init__(self, extra_filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(finalize=_finalize, **options)
        for name in _FILTERS_LEFT_OUT:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters.update(extra_filters)
        self.filters = {name: _metered_filter(name, function) for name, function in self.filters.items()}
        self.filters.update({_STEP: _step, _CONCAT: _concat, _LITERAL: _literal, _SLICE: _slice})

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        _Metering().visit(tree)
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _METHODS_LEFT_OUT and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        is_left_out = getattr(value, "__name__", None) in _METHODS_LEFT_OUT
        return None if is_left_out else super().wrap_str_format(value)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter_of(__context)
        meter.step()
        # A wrapped `str.format` keeps the method that it wraps.
        method = getattr(__obj, "__wrapped__", __obj)
        receiver = getattr(method, "__self__", None)
        if isinstance(receiver, str):
            if method.__name__ == "format":
                check_format(meter, receiver, args, kwargs)
            elif check := METHOD_CHECKS.get(method.__name__):
                args = check(meter, receiver, *args, **kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if __obj is dict:
            meter.text_size(result)
        meter.charge_result(result)
        return result

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter_of(context)
        meter.step()
        if operator == "+":
            meter.require(_num_chars(left) + _num_chars(right))
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    meter.require(_num_chars(sequence) * max(times, 0))
        elif operator == "%" and isinstance(left, str):
            check_printf(meter, left, right)
        elif operator == "**":
            _check_power(left, right)
        check_integer(left)
        check_integer(right)
        result = super().call_binop(context, operator, left, right)
        meter.charge(_num_chars(result))
        return result


def render_bounded(template: jinja2.Template, variables: Mapping[str, Any], limits: RenderLimits) -> str:
    """Raises: LimitReached; whatever else the template raises."""
    meter = RenderMeter(limits)
    context = template.new_context({**variables, _METER: meter})
    return meter.rendered(template.root_render_func(context))


def _meter_of(context: jinja2.runtime.Context) -> RenderMeter:
    meter = context.parent[_METER]
    assert isinstance(meter, RenderMeter)
    return meter


def _check_power(base: Any, exponent: Any) -> None:
    is_integer = isinstance(base, int) and isinstance(exponent, int)
    if is_integer and base.bit_length() * abs(exponent) > MAX_INTEGER_BITS:
        raise LimitReached(f"it calculated a power of more than {MAX_INTEGER_BITS} bits")


def _num_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return ENTRY_CHARS * len(value) if isinstance(value, list | tuple) else 0


class _Metering(NodeTransformer):
    """Rewrites a parsed template so that it steps and asks."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        return self._with_steps(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:
        return self._with_steps(node)

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.Node:
        return self._with_steps(node)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filtered(jinja2.nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Node:
        return self._literal(node, node.items)

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:
        return self._literal(node, node.items) if node.ctx == "load" else node

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Node:
        return self._literal(node, [pair.value for pair in node.items])

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _SLICE) if isinstance(node.arg, jinja2.nodes.Slice) else node

    def _with_steps(
        self, node: jinja2.nodes.For | jinja2.nodes.Macro | jinja2.nodes.CallBlock
    ) -> jinja2.nodes.Node:
        static_chars = sum(_static_chars(child) for child in node.body)
        self.generic_visit(node)
        step = _filtered(jinja2.nodes.Const(static_chars, lineno=node.lineno), _STEP)
        node.body.insert(0, jinja2.nodes.ExprStmt(step, lineno=node.lineno))
        return node

    def _literal(self, node: jinja2.nodes.Expr, entries: list[jinja2.nodes.Expr]) -> jinja2.nodes.Node:
        is_constant = all(isinstance(entry, jinja2.nodes.Const) for entry in entries)
        self.generic_visit(node)
        return node if is_constant else _filtered(node, _LITERAL)


def _filtered(node: jinja2.nodes.Expr, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _static_chars(node: jinja2.nodes.Node) -> int:
    """The template's own text in one turn; inner loops and macros count their own."""
    if isinstance(node, jinja2.nodes.TemplateData):
        return len(node.data)
    if isinstance(node, jinja2.nodes.For | jinja2.nodes.Macro | jinja2.nodes.CallBlock):
        return 0
    return sum(_static_chars(child) for child in node.iter_child_nodes())


@jinja2.pass_context
def _finalize(context: jinja2.runtime.Context, value: Any) -> Any:
    """Called with everything that is about to be written."""
    meter = _meter_of(context)
    meter.step()
    meter.charge(len(value) if isinstance(value, str) else meter.text_size(value))
    return value


@jinja2.pass_context
def _step(context: jinja2.runtime.Context, static_chars: int) -> None:
    _meter_of(context).step(static_chars)


@jinja2.pass_context
def _concat(context: jinja2.runtime.Context, parts: list[Any]) -> str:
    meter = _meter_of(context)
    meter.charge(sum(meter.text_size(part) for part in parts))
    return "".join(str(part) for part in parts)


@jinja2.pass_context
def _literal(context: jinja2.runtime.Context, value: Any) -> Any:
    """A list that holds another twice, and so on, has exponentially much text: comparing it would not come back."""
    _meter_of(context).text_size(value)
    return value


@jinja2.pass_context
def _slice(context: jinja2.runtime.Context, value: Any) -> Any:
    meter = _meter_of(context)
    meter.step()
    meter.charge(_num_chars(value))
    return value


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    check = FILTER_CHECKS.get(name)
    pass_arg = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @jinja2.pass_context
    def metered(context: jinja2.runtime.Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter_of(context)
        meter.step()
        if check is not None:
            value = check(meter, value, *args, **kwargs)
        if pass_arg is not None:
            first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
            args = (value, *args)
            value = first[pass_arg]
        result = function(value, *args, **kwargs)
        meter.charge_result(result)
        return result

    return metered
