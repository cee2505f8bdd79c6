"""A plan for a model of no known family: proposed from its structure, held against its code, and doubted.

Sizes and names say what a layer may be, with Hugging Face's own plan, where there is one, as a second witness. The code
of attention, MLP, block and model must then be known to be right when it is split (`reading`). What is not certain
becomes a doubt, and a proposal with doubts is for the user to settle, never to be used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from colrow import rules
from colrow.families.proposal import kinds
from colrow.families.proposal.kinds import FEATURES, OUT, STREAM, Role, Unclear, changed, flat
from colrow.families.proposal.parts import (
    HEAD_NAMES,
    Numbers,
    attention_rule,
    column_or_row,
    elementwise,
    is_norm,
    linear_sizes,
    meanings,
    numbers_of,
    projection,
    returned,
    role_of,
)
from colrow.families.proposal.reading import follow, follow_loop
from colrow.families.proposal.translate import COLUMN, UNKNOWN, rule_source, styles, written
from colrow.rules import Plan, Rule


@dataclass(frozen=True)
class Doubt:
    """Something about a model that is not certain.

    Attributes:
        name: the part of the model that it is about, "" for the whole; `*` stands for the number of the block.
        why: in a few words.
        rules: what one could write there, as Python.
    """

    name: str
    why: str
    rules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proposal:
    """A plan, what is doubtful about it, and where it comes from."""

    plan: Plan
    doubts: tuple[Doubt, ...]
    source: str

    def __str__(self) -> str:
        """The plan as Python, with its doubts as comments."""
        comments: list[str] = []
        for doubt in self.doubts:
            comments += [
                f"{doubt.name or 'the model'}: {doubt.why}",
                *(f'"{doubt.name}": {text}' for text in doubt.rules),
            ]
        return written(dict(self.plan.layers[0]), comments)


def propose(model: nn.Module, given: Plan | None = None) -> Proposal:
    """A plan for the parts of `model` that `given` does not name, with what is not certain about it. Changes nothing.

    Raises:
        PlanError: a pattern of `given` fits nothing.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    named = given.match(modules, dict(model.named_parameters(remove_duplicate=False))) if given is not None else {}
    return _Proposer(model, numbers_of(getattr(model, "config", None)), styles(model), modules, named).propose()


@dataclass
class _Proposer:
    model: nn.Module
    numbers: Numbers
    styles: Mapping[str, str]
    modules: Mapping[str, nn.Module]
    given: Mapping[str, Rule]
    found: dict[str, Rule] = field(default_factory=dict)
    doubts: dict[str, Doubt] = field(default_factory=dict)
    layers: str = ""

    def propose(self) -> Proposal:
        if not hasattr(self.model, "config"):
            self.doubt("", "it has no config that says how many heads it has")
        lists = [name for name, module in self.modules.items() if self.is_stack(module)]
        lists = [name for name in lists if not any(name.startswith(f"{outer}.") for outer in lists)]
        if len(lists) == 1:
            (self.layers,) = lists
            gives = {self.block(name) for name in self.blocks()}
            self.around(gives)
            for name in self.modules:
                self.outside(name)
        else:
            self.doubt(
                "", f"several lists may be its blocks: {', '.join(lists)}" if lists else "it has no list of blocks"
            )
        for name, style in self.styles.items():
            if style == UNKNOWN:
                self.doubt(name, "Hugging Face's plan has a style for it that has no counterpart here")
        known = COLUMN in self.styles.values()
        source = "Hugging Face's own plan" if known else "its structure"
        return Proposal(Plan(self.patterns()), tuple(self.doubts.values()), source)

    def is_stack(self, module: nn.Module) -> bool:
        """A list of equal modules, each with several linear layers."""
        if not isinstance(module, nn.ModuleList) or len({type(item) for item in module}) != 1:
            return False
        return all(sum(linear_sizes(part) is not None for part in item.modules()) > 1 for item in module)

    def blocks(self) -> list[str]:
        return [name for name in self.modules if name.rpartition(".")[0] == self.layers and name != self.layers]

    def doubt(self, name: str, why: str, *texts: str) -> None:
        """Note a doubt, once for all blocks; one about a part that the user's plan names is settled."""
        if name not in self.given:
            pattern = self.pattern(name)
            self.doubts.setdefault(pattern, Doubt(pattern, why, texts))

    def pattern(self, name: str) -> str:
        return re.sub(rf"\A{re.escape(self.layers)}\.\d+(?=\.|\Z)", f"{self.layers}.*", name) if self.layers else name

    def patterns(self) -> dict[str, Rule]:
        """The rules found, those of all blocks under one pattern where they agree."""
        groups: dict[str, dict[str, Rule]] = {}
        order = {name: place for place, name in enumerate(self.modules)}
        for name, rule in sorted(self.found.items(), key=lambda item: order[item[0]]):
            groups.setdefault(self.pattern(name), {})[name] = rule
        listed: dict[str, Rule] = {}
        for pattern, members in groups.items():
            hits = {name for name in self.modules if self.pattern(name) == pattern}
            if pattern in self.doubts:
                continue
            same = len(set(members.values())) == 1 and hits - {*self.given} <= {*members}
            listed |= {pattern: next(iter(members.values()))} if same else members
        return listed

    def rule(self, name: str, rule: Rule) -> None:
        if name not in self.given:
            self.found[name] = rule

    def block(self, name: str) -> Any:
        """A block: what it gives when it is called."""
        module, roles = self.modules[name], dict[str, Role]()
        self.rule(name, rules.Block())
        for short, child in module.named_children():
            role = self.part(f"{name}.{short}", child)
            roles |= {short: role} if role is not None else {}
        for short, _ in module.named_parameters(recurse=False):
            self.doubt(name, f"a parameter of its own, '{short}'", "Block(),")
        try:
            reading = follow(module, roles)
            first, *others = flat(reading.gives)
            if first is not STREAM or STREAM in others:
                raise Unclear(f"it returns {kinds.named(reading.gives)}")
        except Unclear as unclear:
            self.doubt(name, f"in {type(module).__name__} {unclear}", "Block(),")
            return returned(module)
        return reading.gives

    def part(self, name: str, module: nn.Module) -> Role | None:
        """A child of a block."""
        if name in self.given and isinstance(self.given[name], rules.Attention | rules.Mlp | rules.Moe):
            self.region(name, module)
            return Role((STREAM,), returned(module))
        if isinstance(module, nn.Dropout):
            return kinds.DROPOUT
        if is_norm(module, self.numbers.hidden) or isinstance(module, nn.Identity):
            if not isinstance(module, nn.Identity):
                self.rule(name, rules.Norm())
            return kinds.TOKENWISE
        if not any(True for _ in module.parameters()):
            return None
        if not any(linear_sizes(child) for child in module.children()):
            self.unknown(name, module)
            return None
        gives = self.region(name, module)
        return Role((STREAM,), gives)

    def unknown(self, name: str, module: nn.Module) -> None:
        """A doubt about every part that holds parameters and is not named."""
        for short, part in module.named_modules():
            full = f"{name}.{short}" if short else name
            if any(True for _ in part.parameters(recurse=False)):
                self.doubt(full, f"what {type(part).__name__} does is not known", "Replicated(),")

    def region(self, name: str, module: nn.Module) -> Any:
        """Attention or an MLP: what it gives when it is called."""
        children = {short: linear_sizes(child) for short, child in module.named_children()}
        linear = {short: sizes for short, sizes in children.items() if sizes}
        attends = any(projection(short, out, False, self.numbers) for short, (_, out) in linear.items())
        attends = attends or "attn" in name.rpartition(".")[2] or "attention" in type(module).__name__.lower()
        roles, before = dict[str, Role](), len(self.doubts)
        said = {short: self.styles.get(f"{name}.{short}", "") for short in linear}
        for short in linear:
            full = f"{name}.{short}"
            try:
                rule = self.given.get(full) or column_or_row(short, linear, said, attends, self.numbers)
                roles |= {short: role_of(rule)}
                self.rule(full, rule)
            except Unclear as unclear:
                self.doubt(full, str(unclear), *unclear.rules)
        for short, child in module.named_children():
            if short not in linear:
                roles |= self.beside(f"{name}.{short}", child, attends)
        for short, _ in module.named_parameters(recurse=False):
            self.doubt(name, f"a parameter of its own, '{short}'")
        text = f"{rule_source(attention_rule(module, (), self.numbers) if attends else rules.Mlp())},"
        if len(self.doubts) > before:
            self.doubt(name, f"parts of {type(module).__name__} are doubtful, so its code was not followed", text)
            return self.not_followed(name, module, roles)
        try:
            reading = follow(module, roles, meanings(module, self.numbers) if attends else None)
            first, *others = flat(reading.gives)
            if first is not OUT or {STREAM, FEATURES, OUT} & {*others}:
                raise Unclear(f"it returns {kinds.named(reading.gives)}")
            self.rule(name, attention_rule(module, reading.reads, self.numbers) if attends else rules.Mlp())
        except Unclear as unclear:
            self.doubt(name, f"in {type(module).__name__} {unclear}", text)
            return self.not_followed(name, module, roles)
        for short, drop in reading.drops.items():
            self.rule(f"{name}.{short}", drop)
        return (STREAM, *others) if isinstance(reading.gives, tuple) else STREAM

    def not_followed(self, name: str, module: nn.Module, roles: Mapping[str, Role]) -> Any:
        """A region whose code does not bear out what its fused layers are made of."""
        for short, role in roles.items():
            if role is kinds.FUSED_COLUMN and self.found.pop(f"{name}.{short}", None):
                text = "Column(FEATURES, FEATURES),  # if it is [gate | up]"
                self.doubt(f"{name}.{short}", "a fused layer, whose order cannot be known", text)
        return returned(module)

    def beside(self, name: str, module: nn.Module, attends: bool) -> dict[str, Role]:
        """A part of attention or an MLP that is no linear layer."""
        short = name.rpartition(".")[2]
        if isinstance(module, nn.Dropout):
            return {short: kinds.DROPOUT}
        if elementwise(module):
            return {short: kinds.ELEMENTWISE}
        if attends and is_norm(module, self.numbers.head_dim):
            self.rule(name, rules.Norm())
            return {short: kinds.HEAD_NORM}
        self.unknown(name, module)
        return {}

    def around(self, gives: set[Any]) -> None:
        """The code around the blocks, and the norm after the last one."""
        owner, _, short = self.layers.rpartition(".")
        module, at = self.modules[owner], f"{owner}." if owner else ""
        norms = {child for child, m in module.named_children() if is_norm(m, self.numbers.hidden)}
        first = self.blocks()[0]
        if len(gives) > 1:
            self.doubt(first, "its blocks return different things", "Block(),")
            return
        try:
            reading = follow_loop(module, short, dict.fromkeys(norms, kinds.CLOSES), Role((STREAM,), *gives))
            if changed(reading.gives):
                raise Unclear("no norm follows the last block")
        except Unclear as unclear:
            self.doubt(first, f"in {type(module).__name__} {unclear}", "Block(),")
            for child in norms - {*self.given}:
                self.doubt(f"{at}{child}", "it may be the norm after the last block", "LastNorm(),")
            return
        for child in reading.called - {"*"}:
            self.rule(f"{at}{child}", rules.LastNorm())

    def outside(self, name: str) -> None:
        """A module that is in no block: whole, unless it is of the vocabulary's size."""
        module, n = self.modules[name], self.numbers
        own = [short for short, _ in module.named_parameters(recurse=False)]
        inside = bool(self.layers) and name.startswith(f"{self.layers}.")
        if inside or not own or name in self.given or name in self.found or self.pattern(name) in self.doubts:
            return
        sizes = linear_sizes(module)
        if isinstance(module, nn.Embedding):
            self.rule(name, rules.Vocab() if module.num_embeddings == n.vocab else rules.Replicated())
        elif sizes is not None:
            head = sizes[1] == n.vocab and name.rpartition(".")[2] in HEAD_NAMES
            self.rule(name, rules.Head() if head else rules.Replicated())
        elif is_norm(module, n.hidden):
            self.rule(name, rules.Norm())
        elif type(module).__module__.startswith("torch.nn."):
            self.rule(name, rules.Replicated())
        else:
            self.doubt(name, f"what {type(module).__name__} does is not known", "Replicated(),")
