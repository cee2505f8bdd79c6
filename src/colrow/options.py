"""The options of `colrow train`: a typed value, checked before a rank is started."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from colrow.errors import DataError
from colrow.models import GPTConfig
from colrow.source import OWN

_OF_GPT = ("layers", "width", "heads", "dropout", "gated", "rotary", "vocab_size", "sample")
_OF_LORA = ("lora_rank", "lora_alpha", "lora_targets")


@dataclass(frozen=True)
class TrainOptions:
    """Train a small GPT, or finetune a language model from a Hugging Face folder (--model), split over ranks.

    Without options: a GPT, on the source files of Python's standard library. With --model DIR --data FILE: all weights
    of that model, or with --lora-rank adapters beside them. The result is a plain Hugging Face folder, OUT/model (of
    adapters, a peft one). The defaults are then --steps 100 --batch 2 --context 512 (at most the model's) --lr 2e-5
    (2e-4 for adapters) --warmup 10 --save-every 50 --eval-every 50.
    """

    model: str = OWN
    """gpt: a new one, of the sizes below. Or a Hugging Face folder with a causal language model and its tokenizer."""
    tp: int = 1
    """Ranks to split the model over. Under torchrun the other ranks are data-parallel replicas."""
    data: tuple[Path, ...] = ()
    """Text files or folders; for gpt, without any, source files of this Python's standard library. With --model DIR a
    text file is a document; *.jsonl and *.parquet hold one a line, {"text": ...}, or {"prompt": ..., "completion": ...}
    of which the completion alone is learnt. Documents follow one another, each ended by the eos token, cut into rows of
    --context tokens: a row may hold parts of several, which see each other."""
    out: Path | None = None
    """Folder for checkpoints and metrics; without it, a new one in runs/ (with --resume, the latest there)."""
    resume: bool = False
    """Go on from the last checkpoint, with the run's own options where none are given; at any --tp."""
    steps: int = 600
    """Steps in all. A resumed run that has done them does as many again."""
    batch: int = 12
    """Rows of text in one micro-batch of one replica."""
    accumulate: int = 1
    """Micro-batches in one step."""
    lr: float = 3e-3
    """Learning rate at its highest: after the warm-up, before a cosine brings it down to a tenth."""
    warmup: int = 20
    """Steps over which the learning rate rises."""
    weight_decay: float = 0.1
    clip: float = 1.0
    """Largest norm of the gradients."""
    seed: int = 0
    """Rules the initial weights, the order of the text, dropout and the sample."""
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64
    """Tokens in one row."""
    dropout: float = 0.1
    gated: bool = False
    """SwiGLU and RMSNorm instead of GeLU and LayerNorm."""
    rotary: bool = False
    """Rotary positions instead of learned ones."""
    vocab_size: int = 256
    """256: bytes are tokens. More: a BPE of so many, learnt from the text."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """auto: float32 for gpt; with --model DIR that of its config. In bfloat16 small updates are rounded away: float32
    learns more at a low --lr."""
    sequence_parallel: bool = True
    """Keep norms, dropout and residuals on 1/tp of the tokens."""
    save_every: int = 200
    """Steps between checkpoints; the last step saves in any case."""
    eval_every: int = 100
    """Steps between validations."""
    sample: int = 200
    """Tokens of text to write at the end; 0: none."""
    lora_rank: int = 0
    """With --model DIR: train adapters of this rank (LoRA) and leave the model as it is; 0: train all weights."""
    lora_alpha: int = 16
    """Adapters count alpha / rank times."""
    lora_targets: str = "all-linear"
    """The layers that get adapters: the ends of their names, joined by commas. all-linear: those of attention and
    MLP."""
    json: bool = False
    """Print one JSON object on stdout at the end, and all else on stderr."""

    def check(self) -> None:
        """Refuse numbers that no run can have.

        Raises:
            DataError: says which option.
        """
        least = {"warmup": 0, "weight_decay": 0, "dropout": 0, "sample": 0, "lora_rank": 0, "seed": -math.inf}
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            option, low = f"--{name.replace('_', '-')}", least.get(name)
            if not math.isfinite(value) or (value <= 0 if low is None else value < low):
                allowed = "a positive number is needed" if low is None else "zero is the least"
                raise DataError(option, str(value), allowed, f"Give {option} another value")
        if self.finetunes:
            refuse_given(self, _OF_GPT, f"--model {self.model}", f"it is for --model {OWN}; other models have a config")
        else:
            refuse_given(self, _OF_LORA, f"--model {OWN}", "adapters are for a model that has learnt something")
        if self.dropout >= 1:
            raise DataError("--dropout", f"{self.dropout}", "a probability below 1 is needed", "Give 0.1, say")
        if self.width % self.heads or (self.rotary and self.width // self.heads % 2):
            allowed = f"the width must be a multiple of {self.heads * (1 + self.rotary)}"
            raise DataError("--width", f"{self.width} for {self.heads} heads", allowed, "Change --width or --heads")

    @property
    def finetunes(self) -> bool:
        """Whether the model comes from a folder."""
        return self.model != OWN

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """None: as the model has it."""
        return None if self.dtype == "auto" else getattr(torch, self.dtype)

    @property
    def tokens_per_step(self) -> int:
        """Of one replica."""
        return self.batch * self.accumulate * self.context

    def gpt(self, vocab: int) -> GPTConfig:
        return GPTConfig(
            vocab=vocab,
            context=self.context,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            dropout=self.dropout,
            gated=self.gated,
            rotary=self.rotary,
        )

    def saved(self) -> dict[str, Any]:
        """What a run's folder keeps of them, as JSON values."""
        settings = {name: value for name, value in asdict(self).items() if name not in ("out", "resume", "json")}
        model = str(Path(self.model).resolve()) if self.finetunes else self.model
        return settings | {"data": [str(path.resolve()) for path in self.data], "model": model}

    @staticmethod
    def from_saved(settings: dict[str, Any]) -> TrainOptions:
        """The options that `saved` has written; those of other versions that are not known here are left out."""
        known: dict[str, Any] = {name: settings[name] for name in TrainOptions().saved() if name in settings}
        known["data"] = tuple(map(Path, known.get("data", ())))
        return TrainOptions(**known)


def refuse_given(options: Any, names: Iterable[str], beside: str, allowed: str) -> None:
    """An error if one of the options `names` is not at its default."""
    for field in fields(options):
        if field.name in names and getattr(options, field.name) != field.default:
            option = f"--{field.name.replace('_', '-')}"
            raise DataError(option, f"given with {beside}", allowed, "Leave it out")
