"""Where a model comes from that a command is given by name: built in, or a Hugging Face folder or config.

    find("llama")                 a tiny random model of that family; find("gpt") is colrow's own
    find("path/to/model")         config.json and *.safetensors in a folder; without weights, random ones
    find("path/to/config.json")   random weights
    find_language_model(path)     a folder with weights and a tokenizer, or an error

A source is a small value that every rank is told; each then builds the same model from it. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colrow import families
from colrow.errors import DataError, near_misses
from colrow.models import GPT, GPTConfig, tiny
from colrow.pretrained import TOKENIZER_FILES

Shape = tuple[int, int]
"""Of a batch: rows, and tokens in each."""
OWN = "gpt"
"""The name of colrow's own model."""
TEXT_TOKENS = 256
"""Tokens that are made of a text at most."""


@dataclass(frozen=True)
class OwnModel:
    """A tiny GPT of colrow's own."""

    def build(self, *, dropout: float, seed: int) -> nn.Module:
        config = GPTConfig(vocab=61, context=64, layers=2, width=32, heads=4, kv_heads=2, ffn=48, dropout=dropout)
        return tiny.randomize(GPT(config), seed)

    def batch(self, model: nn.Module, *, seed: int, shape: Shape | None = None) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens, targets = torch.randint(61, (2, *(shape or (2, 13))), generator=generator).to(
            next(model.parameters()).device
        )
        return {"tokens": tokens, "targets": targets}


@dataclass(frozen=True)
class Tiny:
    """A tiny random model of a family."""

    family: str

    def build(self, *, dropout: float, seed: int) -> nn.Module:
        quiet_transformers()
        return tiny.tiny(self.family, dropout=dropout, seed=seed)

    def batch(self, model: nn.Module, *, seed: int, shape: Shape | None = None) -> dict[str, Tensor]:
        return tiny.batch(model, seed, shape)

    def on_meta(self) -> nn.Module:
        quiet_transformers()
        family, _ = tiny.resolve_alias(self.family, {})
        with torch.device("meta"):
            return tiny.from_config(tiny.tiny_config(self.family), tiny.FAMILIES[family].kinds[0])


@dataclass(frozen=True)
class Saved:
    """A folder as `save_pretrained` writes it, or a config.json alone; `text` is a file to make a batch of."""

    path: Path
    text: Path | None = None

    def build(self, *, dropout: float, seed: int) -> nn.Module:
        config = tiny.set_dropout(self._config(), dropout)
        kind = self._kind(config)
        if self.has_weights:
            with self._readable("its weights cannot be loaded"):
                found = getattr(quiet_transformers(), kind)
                model = found.from_pretrained(self.path, config=config, local_files_only=True, use_safetensors=True)
        else:
            model = tiny.randomize(tiny.from_config(config, kind), seed)
        eager: Any = model
        eager.set_experts_implementation("eager")  # fused kernels know no float64; without experts it does nothing
        return tiny.same_dropout(model, dropout)

    def batch(self, model: nn.Module, *, seed: int, shape: Shape | None = None) -> dict[str, Tensor]:
        if self.text is None:
            return tiny.batch(model, seed, shape)
        ids = self.read().to(next(model.parameters()).device)
        return {"input_ids": ids, "labels": ids}

    def read(self) -> Tensor:
        """The first tokens of the text, (1, n): `TEXT_TOKENS` at most, and no more than the model takes.

        Raises:
            DataError: no text can be read, or too little.
        """
        where, tokenizer = f"--text {self.text}", self.tokenizer()
        try:
            content = self.text.read_text("utf-8") if self.text is not None else ""
        except (OSError, UnicodeDecodeError) as error:
            said = getattr(error, "strerror", None) or "it is not UTF-8"
            raise DataError(where, said, "a text file in UTF-8 is needed", "Give another file") from error
        found = tokenizer(content)["input_ids"][: min(TEXT_TOKENS, self.positions or TEXT_TOKENS)]
        if len(found) < 2:
            raise DataError(where, f"{len(found)} tokens", "two are needed, to predict one", "Give more text")
        ids = torch.tensor([found])
        self.require_known(ids, tokenizer)
        return ids

    def on_meta(self) -> nn.Module:
        """The model without memory, in its config's dtype."""
        config = self._config()
        with torch.device("meta"):
            return tiny.from_config(config, self._kind(config)).to(getattr(config, "dtype", None) or torch.float32)

    @property
    def has_weights(self) -> bool:
        return self.path.is_dir() and any(self.path.glob("*.safetensors"))

    @property
    def kind(self) -> str:
        """The name of its class."""
        return self._kind(self._config())

    @property
    def is_causal(self) -> bool:
        """Whether it is a causal language model, with its head."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

        return self.kind in {"AutoModelForCausalLM", *known.values()}

    @property
    def positions(self) -> int | None:
        """The most tokens that it takes in a row, if there is a limit."""
        return getattr(self._config().get_text_config(), "max_position_embeddings", None)

    def tokenizer(self) -> Any:
        """Its tokenizer, from the files in the folder.

        Raises:
            DataError: there is none, or it cannot be used.
        """
        if not any(file for pattern in TOKENIZER_FILES for file in self.path.glob(pattern)):
            given, fix = "there is no tokenizer in it", "Write it there with tokenizer.save_pretrained(...)"
            raise DataError(f"--model {self.path}", given, "a folder with tokenizer.json beside config.json", fix)
        with self._readable("its tokenizer cannot be used"):
            return quiet_transformers().AutoTokenizer.from_pretrained(self.path, local_files_only=True)

    def require_known(self, ids: Tensor, tokenizer: Any) -> None:
        """Raises: DataError: the tokenizer gives tokens that the model does not have."""
        vocab, largest = self._config().get_text_config().vocab_size, int(ids.max())
        if largest >= vocab:
            given = f"its tokenizer makes token {largest} ({tokenizer.decode([largest])!r}), the model has {vocab}"
            fix = "Give the folder the tokenizer that the model was trained with"
            raise DataError(f"--model {self.path}", given, "tokenizer and model share one vocabulary", fix)

    def _config(self) -> Any:
        with self._readable("its config cannot be used"):
            return quiet_transformers().AutoConfig.from_pretrained(self.path, local_files_only=True)

    def _kind(self, config: Any) -> str:
        """The class that the config names; without a name, a language model."""
        kind = (config.architectures or ["AutoModelForCausalLM"])[0]
        if not hasattr(quiet_transformers(), kind):
            fix = "Load the model in Python, and compare it with colrow.parallelize(model, mesh['tp'], plan)"
            raise DataError(f"--model {self.path}", f"its class is {kind}", "it must be one of transformers'", fix)
        return kind

    @contextmanager
    def _readable(self, given: str) -> Iterator[None]:
        """What transformers says of a folder that it cannot use, in our words."""
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            said = " ".join(str(error).split())
            allowed, fix = "a folder as save_pretrained writes it", "Check the folder, or give config.json alone"
            raise DataError(f"--model {self.path}", f"{given} ({said[:300]})", allowed, fix) from error


def names() -> list[str]:
    """The built-in models: colrow's own, a tiny one of every family, and their other names."""
    known = [name for name in tiny.FAMILIES if name in families.FAMILIES]
    return [OWN, *known, *(alias for alias, (family, _) in tiny.ALIASES.items() if family in known)]


def find(model: str) -> OwnModel | Tiny | Saved:
    """What `--model` names. Reads at most a config, and starts nothing.

    Raises:
        DataError: no such name or folder, a folder that no model can be built from, or transformers is missing.
    """
    if model == OWN:
        return OwnModel()
    if model not in names():
        _check_path(model)
    if importlib.util.find_spec("transformers") is None:
        given = "transformers is not installed"
        raise DataError(f"--model {model}", given, "it builds Hugging Face models", "pip install 'colrow[hf]'")
    return Tiny(model) if model in names() else Saved(Path(model))


def find_language_model(model: str) -> Saved:
    """The folder that `--model` names, with the weights of a causal language model. Reads its config.

    Raises:
        DataError: as `find`, or it is another kind of model, or has no weights.
    """
    where, found = f"--model {model}", find(model)
    if not isinstance(found, Saved):
        given, fix = "it is built in, tiny and random, without a tokenizer", "Give the path of a folder"
        raise DataError(where, given, "a Hugging Face folder with weights and a tokenizer", fix)
    if not found.has_weights:
        given, fix = "there are no *.safetensors in it", "Give a folder as save_pretrained writes it"
        raise DataError(where, given, "a Hugging Face folder with weights and a tokenizer", fix)
    if not found.is_causal:
        given = f"it is a {found.kind}"
        raise DataError(where, given, "a causal language model (...ForCausalLM)", "Give the folder of another model")
    return found


def _check_path(model: str) -> None:
    """Refuse what is neither a folder with a config.json nor such a file."""
    where, path = f"--model {model}", Path(model)
    config = path / "config.json" if path.is_dir() else path
    if not path.exists():
        allowed = f"it may be a folder, a config.json, or a built-in model such as {near_misses(model, names())}"
        raise DataError(where, "there is no such model or path", allowed, "colrow families lists those built in")
    if not config.is_file():
        given, allowed = "the folder has no config.json", "a folder as save_pretrained writes it"
        raise DataError(where, given, allowed, "Give the folder that holds config.json")
    try:
        content = json.loads(config.read_bytes())
    except (OSError, ValueError) as error:
        allowed, fix = "a config is a JSON object", "Give a folder as save_pretrained writes it, or its config.json"
        raise DataError(where, f"{config.name} is not readable JSON", allowed, fix) from error
    if not isinstance(content, dict) or "model_type" not in content:
        allowed, fix = "a Hugging Face config names its model_type", "Write the config with save_pretrained"
        raise DataError(where, f"{config.name} names no model_type", allowed, fix)
    if "quantization_config" in content:
        given, allowed = "its weights are quantised", "weights in a floating-point dtype"
        raise DataError(where, given, allowed, "Give the model that it was made from")
    if path.is_dir() and any(path.glob("*.bin")) and not any(path.glob("*.safetensors")):
        given, allowed = "its weights are pickled (*.bin)", "*.safetensors"
        raise DataError(where, given, allowed, "Write them anew with model.save_pretrained(...)")


def quiet_transformers() -> Any:
    """The package, with nothing to say on stdout or stderr: the command speaks."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
