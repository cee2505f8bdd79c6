"""What the expressions of a module's code are worth: the rules of `kinds`, applied to Python's syntax."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from colrow import rules
from colrow.families.proposal import kinds
from colrow.families.proposal.kinds import (
    BY_TOKEN,
    DROPOUT,
    FEATURES,
    HEADS,
    OTHER,
    OUT,
    PROBABILITIES,
    REST,
    SIZE,
    STREAM,
    Given,
    Kind,
    Role,
    Shape,
    Unclear,
    changed,
)
from colrow.families.proposal.trial import repeats_in_order

_LINEAR = (ast.Mult, ast.Div)
_EAGER = ("repeat_kv", "matmul", "transpose", "softmax", "to", "dropout", "contiguous", "tanh", "size", "float")
_DROPS = {
    FEATURES: rules.Drop(rules.FEATURES),
    PROBABILITIES: rules.Drop(rules.HEADS),
    OUT: rules.Drop(),
    STREAM: rules.Drop(),
}
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.FloorDiv, ast.MatMult)


@dataclass(frozen=True)
class Child:
    """A module that is called; "*" stands for the block in a loop."""

    name: str


@dataclass
class Reading:
    """What each dropout acts on, which numbers the code reads, which children it gives tensors to, what it returns."""

    drops: dict[str, rules.Drop] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)
    called: set[str] = field(default_factory=set)
    gives: Any = OTHER


def code_of(function: Callable[..., Any]) -> ast.FunctionDef:
    """The code of a function, without what decorators wrap around it."""
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise Unclear("its source cannot be read") from error
    if not isinstance(node, ast.FunctionDef):
        raise Unclear("its source is no function")
    return node


def dotted(node: ast.AST) -> str:
    """`a.b.c` as text; "" for anything else."""
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return node.id if isinstance(node, ast.Name) else ""


@dataclass
class Values:
    """What expressions are worth; names are looked up in `env`.

    Attributes:
        roles, numbers: as for `reading.follow`.
        model: whether it is the code around the blocks.
    """

    module: nn.Module
    roles: Mapping[str, Role]
    numbers: Mapping[str, Kind] | None
    env: dict[str, Any]
    model: bool = False
    reading: Reading = field(default_factory=Reading)

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=1):
                return Kind.ONE
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)):
                return REST
            case ast.Name():
                return self.env.get(node.id, Given(node.id) if self.model else OTHER)
            case ast.Attribute():
                return self.attribute(node)
            case ast.Tuple() | ast.List():
                return tuple(part for item in node.elts for part in self.element(item))
            case ast.BinOp() if isinstance(node.op, _ARITHMETIC):
                one, other = self.value(node.left), self.value(node.right)
                if STREAM in (one, other) and {*changed(one, other)} == {STREAM}:
                    return self.residual(node, one, other)
                if self.model and isinstance(node.op, ast.Add) and (isinstance(one, tuple) or isinstance(other, tuple)):
                    return OTHER  # all hidden states so far, and one more
                scales = isinstance(node.op, _LINEAR)
                return kinds.binary(one, other, matmul=isinstance(node.op, ast.MatMult), scales=scales)
            case ast.IfExp():
                return kinds.joined(self.value(node.body), self.value(node.orelse))
            case ast.Subscript():
                return self.subscript(node)
            case ast.Call():
                return self.call(node)
            case ast.UnaryOp(op=ast.USub()):
                return self.value(node.operand)
            case ast.BoolOp():
                inner = [self.value(part) for part in node.values]
            case ast.Compare() if all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
                inner = []
            case _:
                inner = [self.value(part) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)]
        if changed(*inner):
            raise Unclear(f"it has a step that is not followed ({ast.unparse(node)})")
        return OTHER

    def element(self, item: ast.expr) -> tuple[Any, ...]:
        value = self.value(item.value) if isinstance(item, ast.Starred) else self.value(item)
        return value if isinstance(item, ast.Starred) and isinstance(value, tuple) else (value,)

    def residual(self, node: ast.BinOp, one: Any, other: Any) -> Kind:
        """Token by token: outside attention and MLP two streams may be added, and one scaled."""
        plain = [v for v in (one, other) if v is not STREAM]
        inside = any(role.gives is OUT for role in self.roles.values())
        if inside or isinstance(node.op, ast.MatMult) or any(isinstance(v, Given | tuple) for v in plain):
            raise Unclear(f"it computes with the stream itself ({ast.unparse(node)})")
        return STREAM

    def attribute(self, node: ast.Attribute) -> Any:
        name = dotted(node).removeprefix("self.")
        if dotted(node) != f"self.{name}":
            base = self.value(node.value)
            if node.attr == "shape" and base in (STREAM, FEATURES, HEADS, BY_TOKEN):
                return Shape(base)
            if changed(base) and node.attr not in ("dtype", "device"):
                raise Unclear(f"it uses .{node.attr} of {kinds.named(base)}")
            return base if isinstance(base, Given) else OTHER
        value: Any = self.module
        try:
            for part in name.split("."):
                value = getattr(value, part, None)
        except RuntimeError as error:  # so transformers says that a number is not the same in all layers
            raise Unclear(f"it reads '{name}', which differs between layers") from error
        if isinstance(value, nn.Module):
            return Child(name)
        if isinstance(value, Tensor):
            if isinstance(value, nn.Parameter) or not (value.dim() == 2 or (value.dim() == 4 and value.shape[1] == 1)):
                raise Unclear(f"it uses the tensor '{name}'")
            return Given(name)
        if isinstance(value, int) and not isinstance(value, bool) and self.numbers is not None:
            if name not in self.numbers:
                raise Unclear(f"it reads '{name}', which is {value}, and whether a split changes that is not known")
            self.reading.reads.add(name)
            return self.numbers[name]
        return OTHER

    def subscript(self, node: ast.Subscript) -> Any:
        base = self.value(node.value)
        number = _number(node.slice)
        if isinstance(base, Shape):
            if number is not None:
                return kinds.dimension(base.of, number)
            if ast.unparse(node.slice) == ":-1" and base.of in (STREAM, FEATURES):
                return (SIZE,)
            raise Unclear(f"it reads a shape ({ast.unparse(node)})")
        if isinstance(base, tuple) and number is not None and -len(base) <= number < len(base):
            return base[number]
        if base in (HEADS, BY_TOKEN) and isinstance(node.slice, ast.Tuple) and len(node.slice.elts) == 2:
            first, last = node.slice.elts
            if isinstance(first, ast.Constant) and first.value is Ellipsis and isinstance(last, ast.Slice):
                return base
        if changed(base):
            raise Unclear(f"it takes {kinds.named(base)} apart ({ast.unparse(node)})")
        return base if isinstance(base, Given) else OTHER

    def call(self, node: ast.Call) -> Any:
        keywords = [word for word in node.keywords if word.arg is not None]
        args = [part for arg in node.args for part in self.element(arg)] + [self.value(word.value) for word in keywords]
        numbers = [_number(arg) for arg in node.args] + [_number(w.value) for w in keywords if w.arg == "dim"]
        name = dotted(node.func)
        if isinstance(node.func, ast.Name) and name in self.env:
            target: Any = self.env[name]
        elif isinstance(node.func, ast.Attribute):
            target = self.value(node.func) if name.startswith("self.") and name.count(".") == 1 else None
        else:
            target = None
        if isinstance(target, Child):
            return self.child(target.name, node, args)
        short = name.rpartition(".")[2] or getattr(node.func, "attr", "")
        if isinstance(node.func, ast.Name) or name.split(".")[0] in ("torch", "nn", "F") or name.startswith("self."):
            if any(isinstance(arg, ast.Name) and arg.id == "self" for arg in node.args):
                self.passed_on(short)
            if short == "dropout" and FEATURES in args and self.numbers is not None:
                raise Unclear("it drops features in attention")
            if name.startswith("self.") and changed(*args):
                raise Unclear(f"it calls {name}")
            if isinstance(node.func, ast.Name):
                self.known_function(name, args)
            return kinds.function(short, args, numbers)
        if not isinstance(node.func, ast.Attribute):
            raise Unclear(f"it has a call that is not followed ({ast.unparse(node.func)})")
        return kinds.method(self.value(node.func.value), short, args, numbers)

    def known_function(self, name: str, args: list[Any]) -> None:
        """A function called by its bare name may be anybody's: what it is named after must be what it is."""
        function = inspect.unwrap(type(self.module).forward).__globals__.get(name)
        if not changed(*args) or function is None:
            return
        home = str(getattr(function, "__module__", None)).split(".")[0]
        if name == "repeat_kv" and not repeats_in_order(function):
            raise Unclear("its repeat_kv does not repeat heads one by one")
        if home not in ("None", "torch", "transformers") and not name.startswith(("repeat_kv", "apply_rotary")):
            raise Unclear(f"it calls {name}, which is not torch's")

    def child(self, name: str, node: ast.Call, args: list[Any]) -> Any:
        role, tensors = self.roles.get(name), changed(*args)
        if role is None:
            if tensors:
                raise Unclear(f"it calls '{name}', which is not known, with {kinds.named(tensors[0])}")
            return OTHER
        first = args[0] if node.args or name == "*" else self._by_name(name, node)
        opens = name == "*" and not tensors  # the first block is given whole activations
        if not opens and (tensors != [first] or first not in role.takes):
            raise Unclear(f"it calls '{name}' with {kinds.named(tensors[0] if tensors else first)}")
        if role is DROPOUT and first is FEATURES and self.numbers is not None:
            raise Unclear(f"it uses the dropout '{name}' on features in attention")
        if role is DROPOUT and self.reading.drops.setdefault(name, _DROPS[first]) != _DROPS[first]:
            raise Unclear(f"it uses the dropout '{name}' in several places")
        self.reading.called.add(name)
        return first if role.gives is None else role.gives

    def _by_name(self, name: str, node: ast.Call) -> Any:
        """What a child is given as its first argument, by name."""
        first = list(inspect.signature(type(self.module.get_submodule(name)).forward).parameters)[1:2]
        return next((self.value(word.value) for word in node.keywords if word.arg in first), OTHER)

    def passed_on(self, name: str) -> None:
        """Hugging Face's attention functions are handed the module: what they read of it counts as well."""
        if name not in kinds.ATTENDS:
            raise Unclear(f"it hands itself to {name}")
        if hasattr(self.module, "num_key_value_groups"):
            self.attribute(ast.Attribute(ast.Name("self"), "num_key_value_groups"))
        eager = inspect.unwrap(type(self.module).forward).__globals__.get("eager_attention_forward")
        if eager is None:
            return
        code = code_of(eager)
        for node in ast.walk(code):
            if isinstance(node, ast.Attribute) and dotted(node.value) == code.args.args[0].arg:
                self.attribute(ast.Attribute(ast.Name("self"), node.attr))
            called = (
                (dotted(node.func).rpartition(".")[2] or getattr(node.func, "attr", ""))
                if isinstance(node, ast.Call)
                else ""
            )
            if called == "repeat_kv" and not repeats_in_order(eager.__globals__[called]):
                raise Unclear("its repeat_kv does not repeat heads one by one")
            if called and called not in _EAGER:
                raise Unclear(f"its eager attention calls {called}")


def _number(node: ast.expr) -> int | None:
    """An integer that is written out."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None
