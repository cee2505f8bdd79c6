"""Reads a module's `forward`, and follows what a split would make of its tensors (see `kinds`)."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from colrow.families.proposal import kinds
from colrow.families.proposal.kinds import OTHER, STREAM, Given, Kind, Role, Shape, Unclear, changed
from colrow.families.proposal.values import Child, Reading, Values, code_of, dotted

_DECORATORS = ("deprecate_kwarg", "auto_docstring", "override")


def follow(module: nn.Module, roles: Mapping[str, Role], numbers: Mapping[str, Kind] | None = None) -> Reading:
    """Follow a module's `forward` from its first argument, the stream, to what it returns.

    Arguments:
        roles: of the children that it may call with the stream or with what comes of it.
        numbers: in attention, what integers mean, by the attributes that hold them ("config.x" for the config's x).

    Raises:
        Unclear: a step that is not known to be right.
    """
    if "forward" in vars(module):
        raise Unclear("its forward was replaced")
    code = code_of(type(module).forward)
    strange = {dotted(d.func if isinstance(d, ast.Call) else d).split(".")[-1] for d in code.decorator_list}
    if strange - {*_DECORATORS}:
        raise Unclear(f"its forward is decorated with {min(strange - {*_DECORATORS})}")
    names = [arg.arg for arg in [*code.args.posonlyargs, *code.args.args]]
    if len(names) < 2:
        raise Unclear("its forward takes no input")
    beside = [*names[2:], *(arg.arg for arg in code.args.kwonlyargs)]
    reader = _Reader(module, roles, numbers, {name: Given(name) for name in beside} | {names[1]: STREAM})
    return reader.run(code.body)


def follow_loop(model: nn.Module, blocks: str, roles: Mapping[str, Role], block: Role) -> Reading:
    """Follow a model's `forward` from its loop over the list `blocks` to its end."""
    code = code_of(type(model).forward)
    for place, node in enumerate(code.body):
        if not isinstance(node, ast.For) or f"self.{blocks}" not in ast.unparse(node.iter) or node.orelse:
            continue
        over, target = node.iter, node.target
        if isinstance(over, ast.Call) and dotted(over.func) == "enumerate" and isinstance(target, ast.Tuple):
            over, target = over.args[0], target.elts[1]
        over = over.value if isinstance(over, ast.Subscript) and isinstance(over.slice, ast.Slice) else over
        if dotted(over) == f"self.{blocks}" and isinstance(target, ast.Name):
            reader = _Reader(model, {**roles, "*": block}, None, {target.id: Child("*")}, model=True)
            reading = reader.run([*node.body, *node.body, *code.body[place + 1 :]])  # twice: what the first pass left
            used = {dotted(part) for other in code.body if other is not node for part in ast.walk(other)}
            before = {dotted(part) for other in code.body[:place] for part in ast.walk(other)}
            twice = [at for at in reading.called - {"*"} if f"self.{at}" in before] or [blocks] * (
                f"self.{blocks}" in used
            )
            if twice:
                raise Unclear(f"it uses {twice[0]} around the blocks as well")
            return reading
    raise Unclear(f"its forward has no plain loop over self.{blocks}")


@dataclass
class _Reader(Values):
    """Follows statements, one after the other, and both ways of a branch."""

    returns: list[Any] = field(default_factory=list)

    def run(self, body: list[ast.stmt]) -> Reading:
        self.execute(body)
        if not self.returns:
            raise Unclear("it returns nothing")
        gives = self.returns[0]
        for other in self.returns[1:]:
            gives = kinds.joined(gives, other)
        self.reading.gives = gives
        return self.reading

    def execute(self, body: list[ast.stmt]) -> bool:
        """Whether the code goes on after these statements."""
        return all(self.statement(node) for node in body)

    def statement(self, node: ast.stmt) -> bool:
        match node:
            case ast.Assign(targets=[target]):
                self.assign(target, self.value(node.value))
            case ast.AnnAssign(value=ast.expr() as value):
                self.assign(node.target, self.value(value))
            case ast.AugAssign():
                self.assign(node.target, self.value(ast.BinOp(node.target, node.op, node.value)))
            case ast.Expr():
                self.value(node.value)
            case ast.Return():
                self.returns.append(OTHER if node.value is None else self.value(node.value))
                return False
            case ast.Raise():
                return False
            case ast.If():
                return self.branch(node)
            case ast.Pass() | ast.Assert():
                pass
            case _:
                raise Unclear(f"it has a statement that is not followed ({type(node).__name__.lower()})")
        return True

    def branch(self, node: ast.If) -> bool:
        known = self.static(node.test)
        if known is not None:
            return self.execute(node.body if known else node.orelse)
        self.value(node.test)
        before = dict(self.env)
        first_goes_on = self.execute(node.body)
        first, self.env = self.env, before
        second_goes_on = self.execute(node.orelse)
        if first_goes_on and second_goes_on:
            names = {*first, *self.env}
            self.env = {name: kinds.joined(first.get(name, OTHER), self.env.get(name, OTHER)) for name in names}
        elif first_goes_on:
            self.env = first
        return first_goes_on or second_goes_on

    def static(self, test: ast.expr) -> bool | None:
        """A test that this module has settled: an attribute that is a bool or None."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.static(test.operand)
            return None if inner is None else not inner
        negated = False
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot) and len(test.ops) == 1:
            right = test.comparators[0]
            negated = isinstance(test.ops[0], ast.IsNot)
            if not (isinstance(right, ast.Constant) and right.value is None):
                return None
            name = self.own(test.left)
            return None if name is None else (getattr(self.module, name) is None) != negated
        name = self.own(test)
        value = None if name is None else getattr(self.module, name)
        return value if isinstance(value, bool) else None

    def own(self, node: ast.expr) -> str | None:
        """The name of an attribute of the module that does not change between calls."""
        name = dotted(node).removeprefix("self.")
        known = dotted(node) == f"self.{name}" and "." not in name and hasattr(self.module, name)
        return name if known and name != "training" and "checkpoint" not in name else None

    def assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name():
                self.env[target.id] = value
            case ast.Tuple():
                if isinstance(value, Shape):
                    value = tuple(kinds.dimension(value.of, i) for i in range(len(target.elts)))
                parts = value if isinstance(value, tuple) else (value,) * len(target.elts)
                if len(parts) != len(target.elts) or (changed(value) and not isinstance(value, tuple)):
                    raise Unclear(f"it takes {kinds.named(value)} apart")
                for element, part in zip(target.elts, parts, strict=True):
                    self.assign(element, part)
            case ast.Subscript() | ast.Attribute() if not changed(self.value(target.value)) and (
                self.model or not changed(value)
            ):
                pass
            case _:
                raise Unclear(f"it writes into a tensor ({ast.unparse(target)})")
