"""What the parts of a model are called and how they are shaped: the names that the field has for them."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from colrow.families.proposal import kinds
from colrow.families.proposal.kinds import COUNT, HEAD_DIM, OTHER, SIZE, STREAM, Kind, Role, Unclear
from colrow.families.proposal.translate import COLUMN, ROW
from colrow.families.proposal.trial import works_by_vector
from colrow.families.proposal.values import code_of
from colrow.rules import FEATURES, GROUPS, HEADS, KV_HEADS, Attention, Column, Row, Rule, Unit

_NAMES: Final = {
    "heads": ("num_heads", "n_heads", "num_attention_heads", "n_head", "heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads"),
    "groups": ("num_key_value_groups", "n_rep"),
    "width": ("all_head_size", "split_size", "inner_dim"),
    "head_dim": ("head_dim", "attention_head_size", "head_size", "d_head"),
}
"""Attributes of attention, and values of a config, by what they mean."""
_SAME = (
    "layer_idx",
    "layer_id",
    "layer_number",
    "use_rope",
    "sliding_window",
    "rotary_ndims",
    "rotary_dim",
    "window_size",
)
"""Integers that attention reads and a split does not change."""
_PROJECTIONS: Final = {
    **dict.fromkeys(("q_proj", "query", "q", "wq", "q_lin", "to_q", "query_proj"), HEADS),
    **dict.fromkeys(("k_proj", "key", "k", "wk", "k_lin", "to_k", "key_proj"), KV_HEADS),
    **dict.fromkeys(("v_proj", "value", "v", "wv", "v_lin", "to_v", "value_proj"), KV_HEADS),
}
OUTPUTS: Final = ("o_proj", "out_proj", "dense", "wo", "o", "out", "out_lin", "c_proj", "proj", "to_out")
_FUSED = (
    "Column(HEADS, KV_HEADS, KV_HEADS),  # if it is [q | k | v]",
    "Column(GROUPS),  # if it is [q .. k v | q .. k v]",
)
HEAD_NAMES: Final = ("lm_head", "embed_out", "output", "head", "unembed")
_NOT_ELEMENTWISE = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.MultiheadAttention, nn.RReLU)


@dataclass(frozen=True)
class Numbers:
    """The sizes that a config names; None: it does not."""

    hidden: int | None
    vocab: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None


def numbers_of(config: Any) -> Numbers:
    """The sizes of a model."""

    def first(names: Collection[str]) -> int | None:
        values = [read(config, name) for name in names]
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)

    hidden, heads = first(("hidden_size", "n_embd", "d_model", "dim", "hidden_dim")), first(_NAMES["heads"])
    head_dim = first(_NAMES["head_dim"]) or (hidden // heads if hidden and heads else None)
    return Numbers(hidden, first(("vocab_size",)), heads, first(_NAMES["kv_heads"]) or heads, head_dim)


def read(owner: Any, name: str) -> Any:
    """An attribute; None where there is none, or not one for all layers, which a config of transformers may say."""
    try:
        return getattr(owner, name, None)
    except RuntimeError:
        return None


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear layer, None for another module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        taken, given = module.get_parameter("weight").shape
        return taken, given
    return None


def is_norm(module: nn.Module, size: int | None) -> bool:
    """A norm of one vector of this size at a time, with or without weights."""
    known = "Norm" in type(module).__name__ and all(param.shape == (size,) for param in module.parameters())
    return known and size is not None and works_by_vector(module, size)


def elementwise(module: nn.Module) -> bool:
    """An activation function without parameters."""
    home = type(module).__module__
    known = home in ("torch.nn.modules.activation", "transformers.activations")
    return known and not isinstance(module, _NOT_ELEMENTWISE) and not any(True for _ in module.parameters())


def projection(name: str, outputs: int, column: bool, n: Numbers) -> Unit | None:
    """What the outputs of a layer of attention are made of: by its name, or by its size if it is known to be a column
    layer. None: it is no projection, or its size does not fit."""
    sizes = {HEADS: (n.heads or 0) * (n.head_dim or 0), KV_HEADS: (n.kv_heads or 0) * (n.head_dim or 0)}
    if name in _PROJECTIONS:
        return _PROJECTIONS[name] if sizes[_PROJECTIONS[name]] == outputs else None
    return next((unit for unit, size in sizes.items() if column and size == outputs), None)


def column_or_row(
    name: str, linear: Mapping[str, tuple[int, int]], styles: Mapping[str, str], attends: bool, n: Numbers
) -> Column | Row:
    """What a linear layer of attention or of an MLP is.

    Arguments:
        linear: (inputs, outputs) of all linear layers beside it, by name.
        styles: what Hugging Face's plan says of them.

    Raises:
        Unclear: neither its name and size nor that plan say it, or they contradict each other.
    """
    (taken, given), style = linear[name], styles[name]
    if attends and n.heads and n.kv_heads and n.head_dim:
        width = n.heads * n.head_dim
        unit = projection(name, given, style == COLUMN, n)
        if unit is not None and taken == n.hidden and style != ROW:
            return Column(unit)
        if (name in OUTPUTS or style == ROW) and (taken, given) == (width, n.hidden) and style != COLUMN:
            return Row(HEADS)
        if given > width and (given - width) % (2 * n.head_dim) == 0:
            raise Unclear(f"a fused projection to {given} features, whose order cannot be known", *_FUSED)
    downs = [at for at, (i, o) in linear.items() if o == n.hidden and (i != n.hidden or styles[at] == ROW)]
    if not attends and len(downs) == 1:
        size = linear[downs[0]][0]
        if name in downs and style != COLUMN:
            return Row()
        if taken == n.hidden and given == size and style != ROW:
            return Column()
        if taken == n.hidden and given == 2 * size and style != ROW:  # and the code must take it apart in halves
            return Column(FEATURES, FEATURES)
    raise Unclear(f"a linear layer from {taken} to {given} features that is not recognised", "Column(),  # or Row()")


def role_of(rule: Rule) -> Role:
    """What a linear layer with this rule does in the code that calls it."""
    match rule:
        case Row():
            return kinds.ROW
        case Column():
            return kinds.COLUMN if len(rule.units) == 1 and GROUPS not in rule.units else kinds.FUSED_COLUMN
        case _:
            raise Unclear(f"{rule} for a linear layer in attention or an MLP")


def meanings(module: nn.Module, n: Numbers) -> dict[str, Kind]:
    """What the integers of an attention module mean to a split, by attribute ("config.x": in its config)."""
    known: dict[str, Kind] = {}
    if not (n.heads and n.kv_heads and n.head_dim):
        return known
    groups, width = n.heads // n.kv_heads, n.heads * n.head_dim
    values = {"heads": n.heads, "kv_heads": n.kv_heads, "groups": groups, "width": width, "head_dim": n.head_dim}
    for at, owner in (("", module), ("config.", getattr(module, "config", None))):
        for role, names in _NAMES.items():
            kind = HEAD_DIM if role == "head_dim" else COUNT
            if not at or role in ("heads", "kv_heads", "head_dim"):
                known |= {f"{at}{name}": kind for name in names if read(owner, name) == values[role]}
        known |= {f"{at}{name}": SIZE for name in _SAME}
    return known


def attention_rule(module: nn.Module, reads: Collection[str], n: Numbers) -> Attention:
    """The rule that has the attributes which the code reads.

    Raises:
        Unclear: it reads one number from two attributes.
    """
    named: dict[str, Any] = {}
    config: list[tuple[str, str]] = []
    for role, names in _NAMES.items():
        own = [name for name in names if name in reads]
        config += [(name, role) for name in names if f"config.{name}" in reads and role != "head_dim"]
        if len(own) > 1 and role != "head_dim":
            raise Unclear(f"it reads both '{own[0]}' and '{own[1]}'")
        if own and role != "head_dim":
            named[role] = own[0]
    named = {"heads": n.heads, "kv_heads": None if n.kv_heads == n.heads else n.kv_heads} | named
    if getattr(module, "head_dim", None) != n.head_dim:
        named["head_dim"] = n.head_dim
    return Attention(**named, config=tuple(config))


def returned(module: nn.Module) -> Any:
    """What a module gives when it is called, by the form of its return statements: the stream, or a tuple of it and
    others."""
    try:
        found = [node.value for node in ast.walk(code_of(type(module).forward)) if isinstance(node, ast.Return)]
    except Unclear:
        return STREAM
    sizes = {len(value.elts) if isinstance(value, ast.Tuple) else 0 for value in found}
    (size, *_) = sizes or {0}
    return (STREAM, *[OTHER] * (size - 1)) if size else STREAM
