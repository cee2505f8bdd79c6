"""ColumnLinear and RowLinear by hand: equal to nn.Linear with the same whole weights, at any degree and size."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

import colrow
from by_hand import Act, check_step, pair, sent_by
from colrow import ColumnLinear, I, P, R, RowLinear, S, move
from colrow.params import local_of
from layouts import part
from oracle import FP64, check_grads, cotangent, relative
from pool import mesh as world
from wire import CommDebug

SIZES = [(6, 8, 6), (5, 5, 5), (8, 70, 3), (4, 3, 6), (4, 1, 4), (1, 2, 1)]
ACTS: dict[str, Act] = {"gelu": F.gelu, "sigmoid": torch.sigmoid}  # sigmoid(0) is not 0: padding must not count


def every_size(sequence_parallel: bool, act: str) -> None:
    for sizes in SIZES:
        for tokens in (13, 1, 0):
            for bias in (True, False):
                split, reference = pair(sizes, ACTS[act], sequence_parallel, bias=bias)
                check_step(split, reference, (tokens, sizes[0]), sequence_parallel)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_SEQ_4_an_mlp_of_any_size_equals_one_process(ranks: Any, size: int, sequence_parallel: bool, act: str) -> None:
    ranks(size).run(every_size, sequence_parallel, act, timeout=30)


def more_dimensions() -> None:
    for shape in ((2, 13, 6), (2, 1, 3, 6), (6,), (0, 5, 6)):
        split, reference = pair((6, 7, 6), F.gelu, False)
        check_step(split, reference, shape, False)
    split, reference = pair((6, 7, 6), F.gelu, True)  # a sharded batch of sequences: tokens are what dimension 0 counts
    with torch.no_grad():
        x = torch.randn(4, 3, 6, dtype=torch.float64)
        got = split.up(part(x, S(0), world()))
        width = got.shape[-1]
        assert relative(got, reference.up(x)[..., 4 * world().get_local_rank() :][..., :width]) <= FP64


def test_any_number_of_dimensions(ranks: Any) -> None:
    ranks(2).run(more_dimensions, timeout=30)


def after_a_step(sequence_parallel: bool) -> None:
    split, reference = pair((5, 7, 5), torch.sigmoid, sequence_parallel)
    for _ in range(3):  # padding that had learned something in the first step would show in the next
        for model in (split, reference):
            model.zero_grad()
        check_step(split, reference, (13, 5), sequence_parallel)
        for model in (split, reference):
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()
    padding = local_of(split.up.weight)[part(torch.ones(7), S(0), world()).numel() :]
    assert padding.numel() == 0 or float(padding.abs().max()) == 0, "padding stays zero"


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])
@pytest.mark.parametrize("size", [2, 4])
def test_an_activation_of_zero_that_is_not_zero_after_steps(ranks: Any, size: int, sequence_parallel: bool) -> None:
    ranks(size).run(after_a_step, sequence_parallel, timeout=30)


def initialised() -> tuple[float, float]:
    for width, out in ((512, 512), (5, 7), (7, 3)):
        for kind in (ColumnLinear, RowLinear):
            torch.manual_seed(11)
            want = nn.Linear(width, out).state_dict()
            torch.manual_seed(11)
            layer = kind(width, out, mesh=world())
            got = colrow.full_state_dict(layer)
            assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want), kind.__name__
            for name, param in layer.named_parameters():
                mine = local_of(param)
                assert isinstance(param, DTensor) and mine.untyped_storage().nbytes() == mine.numel() * 4, name
    torch.manual_seed(11)
    std = float(local_of(RowLinear(512, 512, mesh=world()).weight).std())
    return std, float(nn.Linear(512, 512).weight.detach().std())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_INIT_1_whole_weights_do_not_depend_on_the_degree(ranks: Any, size: int) -> None:
    """Bit-equal to nn.Linear's own draw; and so a shard's standard deviation is the whole's (2 %: 65536 samples)."""
    for mine, whole in ranks(size).run(initialised, timeout=30):
        assert size == 3 or abs(mine / whole - 1) < 0.02, "fan-in of the whole, not of the shard"


def bias_once(dst: Any) -> None:
    mesh = world()
    torch.manual_seed(2)
    reference = nn.Linear(8, 3, dtype=torch.float64)
    torch.manual_seed(2)
    row = RowLinear(8, 3, mesh=mesh, dst=dst, dtype=torch.float64)
    with torch.no_grad():
        for bias in (reference.bias, local_of(row.bias)):
            bias.copy_(torch.tensor([100.0, 200.0, 300.0]))
    x = torch.randn(5, 8, dtype=torch.float64)
    got, want = row(part(x, S(1), mesh)), reference(x)
    if dst == P:
        total = move(got, mesh, src=P, dst=I) + torch.tensor([100.0, 200.0, 300.0])
        assert relative(total, want) <= FP64, "the terms, without the bias"
        return
    assert relative(got, part(want.detach(), dst, mesh)) <= FP64
    c = cotangent(want)
    want.backward(c)
    got.backward(part(c, dst, mesh))
    check_grads(row, reference, FP64)
    assert isinstance(row.bias.grad, DTensor) and isinstance(row.bias.grad.placements[0], Replicate)
    assert relative(local_of(row.bias.grad), c.sum(0)) <= FP64, "summed by the backward pass, on every rank"


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dst", [I, S(0), P], ids=str)
def test_BIAS_1_NORM_7_the_bias_of_a_row_layer_counts_once(ranks: Any, size: int, dst: Any) -> None:
    ranks(size).run(bias_once, dst, timeout=30)


class Shared(nn.Module):
    """Three column layers that share one gather, as q, k and v do."""

    def __init__(self, q: nn.Linear, k: nn.Linear, v: nn.Linear, down: nn.Linear, size: int | None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.down, self.size = q, k, v, down, size

    def forward(self, x: Tensor) -> Tensor:
        if self.size is not None:
            x = move(x, world(), src=S(0, size=self.size), dst=R).view(2, self.size // 2, -1)
        y = self.down(self.q(x).tanh() * self.k(x) + self.v(x))
        return y if y.dim() == 2 else y.flatten(0, 1)


def shared_pair(dtype: torch.dtype = torch.float64) -> tuple[Shared, Shared]:
    models = []
    for mesh in (world(), None):
        torch.manual_seed(7)
        col: dict[str, Any] = {"dtype": dtype} | ({} if mesh is None else {"mesh": mesh, "src": R})
        row: dict[str, Any] = {"dtype": dtype} | ({} if mesh is None else {"mesh": mesh, "dst": S(0)})
        make_col, make_row = (nn.Linear, nn.Linear) if mesh is None else (ColumnLinear, RowLinear)
        q, k, v = (make_col(6, 5, **col) for _ in range(3))
        models.append(Shared(q, k, v, make_row(5, 6, **row), size=None if mesh is None else 26))
    return models[0], models[1]


def shared_gather() -> tuple[dict[str, int], dict[str, int]]:
    split, reference = shared_pair()
    check_step(split, reference, (26, 6), True)
    split.zero_grad()
    reference.zero_grad()
    whole = torch.randn(26, 6, dtype=torch.float64, requires_grad=True)
    x = part(whole.detach(), S(0), world()).requires_grad_()
    with CommDebug() as forward:
        y = split(x)
    c = cotangent(want := reference(whole))
    mine = part(c, S(0), world())
    # one of three users first, then all, twice: the shared second gather must neither miss nor mix
    torch.autograd.grad(y, split.k.weight, mine, retain_graph=True)
    with CommDebug() as backward:
        y.backward(mine, retain_graph=True)
    y.backward(mine)
    want.backward(2 * c)
    assert x.grad is not None and whole.grad is not None
    assert relative(x.grad, part(whole.grad, S(0), world())) <= FP64
    check_grads(split, reference, FP64)
    return sent_by(forward), sent_by(backward)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_SPEED_1_three_column_layers_share_one_gather_and_one_second_gather(ranks: Any, size: int) -> None:
    for forward, backward in ranks(size).run(shared_gather, timeout=30):
        assert forward == {"_allgather_base_": 1, "alltoall_base_": 1}
        # the adjoints of both; the second gather (served from the one that the first call left over); the row's bias
        assert backward == {"_allgather_base_": 2, "alltoall_base_": 1, "allreduce_": 1}


def frozen(sequence_parallel: bool) -> dict[str, int]:
    split, reference = pair((6, 7, 6), F.gelu, sequence_parallel)
    for model in (split, reference):
        model.up.weight.requires_grad_(False)
        model.down.weight.requires_grad_(False)
    check_step(split, reference, (13, 6), sequence_parallel)
    x = part(torch.randn(13, 6, dtype=torch.float64), S(0) if sequence_parallel else I, world()).requires_grad_()
    y = split(x)
    with CommDebug() as mode:
        y.backward(torch.ones_like(y))
    for model in (split, reference):
        model.zero_grad()
        model.requires_grad_(False)
        model.down.weight.requires_grad_()
    check_step(split, reference, (13, 6), sequence_parallel)
    return sent_by(mode)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])
def test_frozen_weights_and_a_trainable_bias(ranks: Any, sequence_parallel: bool) -> None:
    # the adjoints of both ends, and under SP the row's bias; but no second gather for a frozen weight
    sp = {"_allgather_base_": 1, "alltoall_base_": 1, "allreduce_": 1}
    want = sp if sequence_parallel else {"allreduce_": 1}
    assert ranks(3).run(frozen, sequence_parallel, timeout=30) == [want] * 3


def flags() -> list[bool]:
    layer = RowLinear(4, 4, mesh=world())
    layer.weight.requires_grad_(False)
    layer.double()
    again = copy.deepcopy(layer)
    return [p.requires_grad for model in (layer, again) for p in model.parameters()]


def test_LORA_4_requires_grad_survives(ranks: Any) -> None:
    assert ranks(2).run(flags, timeout=30) == [[False, True] * 2] * 2


def gathered_on_another_dimension() -> None:
    """Only a gather of dimension 0 is repeated in backward; any other input is kept as torch keeps it."""
    mesh = world()
    torch.manual_seed(7)
    reference = nn.Linear(6, 5, dtype=torch.float64)
    torch.manual_seed(7)
    column = ColumnLinear(6, 5, mesh=mesh, src=R, dtype=torch.float64)
    for dim in (1, 2):
        whole = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
        mine = part(whole.detach(), S(dim), mesh).requires_grad_()
        y = move(column(move(mine, mesh, src=S(dim), dst=R)), mesh, src=S(-1), dst=I)
        want = reference(whole)
        c = cotangent(want)
        want.backward(c)
        y.backward(c)
        assert relative(y, want) <= FP64 and mine.grad is not None and whole.grad is not None
        assert relative(mine.grad, part(whole.grad, S(dim), mesh)) <= FP64
        check_grads(column, reference, FP64)
        column.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("size", [2, 3])
def test_a_column_layer_after_a_gather_of_another_dimension(ranks: Any, size: int) -> None:
    ranks(size).run(gathered_on_another_dimension, timeout=30)


def on_axes() -> None:
    for axis in ("tp", "dp"):
        mesh = world((2, 2), ("dp", "tp"))[axis]
        for sequence_parallel in (True, False):
            split, reference = pair((5, 7, 5), F.gelu, sequence_parallel, mesh=mesh)
            check_step(split, reference, (13, 5), sequence_parallel, mesh=mesh)


def test_MESH_2_layers_on_one_axis_of_two(ranks: Any) -> None:
    ranks(4).run(on_axes, timeout=30)


def different_draws() -> None:
    torch.manual_seed(world().get_rank())  # each rank draws its own weights; the first rank's count
    layer = RowLinear(5, 4, mesh=world((2, 2), ("dp", "tp"))["tp"])
    got = colrow.full_state_dict(layer)
    torch.manual_seed(world().get_rank() // 2 * 2)
    want = nn.Linear(5, 4).state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_MESH_3_weights_drawn_differently_are_taken_from_the_first_rank_of_the_axis(ranks: Any) -> None:
    ranks(4).run(different_draws, timeout=30)


WRONG = {
    "column src": ("LayoutError", "ColumnLinear: src=S(1); src may be I, R, S(0). Bring the tensor into one of these"),
    "column src P": ("LayoutError", "ColumnLinear: src=P; src may be I, R, S(0). "),
    "row dst": ("LayoutError", "RowLinear: dst=R; dst may be I, P, S(0). "),
    "no layout": ("LayoutError", "ColumnLinear(src=): 'I' is not a layout; there are R, I, P and S(dim). "),
    "two axes": ("LayoutError", "RowLinear: a mesh of 2 axes ('dp', 'tp'); one axis is split at a time. Pass mesh["),
    "column width": ("ShapeError", "ColumnLinear: an input of shape (2, 5); its last dimension must be 6. Feed it"),
    "row width": ("ShapeError", "RowLinear: an input of shape (2, 6); its last dimension must be this rank's slice "
                  "of 6, [2, 2, 2, 0]. Feed it what the unsplit layer would get, in the layout that it was built for."),
}  # fmt: skip


def wrong(case: str) -> None:
    mesh, x = world(), torch.ones(2, 6)
    options: dict[str, tuple[type[ColumnLinear], dict[str, Any]]] = {
        "column src": (ColumnLinear, {"src": S(1)}),
        "column src P": (ColumnLinear, {"src": P}),
        "row dst": (RowLinear, {"dst": R}),
        "no layout": (ColumnLinear, {"src": "I"}),
        "two axes": (RowLinear, {"mesh": world((2, 2), ("dp", "tp"))}),
        "column width": (ColumnLinear, {}),
        "row width": (RowLinear, {}),
    }
    kind, given = options[case]
    arguments: dict[str, Any] = {"mesh": mesh} | given
    layer = kind(6, 4, **arguments)
    layer(x[:, :5] if case == "column width" else x)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_one_error_on_every_rank(ranks: Any, case: str) -> None:
    kind, text = WRONG[case]
    errors = ranks(4).run(wrong, case, expect_errors=True, timeout=30)
    assert len({(error.type_name, error.message) for error in errors}) == 1, errors
    assert errors[0].type_name == kind and errors[0].message.startswith(text), errors[0].message


def described() -> list[str]:
    mesh = world()
    return [repr(ColumnLinear(6, 5, mesh=mesh, src=S(0))), repr(RowLinear(5, 6, False, mesh=mesh, dst=S(0, size=4)))]


def test_a_layer_shows_its_true_sizes(ranks: Any) -> None:
    assert ranks(2).run(described, timeout=30)[0] == [
        "ColumnLinear(in_features=6, out_features=5, bias=True, src=S(0), tp=2)",
        "RowLinear(in_features=5, out_features=6, bias=False, dst=S(0, size=4), tp=2)",
    ]


def on_meta() -> list[str]:
    layer = ColumnLinear(6, 5, mesh=world(), device="meta")
    shapes = [f"{name} {tuple(p.shape)} {tuple(local_of(p).shape)} {p.device}" for name, p in layer.named_parameters()]
    assert isinstance(layer.weight, DTensor) and layer.weight.placements == (Shard(0),)
    return shapes


def test_a_layer_on_meta_has_no_memory_yet(ranks: Any) -> None:
    assert ranks(2).run(on_meta, timeout=30) == [["weight (6, 6) (3, 6) meta", "bias (6,) (3,) meta"]] * 2
