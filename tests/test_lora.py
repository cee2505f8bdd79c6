"""LoRA adapters of `peft` on split models: exact, saved as a plain adapter, merged."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import colrow
from colrow.models.tiny import batch, tiny
from colrow.params import shard_like, splits
from colrow.precision import KeepDouble
from oracle import FP64, check_grads, relative
from pool import mesh

peft = pytest.importorskip("peft", reason="peft is not installed: no test of adapters")

TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "bert": ["query", "value", "dense"],
    "opt": ["q_proj", "out_proj", "fc1", "fc2"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"],
}
BOTH = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])


def config(family: str, **options: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=TARGETS[family], **options)


def pair(family: str, sequence_parallel: bool, before: bool) -> tuple[Any, Any, dict[str, Tensor]]:
    """The reference with adapters of random values, and a split model with the same."""
    base = tiny(family).double()
    given = batch(base)
    reference = peft.get_peft_model(copy.deepcopy(base), config(family, init_lora_weights=False)).double()
    if before:
        split = colrow.parallelize(copy.deepcopy(reference), mesh(), sequence_parallel=sequence_parallel)
        return reference, split, given
    split = colrow.parallelize(copy.deepcopy(base), mesh(), sequence_parallel=sequence_parallel)
    split = colrow.parallelize(peft.get_peft_model(split, config(family)).double(), mesh())
    values, by_name = dict(reference.named_parameters()), splits(split)
    with torch.no_grad():
        for name, param in split.named_parameters():
            if ".lora_" in name:
                param.copy_(shard_like(values[name].detach(), by_name.get(name), param))
    return reference, split, given


def exact(family: str, sequence_parallel: bool) -> None:
    for before in (True, False):
        reference, split, given = pair(family, sequence_parallel, before)
        trained = [name for name, param in split.named_parameters() if param.requires_grad]
        assert trained == [name for name, param in reference.named_parameters() if param.requires_grad]
        with KeepDouble():
            want, got = reference(**given), split(**given)
            want.loss.backward()
            got.loss.backward()
        assert relative(got.loss, want.loss) <= FP64
        check_grads(split, reference, 1e-9)  # only adapters have gradients, on both sides


@BOTH
@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("size", [2, 3])
def test_LORA_3_adapters_added_before_and_after_the_split(
    ranks: Any, size: int, family: str, sequence_parallel: bool
) -> None:
    ranks(size).run(exact, family, sequence_parallel, timeout=60)


def saved_and_merged(family: str, folder: str, sequence_parallel: bool) -> None:
    reference, split, given = pair(family, sequence_parallel, before=False)
    colrow.save_pretrained(split, folder)
    with torch.no_grad(), KeepDouble():
        want = reference.eval()(**given).logits
        loaded = peft.PeftModel.from_pretrained(tiny(family).double(), folder).double().eval()
        assert relative(loaded(**given).logits, want) <= FP64, "the saved adapter is the reference's"
        merged = split.eval().merge_and_unload()
        logits: Any = merged(**{name: x for name, x in given.items() if name != "labels"}).logits
        assert relative(logits, want) <= FP64, "LORA-6: the merged weights are W + scaling B A"
    whole = colrow.full_state_dict(merged)
    for name, value in reference.merge_and_unload().state_dict().items():
        assert relative(whole[name], value) <= FP64, name


@BOTH
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_LORA_6_a_plain_adapter_is_saved_and_merging_is_right(
    ranks: Any, family: str, sequence_parallel: bool, tmp_path: Path
) -> None:
    ranks(2).run(saved_and_merged, family, str(tmp_path / "adapter"), sequence_parallel, timeout=60)
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def refused() -> None:
    split = colrow.parallelize(tiny("llama"), mesh())
    dora = peft.get_peft_model(tiny("llama"), peft.LoraConfig(target_modules=["q_proj"], use_dora=True))
    with pytest.raises(colrow.PlanError, match="adapters beside split layers are plain LoRA"):
        colrow.parallelize(dora, mesh())
    other = peft.get_peft_model(split, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    with pytest.raises(colrow.PlanError, match="init_lora_weights=True"):
        colrow.parallelize(other, mesh())


def test_adapters_that_cannot_be_split_are_refused(ranks: Any) -> None:
    ranks(2).run(refused, timeout=60)
