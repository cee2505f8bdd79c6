"""VocabEmbedding and VocabHead: equal to nn.Embedding and nn.Linear, for any vocabulary at any degree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import colrow
from by_hand import sent_by
from colrow import I, R, S, VocabEmbedding, VocabHead
from colrow.embedding import check_options
from colrow.errors import PlanError
from colrow.layout import chunk_sizes
from colrow.params import local_of
from layouts import part
from oracle import FP64, check_grads, cotangent, relative
from pool import mesh as world
from wire import CommDebug

VOCABULARIES = (61, 65, 8, 5, 3, 1)  # 5 and 3 leave ranks without a row


def embedding_equals_one_process(dst: Any) -> None:
    mesh = world()
    for vocab in VOCABULARIES:
        for padding in (None, 0, vocab - 1, -1):
            torch.manual_seed(4)
            reference = nn.Embedding(vocab, 6, padding, dtype=torch.float64)
            torch.manual_seed(4)
            layer = VocabEmbedding(vocab, 6, padding, mesh=mesh, dst=dst, dtype=torch.float64)
            whole = colrow.full_state_dict(layer)["weight"]
            assert torch.equal(whole, reference.weight), "drawn as torch draws it, bit for bit"
            for shape in ((2, 13), (1,), (), (0, 3)):
                if shape == () and dst != I:
                    continue  # no tokens' dimension to shard
                ids = torch.randint(vocab, shape)
                want = reference(ids)
                flat = want if dst == I else want.flatten(0, -2)
                got = layer(ids)
                c = cotangent(flat)
                assert got.requires_grad and relative(got, part(flat.detach(), dst, mesh)) == 0, "one term is not zero"
                flat.backward(c)
                got.backward(part(c, dst, mesh))
            check_grads(layer, reference, FP64)


@pytest.mark.parametrize("dst", [I, S(0)], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_VOC_3_ZERO_1_an_embedding_of_any_vocabulary(ranks: Any, size: int, dst: Any) -> None:
    ranks(size).run(embedding_equals_one_process, dst, timeout=30)


def sent_by_an_embedding(dst: Any) -> tuple[dict[str, int], dict[str, int]]:
    layer = VocabEmbedding(5, 6, mesh=world(), dst=dst)
    with CommDebug() as forward:
        y = layer(torch.arange(5))
    with CommDebug() as backward:
        y.sum().backward()
    return sent_by(forward), sent_by(backward)


def test_what_an_embedding_sends(ranks: Any) -> None:
    assert ranks(4).run(sent_by_an_embedding, I, timeout=30) == [({"allreduce_": 1}, {})] * 4
    assert (
        ranks(4).run(sent_by_an_embedding, S(0), timeout=30) == [({"alltoall_base_": 1}, {"_allgather_base_": 1})] * 4
    )


def head_equals_one_process(src: Any) -> None:
    mesh = world()
    for vocab in VOCABULARIES:
        for bias in (True, False):
            torch.manual_seed(4)
            reference = nn.Linear(6, vocab, bias, dtype=torch.float64)
            torch.manual_seed(4)
            head = VocabHead(6, vocab, bias, mesh=mesh, src=src, dtype=torch.float64)
            x = torch.randn((2, 13, 6) if src == I else (13, 6), dtype=torch.float64, requires_grad=True)
            mine = part(x.detach(), src, mesh).requires_grad_()
            logits, want = head(mine), reference(x)
            assert isinstance(logits, DTensor) and logits.shape == want.shape, "true sizes, without padding"
            assert logits.placements == (Shard(want.dim() - 1),)
            assert local_of(logits).shape[-1] == chunk_sizes(vocab, mesh.size())[mesh.get_local_rank()]
            assert relative(logits.full_tensor(), want) <= FP64
            assert int(logits.full_tensor().argmax(-1).max()) < vocab
            want.backward(c := cotangent(want))
            (local_slice(logits) * part(c, S(-1), mesh)).sum().backward()
            assert mine.grad is not None and x.grad is not None
            assert relative(mine.grad, part(x.grad, src, mesh)) <= FP64
            check_grads(head, reference, FP64)


def local_slice(logits: DTensor) -> Tensor:
    return colrow.local(logits, grad=S(-1))


@pytest.mark.parametrize("src", [I, S(0)], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_VOC_2_a_head_of_any_vocabulary_shows_true_sizes(ranks: Any, size: int, src: Any) -> None:
    ranks(size).run(head_equals_one_process, src, timeout=30)


def gathered_logits_have_gradients() -> None:
    """`full_tensor()` of the logits, for code that wants them whole: its gradients are right as well."""
    torch.manual_seed(4)
    reference = nn.Linear(6, 7, dtype=torch.float64)
    torch.manual_seed(4)
    head = VocabHead(6, 7, mesh=world(), dtype=torch.float64)
    x = torch.randn(5, 6, dtype=torch.float64)
    c = cotangent(want := reference(x))
    want.backward(c)
    logits = head(x)
    assert isinstance(logits, DTensor)
    logits.full_tensor().backward(c)
    check_grads(head, reference, FP64)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_whole_logits_are_differentiable(ranks: Any, size: int) -> None:
    ranks(size).run(gathered_logits_have_gradients, timeout=30)


WRONG = {
    "too large": ("ShapeError", "VocabEmbedding: token id 61 at (1, 2); the vocabulary has ids 0 to 60. Use the token"),
    "negative": ("ShapeError", "VocabEmbedding: token id -1 at (0, 0); the vocabulary has ids 0 to 60. Use the token"),
    "layout": ("LayoutError", "VocabEmbedding: dst=R; dst may be I or S(0). Move the output afterwards."),
    "dimension": ("LayoutError", "VocabEmbedding: dst=S(1); dst may be I or S(0). "),
    "two axes": ("LayoutError", "VocabEmbedding: a mesh of 2 axes ('dp', 'tp'); one axis is split at a time. "),
}


def wrong(case: str) -> None:
    ids, dst, mesh = torch.zeros(2, 3, dtype=torch.long), I, world()
    if case in ("layout", "dimension"):
        dst = R if case == "layout" else S(1)
    elif case == "two axes":
        mesh = world((2, 2), ("dp", "tp"))
    else:
        ids[(1, 2) if case == "too large" else (0, 0)] = 61 if case == "too large" else -1  # 61 to 63 are padding
    VocabEmbedding(61, 4, mesh=mesh, dst=dst)(ids)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_one_error_on_every_rank(ranks: Any, case: str) -> None:
    kind, text = WRONG[case]
    errors = ranks(4).run(wrong, case, expect_errors=True, timeout=30)
    assert len({(error.type_name, error.message) for error in errors}) == 1, errors
    assert errors[0].type_name == kind and errors[0].message.startswith(text), errors[0].message


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
def test_options_that_need_the_whole_table_are_refused(option: dict[str, Any]) -> None:
    name = next(iter(option))
    with pytest.raises(PlanError, match=f"^wte: an embedding with {name}; a split embedding has none of these options"):
        check_options(nn.Embedding(4, 2, **option), "wte")
    check_options(nn.Embedding(4, 2, 0), "wte")
