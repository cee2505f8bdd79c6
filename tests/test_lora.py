"""LoRA adapters of `peft` on split models: exact, saved as a plain adapter, loaded, merged."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import colrow
from colrow import checkpoint, full_state_dict
from colrow.adapter_files import load_adapter
from colrow.models.tiny import batch, tiny
from colrow.params import shard_like, splits
from colrow.precision import KeepDouble
from hf import ODD
from oracle import FP64, check_grads, relative
from pool import mesh
from wire import Wire, counts

peft = pytest.importorskip("peft", reason="peft is not installed: no test of adapters")

TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "bert": ["query", "value", "dense"],
    "opt": ["q_proj", "out_proj", "fc1", "fc2"],
    "falcon": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"],
}
SOME = ["q_proj", "o_proj", "up_proj", "down_proj"]
GRADS = 1e-9
BOTH = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])


def config(targets: list[str], **options: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": targets, "init_lora_weights": False} | options)


def with_adapters(base: nn.Module, targets: list[str], **options: Any) -> Any:
    """A copy of the model with adapters of random values, none of them zero."""
    torch.manual_seed(3)
    return peft.get_peft_model(copy.deepcopy(base), config(targets, **options)).double()


def copy_adapters(split: nn.Module, reference: nn.Module) -> None:
    values, by_name = dict(reference.named_parameters()), splits(split)
    with torch.no_grad():
        for name, param in split.named_parameters():
            if ".lora_" in name:
                param.copy_(shard_like(values[name].detach(), by_name.get(name), param))


def pair(
    base: nn.Module, targets: list[str], before: bool = True, sequence_parallel: bool = True, **options: Any
) -> tuple[Any, Any]:
    """The reference with adapters, and a split model with the same, added before or after the split."""
    reference = with_adapters(base, targets, **options)
    if before:
        return reference, colrow.parallelize(copy.deepcopy(reference), mesh(), sequence_parallel=sequence_parallel)
    split = colrow.parallelize(copy.deepcopy(base), mesh(), sequence_parallel=sequence_parallel)
    fresh = config(targets, **options | {"init_lora_weights": True})
    split = colrow.parallelize(peft.get_peft_model(split, fresh).double(), mesh())
    copy_adapters(split, reference)
    return reference, split


def step(model: Any, given: dict[str, Tensor]) -> Tensor:
    with KeepDouble():
        loss = model(**given).loss
        loss.backward()
    return loss.detach()


def logits(model: Any, given: dict[str, Tensor]) -> Tensor:
    with torch.no_grad(), KeepDouble():
        found = model.eval()(**given).logits
    return found.full_tensor() if isinstance(found, DTensor) else found


def flags(model: nn.Module) -> dict[str, bool]:
    return {name: param.requires_grad for name, param in model.named_parameters()}


def exact(family: str, sequence_parallel: bool) -> None:
    base = tiny(family).double()
    for before in (True, False):
        reference, split = pair(base, TARGETS[family], before, sequence_parallel)
        assert flags(split) == flags(reference), "LORA-4"
        given = batch(base)
        assert relative(step(split, given), step(reference, given)) <= FP64
        check_grads(split, reference, GRADS)  # only adapters have gradients, on both sides


@BOTH
@pytest.mark.parametrize(("size", "family"), [(2, "llama"), (2, "gpt2"), *((3, family) for family in TARGETS)])
def test_LORA_3_adapters_added_before_and_after_the_split(
    ranks: Any, size: int, family: str, sequence_parallel: bool
) -> None:
    ranks(size).run(exact, family, sequence_parallel, timeout=60)


def options_of_lora(changes: dict[str, Any], family: str) -> None:
    base = tiny(family).double()
    for before in (True, False):
        reference, split = pair(base, TARGETS[family][:7], before, **changes)
        given = batch(base)
        assert relative(step(split, given), step(reference, given)) <= FP64
        check_grads(split, reference, GRADS)


@pytest.mark.parametrize(
    "changes", [{"lora_bias": True}, {"use_rslora": True}], ids=lambda changes: next(iter(changes))
)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_biases_and_other_scalings(ranks: Any, family: str, changes: dict[str, Any]) -> None:
    ranks(2).run(options_of_lora, changes, family)


def trained(folder: str) -> None:
    base = tiny("llama").double()
    reference, split = pair(base, SOME)
    given = batch(base)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (reference, split)]
    for _ in range(3):
        assert relative(step(split, given), step(reference, given)) <= FP64
        check_grads(split, reference, GRADS)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        assert relative(colrow.clip_grad_norm_(split, 0.1), norm) <= FP64
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert colrow.replica_drift(split) == {}
    assert all(param.grad is None for name, param in split.named_parameters() if ".lora_" not in name)
    want = {name: param.detach() for name, param in reference.named_parameters()}
    got = colrow.full_state_dict(split)
    assert all(relative(got[name], value) <= GRADS for name, value in want.items())
    colrow.save_pretrained(split, folder)
    if dist.get_rank() == 0:
        reference.save_pretrained(f"{folder}-wanted")


@pytest.mark.parametrize("size", [2, 3])
def test_LORA_1_three_steps_and_the_exported_adapter(ranks: Any, size: int, tmp_path: Path) -> None:
    ranks(size).run(trained, str(tmp_path / "adapter"))
    same_folder(tmp_path / "adapter", tmp_path / "adapter-wanted")


def same_folder(got: Path, want: Path) -> None:
    """Two adapters, as files."""
    assert sorted(file.name for file in got.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    settings = [json.loads((folder / "adapter_config.json").read_text()) for folder in (got, want)]
    for values in settings:
        values["target_modules"] = sorted(values["target_modules"])  # a set, in any order
    assert settings[0] == settings[1]
    mine, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (got, want))
    assert mine.keys() == theirs.keys()
    assert max(relative(mine[name], value) for name, value in theirs.items()) <= GRADS


def other_adapters(folder: str) -> None:
    """Two adapters; the second has other layers and another rank, and is the active one."""
    base = tiny("llama").double()
    given = batch(base)
    reference = with_adapters(base, SOME)
    reference.add_adapter("other", config(["q_proj", "v_proj", "embed_tokens"], r=2))
    reference.double()
    split: Any = colrow.parallelize(copy.deepcopy(reference), mesh())
    for model in (reference, split):
        model.set_adapter("other")
    assert flags(split) == flags(reference)
    assert relative(step(split, given), step(reference, given)) <= FP64
    check_grads(split, reference, GRADS)
    colrow.save_pretrained(split, folder)
    later = load_adapter(colrow.parallelize(copy.deepcopy(base), mesh()), folder)
    later = load_adapter(later, f"{folder}/other", name="other", trainable=True)
    later.double().set_adapter("other")
    assert flags(later) == flags(reference)
    assert relative(step(later, given), step(reference, given)) <= FP64
    with pytest.raises(colrow.CheckpointError, match="the model has an adapter 'other'"):
        load_adapter(later, folder, name="other")


def test_several_adapters_of_which_one_is_trained(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(other_adapters, str(tmp_path / "adapters"))


def one_after_the_other() -> None:
    """A second adapter for layers that are split, and have split adapters."""
    base = tiny("gpt2").double()
    reference, split = pair(base, [*TARGETS["gpt2"], "wte"], before=False)
    for model, start in ((reference, False), (split, True)):
        model.add_adapter("more", config(TARGETS["gpt2"], r=3, init_lora_weights=start))
        model.set_adapter("more")
    colrow.parallelize(split.double(), mesh())
    copy_adapters(split, reference.double())
    given = batch(base)
    assert relative(step(split, given), step(reference, given)) <= FP64
    check_grads(split, reference, GRADS)
    with pytest.raises(colrow.PlanError, match="is split already"):
        colrow.parallelize(split, mesh())
    split.add_adapter("table", config(["wte"], init_lora_weights=True))
    with pytest.raises(colrow.PlanError, match="an embedding's adapters are split together"):
        colrow.parallelize(split, mesh())


def test_a_second_adapter_after_the_split(ranks: Any) -> None:
    ranks(2).run(one_after_the_other)


def fresh_values() -> dict[str, Tensor]:
    """Adapters added after the split, before they have learnt anything."""
    split: Any = colrow.parallelize(tiny("gpt2"), mesh())
    torch.manual_seed(3)
    where = torch.get_rng_state()
    split = peft.get_peft_model(split, config([*TARGETS["gpt2"], "wte"], init_lora_weights=True, r=3))
    torch.set_rng_state(where)
    split.add_adapter("wide", config(TARGETS["gpt2"], r=3, init_lora_weights="gaussian"))
    values = full_state_dict(colrow.parallelize(split, mesh()))
    return {name: value for name, value in values.items() if "lora_" in name}


def test_adapters_start_alike_at_every_degree(ranks: Any) -> None:
    want = ranks(1).run(fresh_values)[0]
    drawn = [name for name, value in want.items() if value.any()]
    assert len(drawn) == len(want) / 2 and any("wide" in name for name in drawn), drawn
    assert len({float(want[name].double().sum()) for name in drawn}) == len(drawn), "no two are equal"
    for tp in (2, 3):
        for got in ranks(tp).run(fresh_values):
            assert got.keys() == want.keys()
            assert all(torch.equal(got[name], value) for name, value in want.items())


def saved_and_loaded(family: str, kind: str | None, targets: list[str], options: dict[str, Any], folder: str) -> None:
    base = tiny(family, kind).double()
    given = batch(base)
    reference, split = pair(base, targets, **options)
    assert relative(step(split, given), step(reference, given)) <= FP64
    check_grads(split, reference, GRADS)
    colrow.save_pretrained(split, folder)
    if dist.get_rank() == 0:
        reference.save_pretrained(f"{folder}-wanted", save_embedding_layers=False)
    want = logits(reference, given)
    plain = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder).double()
    assert relative(logits(plain, given), want) <= FP64
    assert relative(logits(colrow.parallelize(plain, mesh()), given), want) <= FP64
    onto = load_adapter(colrow.parallelize(copy.deepcopy(base), mesh()), folder).double()
    assert relative(logits(onto, given), want) <= FP64
    assert not any(flags(onto).values())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("family", "kind", "targets", "options"),
    [
        ("gpt2", None, TARGETS["gpt2"], {"lora_bias": True}),
        ("llama", None, TARGETS["llama"], {}),
        ("llama", "AutoModelForSequenceClassification", SOME, {"modules_to_save": ["score"]}),
    ],
    ids=["gpt2", "embeddings", "a classifier"],
)
def test_saved_adapters_load_on_plain_and_on_split_models(
    ranks: Any, size: int, family: str, kind: str | None, targets: list[str], options: dict[str, Any], tmp_path: Path
) -> None:
    ranks(size).run(saved_and_loaded, family, kind, targets, options, str(tmp_path / "adapter"))
    same_folder(tmp_path / "adapter", tmp_path / "adapter-wanted")


def bad_adapters(folder: str) -> None:
    base = tiny("llama")
    if dist.get_rank() == 0:
        with_adapters(tiny("llama", hidden_size=40), SOME).save_pretrained(f"{folder}/wide")
        with_adapters(base, SOME, use_dora=True).save_pretrained(f"{folder}/dora")
    dist.barrier()
    split = colrow.parallelize(base, mesh())
    before = flags(split)
    for name, error, message in (
        ("none", colrow.CheckpointError, "there is no adapter_config.json in it"),
        ("wide", colrow.CheckpointError, "in the file and .* in the model"),
        ("dora", colrow.PlanError, "an adapter of type .*LORA with use_dora"),
    ):
        with pytest.raises(error, match=message):
            load_adapter(split, f"{folder}/{name}")
        assert flags(split) == before, "the model is as it was"


def test_an_adapter_that_does_not_fit_leaves_the_model_as_it_was(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(bad_adapters, str(tmp_path))


def merged(family: str, changes: dict[str, Any], options: dict[str, Any], folder: str) -> None:
    base = tiny(family, **changes).double()
    given = batch(base)
    for before in (True, False):
        reference, split = pair(base, TARGETS[family], before, **options)
        want, got = reference.merge_and_unload(), split.merge_and_unload()
        whole = colrow.full_state_dict(got)
        assert whole.keys() == want.state_dict().keys()
        for name, value in want.state_dict().items():
            assert relative(whole[name], value) <= FP64, f"LORA-6: {name} is not W + scaling B A"
        assert relative(logits(got, given), logits(want, given)) <= FP64
    colrow.save_pretrained(got, folder)
    found: Any = type(base)
    loaded = found.from_pretrained(folder, dtype=torch.float64).state_dict()
    assert all(relative(loaded[name], value) <= FP64 for name, value in want.state_dict().items())


@pytest.mark.parametrize(
    ("size", "family", "changes", "options"),
    [
        (2, "gpt2", {}, {"lora_bias": True}),
        (3, "llama", {}, {}),
        (3, "falcon", ODD | {"new_decoder_architecture": False}, {}),
    ],
    ids=["gpt2", "llama", "falcon"],
)
def test_LORA_6_merging(
    ranks: Any, size: int, family: str, changes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """Conv1D, row layers, key/value heads that are whole at rest, an embedding with padding, fused heads."""
    ranks(size).run(merged, family, changes, options, str(tmp_path / "merged"))


def sent(targets: list[str]) -> dict[str, int]:
    """The collectives of a backward pass, and no gradient for what is frozen."""
    base = tiny("llama").double()
    _, split = pair(base, targets)
    with KeepDouble():
        loss = split(**batch(base)).loss
        with Wire() as wire:
            loss.backward()
    assert all(param.grad is None for name, param in split.named_parameters() if ".lora_" not in name)
    return counts(wire.log)


def test_frozen_layers_cost_no_gradients_and_no_second_gather(ranks: Any) -> None:
    """Two blocks. Backward gathers what row layers sum; not for the first block's frozen attention, which has no
    gradient to pass on. A column layer's input is gathered again only for its adapter."""
    # three frozen row layers, and two adapters of row layers
    rows = ranks(2).run(sent, ["o_proj"])[0]
    assert (rows["all_gather"], rows["reduce_scatter"]) == (3 + 2, 3)
    # four row layers, and three inputs that have gradients
    columns = ranks(2).run(sent, ["q_proj", "k_proj", "up_proj"])[0]
    assert (columns["all_gather"], columns["reduce_scatter"]) == (4 + 3, 3)


def dropped(family: str, sequence_parallel: bool) -> None:
    found = []
    for axis in (mesh((dist.get_world_size(), 1), ("dp", "tp"))["tp"], mesh()):
        base = tiny(family).double()
        given, reference = batch(base), with_adapters(base, TARGETS[family], lora_dropout=0.3)
        split = colrow.parallelize(reference.train(), axis, sequence_parallel=sequence_parallel)
        torch.manual_seed(7)
        found.append((step(split, given), colrow.full_grads(split)))
    (want, wanted), (got, grads) = found
    if dist.get_rank():  # the draws of a replica follow from its first rank: rank 0 has the same alone and together
        return
    assert relative(got, want) <= 1e-12
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    assert all(float((grads[name] - grad).abs().max()) <= 1e-12 * largest for name, grad in wanted.items())


@BOTH
@pytest.mark.parametrize(("size", "family"), [(2, "llama"), (3, "gpt2"), (3, "deepseek_v3")])
def test_dropout_before_the_adapters_is_the_same_at_every_degree(
    ranks: Any, size: int, family: str, sequence_parallel: bool
) -> None:
    ranks(size).run(dropped, family, sequence_parallel)


def used(folder: str) -> None:
    """Checkpointed activations, a checkpoint of the run, generation."""
    base, targets = tiny("gpt2").double(), TARGETS["gpt2"]
    given = batch(base)
    reference, split = pair(base, targets)
    split.gradient_checkpointing_enable()
    split.enable_input_require_grads()
    split.train()
    assert relative(step(split, given), step(reference, given)) <= FP64
    check_grads(split, reference, GRADS)
    optimizer = torch.optim.AdamW([param for param in split.parameters() if param.requires_grad])
    optimizer.step()
    checkpoint.save(folder, split, optimizer, {"step": 1})
    _, other = pair(base, targets, before=False)
    resumed = torch.optim.AdamW([param for param in other.parameters() if param.requires_grad])
    checkpoint.load(folder, other, resumed)
    assert relative(logits(other, given), logits(split, given)) == 0
    ids = given["input_ids"][1:]
    options = {"input_ids": ids, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with KeepDouble():
        want = reference.eval().generate(**options)
        copy_adapters(other, reference)
        assert torch.equal(other.generate(**options), want)


def test_checkpointing_resuming_and_generation(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(used, str(tmp_path / "run"))


def refused(kind: str) -> None:
    plain = {"target_modules": ["q_proj"], "init_lora_weights": False}
    made = {
        "dora": lambda model: peft.get_peft_model(model, peft.LoraConfig(**plain, use_dora=True)),
        "ia3": lambda model: peft.get_peft_model(
            model, peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
        ),
        "experts": lambda model: peft.get_peft_model(model, peft.LoraConfig(target_parameters=["experts.down_proj"])),
        "prompts": lambda model: peft.get_peft_model(
            model, peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
        ),
        "values": lambda model: peft.get_peft_model(model, peft.LoraConfig(**plain)),
    }
    model = tiny("mixtral" if kind == "experts" else "llama")
    if kind == "values":
        model = colrow.parallelize(model, mesh())
    model = made[kind](model)
    before = {name: (type(module), id(module)) for name, module in model.named_modules()}
    try:
        colrow.parallelize(model, mesh())
    finally:
        assert before == {name: (type(module), id(module)) for name, module in model.named_modules()}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("dora", "DoraLinearVariant.*plain LoRA"),
        ("ia3", "ia3.layer.Linear; adapters beside split layers are plain LoRA"),
        ("experts", "ParamWrapper.*plain LoRA"),
        ("prompts", "prompts that are learned"),
        ("values", "init_lora_weights=False; added after the split"),
    ],
)
def test_what_cannot_be_split_is_refused_on_every_rank(ranks: Any, kind: str, message: str) -> None:
    errors = ranks(2).run(refused, kind, expect_errors=True)
    assert len({(error.type_name, error.message) for error in errors}) == 1
    assert errors[0].type_name == "PlanError"
    assert re.search(message, errors[0].message)
