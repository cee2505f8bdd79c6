"""What a trace has seen: exactly what went over the wire, exactly what stays in memory, and what the formula says."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import colrow
from colrow import source
from colrow.models.tiny import FAMILIES
from colrow.observe import Observer, Places
from colrow.parallelize import find_plan
from colrow.params import local_of
from colrow.report import Watching, watch
from colrow.traced import Trace
from pool import mesh
from wire import Wire

SP = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])
TWO_PERCENT = 0.02


def trace(name: str, tp: int = 2, sequence_parallel: bool = True, **options: Any) -> Trace | None:
    return watch(source.find(name), replace(Watching(name, tp, sequence_parallel), **options))


def traced(ranks: Any, name: str, tp: int = 2, sequence_parallel: bool = True, **options: Any) -> Trace:
    return ranks(tp).run(trace, name, tp, sequence_parallel, **options)[0]


@SP
def test_llama_at_tp_2_is_the_design(ranks: Any, sequence_parallel: bool) -> None:
    """Per layer two all-reduces each way; or gathers and scatters, the same bytes forward, and two second gathers."""
    seen = traced(ranks, "llama", 2, sequence_parallel)
    n = 2 * 16 * 32 * 4  # bytes of the activations
    for number, layer in enumerate(seen.layers):
        assert layer.name == f"model.layers.{number}"
        part = layer.total
        if sequence_parallel:
            into_the_stretch = number == 0  # its adjoint, a gather
            assert part.forward == {"all_reduce": 0, "all_gather": 2, "reduce_scatter": 2}
            assert part.backward == {"all_reduce": 0, "all_gather": 4 + into_the_stretch, "reduce_scatter": 2}
            assert part.sent == (10 + into_the_stretch) * n / 2
        else:
            assert part.forward == part.backward == {"all_reduce": 2, "all_gather": 0, "reduce_scatter": 0}
            assert part.sent == 8 * n / 2
        assert set(layer.kinds) == {"attention", "mlp", "stream"}
        assert sum(part.saved for part in layer.kinds.values()) == part.saved
    one = seen.total.saved_on_one
    assert seen.total.saved == pytest.approx(seen.total.formula_saved, rel=TWO_PERCENT)
    assert seen.total.saved < (0.35 if sequence_parallel else 0.5) * one


@SP
@pytest.mark.parametrize("family", ["gpt", *FAMILIES])
@pytest.mark.parametrize(("tp", "sequence"), [(2, 16), (3, 13)], ids=["even", "uneven"])
def test_every_family_sends_and_keeps_by_the_formula(
    ranks: Any, family: str, tp: int, sequence: int, sequence_parallel: bool
) -> None:
    seen = traced(ranks, family, tp, sequence_parallel, sequence=sequence)
    for layer in seen.layers:
        for kind, part in layer.kinds.items():
            assert part.sent == pytest.approx(part.formula_sent), f"{layer.name}, {kind}"
    for kind, part in seen.outside.items():
        assert part.sent == pytest.approx(part.formula_sent), kind
    slack = 0.08  # what is made again differs by the author's code; a rank with one key/value head needs no copy of it
    assert seen.total.saved == pytest.approx(seen.total.formula_saved, rel=slack)
    if tp == 2:
        kept = traced(ranks, family, tp, sequence_parallel, sequence=sequence, recompute="none").total
        assert kept.saved == pytest.approx(kept.formula_saved, rel=TWO_PERCENT)
        assert seen.total.saved < kept.saved


def test_sixteen_bits_send_sums_in_thirty_two(ranks: Any) -> None:
    half, single = (traced(ranks, "llama", 2, False, dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert half.layers[1].total.sent == single.layers[1].total.sent
    half, single = (traced(ranks, "llama", 2, True, dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert half.layers[1].total.sent == single.layers[1].total.sent / 2


class Alive(TorchDispatchMode):
    """The memory of every tensor that was made while it was entered, as long as somebody holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                storage = local_of(value).untyped_storage()
                self.made[storage.data_ptr()] = weakref.ref(storage)
        return out

    def bytes(self, ignore: list[Tensor]) -> int:
        gc.collect()
        known = {local_of(tensor).untyped_storage().data_ptr() for tensor in ignore}
        alive = (storage for ref in self.made.values() if (storage := ref()) is not None)
        return sum(storage.nbytes() for storage in alive if storage.data_ptr() not in known)


def kept_and_alive(name: str, sequence_parallel: bool) -> tuple[int, int]:
    found = source.find(name)
    model = found.build(dropout=0.0, seed=0).train()
    batch = found.batch(model, seed=1, shape=(2, 16))
    places = Places(colrow.resolve(model, find_plan(model), 2, sequence_parallel=sequence_parallel))
    colrow.use_transport(mesh(), "torch")  # shared memory is no tensor's
    split = colrow.parallelize(model, mesh(), sequence_parallel=sequence_parallel, check_inputs=0)
    with Alive() as alive, Observer(split, places) as observer:
        out: Any = split(**batch)
        loss = out if isinstance(out, Tensor) else out.loss
        del out
        kept = sum(row.bytes for row in observer.kept(loss, batch.values()))
        ignore = [*split.parameters(), *split.buffers(), *batch.values(), loss]
        colrow.use_transport(mesh(), "auto")
        return kept, alive.bytes(ignore)


@SP
@pytest.mark.parametrize("name", ["gpt", "llama", "mixtral"])
def test_what_is_kept_is_what_is_alive(ranks: Any, name: str, sequence_parallel: bool) -> None:
    """An independent count: all memory that forward made, and that is there when it has ended."""
    for kept, alive in ranks(2).run(kept_and_alive, name, sequence_parallel):
        assert kept == pytest.approx(alive, rel=0.005)  # a cached table or two


def both_counts(name: str, sequence_parallel: bool) -> tuple[Counter[Any], Counter[Any]]:
    found = source.find(name)
    model = found.build(dropout=0.1, seed=0).train()
    batch = found.batch(model, seed=1, shape=(2, 13))
    places = Places(colrow.resolve(model, find_plan(model), 3, sequence_parallel=sequence_parallel))
    split = colrow.parallelize(model, mesh(), sequence_parallel=sequence_parallel, check_inputs=0)
    with Wire() as wire, Observer(split, places) as observer:
        out: Any = split(**batch)
        (out if isinstance(out, Tensor) else out.loss).backward()
    seen = Counter((m.verb, round(m.sent)) for m in observer.messages if m.verb != "reduce_scatter")
    sent = Counter((e.verb, round(e.sent)) for e in wire.log if e.verb != "reduce_scatter")
    scattered = Counter(m.verb for m in observer.messages), Counter(e.verb for e in wire.log)
    return seen + scattered[0], sent + scattered[1]


@SP
@pytest.mark.parametrize("name", ["gpt", "qwen3", "opt"])
def test_messages_are_what_went_over_the_wire(ranks: Any, name: str, sequence_parallel: bool) -> None:
    for seen, sent in ranks(3).run(both_counts, name, sequence_parallel):
        assert seen == sent


def recomputed(reentrant: bool) -> set[tuple[str, str, str]]:
    model: Any = source.find("llama").build(dropout=0.0, seed=0).train()
    batch = source.find("llama").batch(model, seed=1, shape=(2, 16))
    places = Places(colrow.resolve(model, find_plan(model), 2))
    split: Any = colrow.parallelize(model, mesh(), check_inputs=0)
    split.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with Observer(split, places) as observer:
        split(**batch, use_cache=False).loss.backward()
    again = [m for m in observer.messages if m.layer == "model.layers.1" and m.way == "backward"]
    return {(message.kind, message.verb, message.module.rpartition(".")[2]) for message in again}


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_recomputation_sends_is_its_layers(ranks: Any, reentrant: bool) -> None:
    for seen in ranks(2).run(recomputed, reentrant):
        assert ("attention", "reduce_scatter", "o_proj") in seen  # forward, once more
        assert ("mlp", "reduce_scatter", "mlp") in seen and ("mlp", "all_gather", "down_proj") in seen  # f and g


def test_the_picture_is_of_the_first_layer(ranks: Any) -> None:
    seen = traced(ranks, "llama", 2, False).picture
    assert (seen.layer, seen.hidden, seen.tokens, seen.total_tokens) == ("model.layers.0", 32, (32, 32), 32)
    attention, mlp = seen.regions
    assert (attention.kind, mlp.kind, mlp.activation) == ("attention", "mlp", "SiLU")
    assert [(x.role, x.whole, x.local) for x in mlp.linears] == [
        ("column", (32, 48), (32, 24)),
        ("column", (32, 48), (32, 24)),
        ("row", (48, 32), (24, 32)),
    ]
    assert mlp.linears[0].gives == (2, 16, 24) and mlp.gives == (2, 16, 32)
    assert mlp.entry == attention.entry == ("", "all_reduce")  # f
    assert mlp.exit == attention.exit == ("all_reduce", "")  # g
    assert mlp.again == 0 and mlp.sent["exit"] == 2 * 16 * 32 * 4

    seen = traced(ranks, "llama", 4, True, sequence=13).picture
    assert (seen.tokens, seen.total_tokens) == ((7, 7, 7, 5), 26)
    attention, mlp = seen.regions
    assert mlp.entry == ("all_gather", "reduce_scatter") and mlp.exit == ("reduce_scatter", "all_gather")
    assert mlp.takes == mlp.gives == (7, 32) and mlp.whole == (2, 13, 32) and mlp.again == 1
    assert seen.norms == ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")


@pytest.mark.parametrize("name", ["opt", "bert", "mixtral", "gpt2"])
def test_pictures_of_layers_of_other_shapes(ranks: Any, name: str) -> None:
    for mode in (True, False):
        regions = traced(ranks, name, 2, mode).picture.regions
        assert [region.kind for region in regions] == ["attention", "experts" if name == "mixtral" else "mlp"]
        for region in regions:
            moved = ("all_gather", "reduce_scatter") if mode else ("", "all_reduce")
            assert region.entry == moved and region.exit == moved[::-1], region.name


def test_a_trace_is_plain_json(ranks: Any) -> None:
    numbers = traced(ranks, "gpt", 3, sequence=13).as_json()
    assert set(numbers["layers"][0]["forward"]) == {"all_reduce", "all_gather", "reduce_scatter"}
    assert numbers["total"]["bytes_sent_per_rank"] == pytest.approx(numbers["formula"]["bytes_sent_per_rank"])
    assert numbers["single_device"]["saved_bytes"] > numbers["total"]["saved_bytes_per_rank"]
    assert sum(row["bytes"] for row in numbers["kept"]) == numbers["total"]["saved_bytes_per_rank"]
    assert {row["name"] for row in numbers["padding"]} >= {"token.weight"}
    assert len(numbers["waiting_seconds"]) == 3


@pytest.mark.parametrize("name", ["opt", "bert"])
def test_an_mlp_without_a_module_of_its_own(ranks: Any, name: str) -> None:
    mlp = traced(ranks, name, 2).picture.regions[1]
    assert (mlp.takes, mlp.whole, mlp.gives) == ((16, 32), (2, 16, 32), (16, 32)) and mlp.again == 1
    assert mlp.activation == {"opt": "ReLU", "bert": "GeLU"}[name]
