"""`colrow.check`: the layouts of a parallel module of one's own, checked on a laptop without ranks.

The checker is `spmd_types` (pip install 'colrow[check]'): it follows the layout of every tensor through a call, and
refuses what no layout allows, such as a tensor in I that meets a shard. It does not tell S from P: both are a rank's
own. Collectives are not carried out, so only layouts are checked, and no numbers: `colrow.verify` does that.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard

from colrow.context import Call, running
from colrow.dtensor import ToLocal
from colrow.errors import LayoutError
from colrow.layout import Layout, S, check_layout, chunk_sizes
from colrow.linear import _LeanLinear
from colrow.loss import _VocabLoss
from colrow.moves import Move

VERB = "colrow.check"


def check(
    build: Callable[[DeviceMesh], nn.Module], *inputs: tuple[Tensor, Layout], gives: Layout, ranks: int = 2
) -> None:
    """Follow the layouts through one call of a parallel module; no process group is needed, or may be there.

        class MLP(nn.Module):
            def __init__(self, mesh):
                super().__init__()
                self.up, self.down = ColumnLinear(8, 32, mesh=mesh), RowLinear(32, 8, mesh=mesh)

            def forward(self, x):
                return self.down(self.up(x).relu())

        colrow.check(MLP, (torch.randn(5, 8), I), gives=I)

    Arguments:
        build: makes the module on a mesh of `ranks` ranks.
        inputs: whole tensors, and the layouts in which the module takes them.
        gives: the layout that its output, one tensor, should have.

    Raises:
        LayoutError: where layouts do not fit together, or the output has another one. Or a process group is running, or
            `spmd_types` is missing.
    """
    if importlib.util.find_spec("spmd_types") is None:
        fix = "pip install 'colrow[check]'"
        raise LayoutError(VERB, "spmd_types is not installed", "it follows the layouts", fix)
    if dist.is_initialized():
        given, fix = "a process group is running", "Call it in a process of its own, in a test say"
        raise LayoutError(VERB, given, "it makes one of its own, in which nothing is sent", fix)
    check_layout(gives, f"{VERB}(gives=)")
    import spmd_types as spmd

    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        module = build(mesh)
        where = type(module).__name__
        mine = [_local(x, check_layout(layout, VERB), ranks) for x, layout in inputs]
        sizes = [len(x) for x, layout in inputs if layout == S(0)]
        with following(mesh), running(Call(tuple(sizes[:1]))) if sizes else nullcontext():
            try:
                out = module(*(typed(x, layout, mesh) for x, (_, layout) in zip(mine, inputs, strict=True)))
                (kind,) = spmd.get_local_type(out).values()
            except spmd.SpmdTypeError as error:
                raise _refused(where, error) from error
    finally:
        dist.destroy_process_group()
    if kind.name not in {gives.name, "V" if gives.name in "PS" else ""}:
        given, fix = f"its output is in {_said(kind.name)}", "End it with colrow.move(y, mesh, src=, dst=)"
        raise LayoutError(where, given, f"it was to be in {gives}", fix)


@contextmanager
def following(mesh: DeviceMesh) -> Iterator[None]:
    """While it is entered, the checker follows the layouts on the axis `mesh`, and knows colrow's own functions."""
    import spmd_types as spmd
    from spmd_types.checker import typecheck

    hooks: dict[Any, Any] = _hooks(mesh)
    for function, hook in hooks.items():
        function.spmd_typecheck = staticmethod(hook)  # where the checker looks for what a function does to layouts
    try:
        with spmd.set_current_mesh(mesh), typecheck():
            yield
    finally:
        for function in hooks:
            del function.spmd_typecheck


def typed(x: Tensor, layout: Layout, mesh: DeviceMesh) -> Tensor:
    """Tell the checker the layout of a local tensor, and return it."""
    import spmd_types as spmd

    group: Any = mesh.get_group()
    spmd.assert_type(x, {group: _kinds()[layout.name]})
    return x


def _local(x: Tensor, layout: Layout, ranks: int) -> Tensor:
    """The first rank's part of a whole tensor."""
    if isinstance(layout, S):
        x = x.narrow(layout.dim, 0, chunk_sizes(x.shape[layout.dim], ranks)[0])
    return x.detach().clone().requires_grad_(x.is_floating_point())


def _kinds() -> dict[str, Any]:
    import spmd_types as spmd

    return {"R": spmd.R, "I": spmd.I, "P": spmd.P, "S": spmd.V}


def _said(kind: str) -> str:
    return "S, or P" if kind == "V" else kind


def _hooks(mesh: DeviceMesh) -> dict[Any, Callable[..., None]]:
    """What colrow's functions do to layouts, in the checker's terms."""
    import spmd_types as spmd

    kinds: dict[str, Any] = _kinds()
    group: Any = mesh.get_group()

    def move(outputs: Tensor, *, x: Tensor, src: Layout, dst: Layout) -> None:
        spmd.assert_type(x, {group: kinds[src.name]})
        spmd.assert_type_like(outputs, x, {group: kinds[dst.name]})

    def linear(outputs: Tensor, *, x: Tensor, weight: Tensor, bias: Tensor | None, kept: tuple[Tensor, ...]) -> None:
        spmd.assert_type(x, {group: kinds["R"]})
        for shard in kept:
            spmd.assert_type(shard, {group: kinds["S"]})
        spmd.assert_type(weight, {group: kinds["S"]})
        if bias is not None:
            spmd.assert_type(bias, {group: kinds["S"]})
        spmd.assert_type_like(outputs, weight, {group: kinds["S"]})

    def loss(outputs: Tensor, *, logits: Tensor, target: Tensor) -> None:
        spmd.assert_type(logits, {group: kinds["S"]})
        spmd.assert_type(target, {group: kinds["I"]})
        spmd.assert_type_like(outputs, target, {group: kinds["I"]})

    def to_local(outputs: Tensor, *, param: DTensor, placement: Placement) -> None:
        spmd.rules.ignore(param)  # at rest it has a placement, and no layout
        shared = "R" if placement.is_partial() else "I"  # the placement is the gradient's
        spmd.assert_type(outputs, {group: kinds["S" if isinstance(placement, Shard) else shared]})

    return {Move: move, ToLocal: to_local, _LeanLinear: linear, _VocabLoss: loss}


def _refused(where: str, error: Exception) -> LayoutError:
    """What the checker has said, in our words."""
    said = " ".join(str(error).split("\n\n")[0].split())
    found = re.search(r"Found types: \[(.*?)\]", said)
    if found is not None:
        given = f"tensors in {' and '.join(map(_said, found[1].split(', ')))} meet"
        allowed = "S goes with S and R, I with I alone, and P is for sums"
        return LayoutError(
            where, given, allowed, "Bring one of them there first, colrow.move(x, mesh, src=I, dst=R) say"
        )
    if "missing axis" in said:
        given = "it uses a tensor that has no layout: one that it has made itself, or a slice of unknown size"
        fix = "State the size, S(0, size=n), or make the tensor from an input or a parameter"
        return LayoutError(where, given, "layouts are followed from the inputs and parameters on", fix)
    return LayoutError(where, said[:400], "layouts must go together", "Add the move that is missing, colrow.move(...)")
