"""The options of the commands that use a model: `colrow verify`, `trace`, `plan`, `generate`, `families`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from colrow.errors import DataError
from colrow.models import GPT
from colrow.options import TrainOptions, refuse_given
from colrow.report import Watching
from colrow.source import OWN, OwnModel, find, find_language_model
from colrow.trial import Source
from colrow.verdict import Settings


@dataclass(frozen=True)
class VerifyOptions:
    """Prove that a split equals one process: loss, logits, every gradient and the weights after a step, at any --tp.

    It starts its own ranks, on the CPU, or runs under torchrun. Exit code: 0 holds, 1 does not hold, 2 wrong use. Begin
    with colrow verify --model llama --tp 3; then give a folder of yours. What does not hold is traced to the first
    module that differs, and its likely cause. In memory it takes tp + 2 copies of the model, in --dtype.
    """

    model: str = OWN
    """A Hugging Face folder (config.json and *.safetensors), a config.json (random weights), or the name of a tiny
    built-in model: `colrow families` lists them."""
    tp: int = 2
    """Ranks to split it over; it need not divide anything."""
    sequence_parallel: bool = True
    """Keep norms, dropout and residuals on 1/tp of the tokens."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """float64 asks whether the algebra is right. The others ask whether the split is as exact as one process in that
    dtype, both measured against float64."""
    dropout: float = 0.0
    """Every probability of dropout in the model. Above 0 the comparison is with colrow on one rank, whose masks are
    the same."""
    seed: int = 0
    """Rules random weights, the batch and dropout."""
    text: Path | None = None
    """A text file: its first 256 tokens, by the folder's tokenizer, are the batch. Without it: random tokens."""
    verbose: bool = False
    """Show the gradient of every parameter, not the worst few."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else."""

    def check(self) -> None:
        """Raises: DataError: says which option no run can have."""
        _check_tp(self.tp)
        if not (math.isfinite(self.dropout) and 0 <= self.dropout < 1):
            raise DataError("--dropout", str(self.dropout), "a probability below 1 is needed", "Give 0.1, say")

    def source(self) -> Source:
        """Raises: DataError: there is no such model, or no text of it can be read."""
        if self.text is None:
            return find(self.model)
        found = replace(find_language_model(self.model), text=self.text)
        found.read()
        return found

    def settings(self) -> Settings:
        return Settings(self.tp, self.sequence_parallel, self.dtype, self.dropout, self.seed)


@dataclass(frozen=True)
class PlanOptions:
    """Show what becomes of each parameter and what it costs: rule, shapes, bytes on a rank, padding. Starts no ranks.

    Says what stays whole on every rank and why, and warns of choices that cost more than they need to. The model is not
    loaded: a config is enough, so the largest takes seconds.
    """

    model: str = OWN
    """A Hugging Face folder or config.json, or the name of a tiny built-in model: `colrow families` lists them. The
    sizes below are for `gpt`."""
    tp: int = 2
    """Ranks to split it over; it need not divide anything."""
    sequence_parallel: bool = True
    """Keep norms, dropout and residuals on 1/tp of the tokens. It changes activations, not what is stored."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Of the parameters that are counted. auto: that of the model's config."""
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64
    vocab_size: int = 256
    gated: bool = False
    """SwiGLU and RMSNorm instead of GeLU and LayerNorm."""
    rotary: bool = False
    """Rotary positions instead of learned ones."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else."""

    def check(self) -> None:
        """Raises: DataError: says which option no model can have."""
        _check_tp(self.tp)
        if self.model == OWN:
            self._training().check()
            return
        refuse_given(self, _SIZES, f"--model {self.model}", f"it is for --model {OWN}; other models have a config")

    def on_meta(self) -> nn.Module:
        """The model, without memory."""
        source = find(self.model)
        if isinstance(source, OwnModel):
            with torch.device("meta"):
                model = GPT(self._training().gpt(self.vocab_size))
        else:
            model = source.on_meta()
        return model if self.dtype == "auto" else model.to(getattr(torch, self.dtype))

    def _training(self) -> TrainOptions:
        return TrainOptions(**{name: getattr(self, name) for name in _SIZES})


@dataclass(frozen=True)
class TraceOptions:
    """Watch one step of training: what is sent, and what is kept for backward, by layer and part, against the formula.

    It starts its own ranks, on the CPU, or runs under torchrun. Pictures show a layer as it ran. Begin with colrow
    trace --model llama --tp 2; then give a folder of yours.
    """

    model: str = OWN
    """A Hugging Face folder, a config.json (random weights), or the name of a tiny built-in model: `colrow families`
    lists them."""
    tp: int = 2
    """Ranks to split it over; it need not divide anything."""
    sequence_parallel: bool = True
    """Keep norms, dropout and residuals on 1/tp of the tokens."""
    batch: int = 2
    """Rows of random tokens (or images)."""
    sequence: int = 16
    """Tokens in a row."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations."""
    recompute: Literal["elementwise", "none"] = "elementwise"
    """What is made again in backward, and not kept: norms and activations, or nothing."""
    seed: int = 0
    """Rules random weights and the batch."""
    html: Path | None = None
    """Write a page with everything to this file: no network is needed to read it."""
    svg: Path | None = None
    """Write a drawing of the first layer to this file."""
    excalidraw: Path | None = None
    """The same, to open and edit in Excalidraw."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else."""

    def check(self) -> None:
        """Raises: DataError: says which option cannot be."""
        _check_tp(self.tp)
        for name in ("batch", "sequence"):
            if getattr(self, name) < 1:
                fix = f"Give --{name} another value"
                raise DataError(f"--{name}", str(getattr(self, name)), "a positive number is needed", fix)
        for name in ("html", "svg", "excalidraw"):
            file: Path | None = getattr(self, name)
            if file is not None and not file.absolute().parent.is_dir():
                given, fix = f"there is no folder {file.absolute().parent}", "Make it, or give another path"
                raise DataError(f"--{name}", given, "a file in a folder that is there", fix)

    def watching(self) -> Watching:
        o = self
        return Watching(o.model, o.tp, o.sequence_parallel, o.batch, o.sequence, o.dtype, o.recompute, o.seed)


_SIZES = ("layers", "width", "heads", "context", "vocab_size", "gated", "rotary")


@dataclass(frozen=True)
class FamiliesOptions:
    """List the families of models that are split without a plan. Each name is also a tiny built-in model."""

    json: bool = False
    """Print one JSON object on stdout, and nothing else."""


@dataclass(frozen=True)
class GenerateOptions:
    """Go on with a prompt: a language model from a Hugging Face folder, split over ranks. The text comes as it is made.

    Greedy, unless --temperature or --top-p is given: then tokens are drawn, the same at every --tp up to rounding.
    """

    model: str
    """A Hugging Face folder with a causal language model and its tokenizer."""
    prompt: str
    """What to go on with; - reads it from stdin."""
    tp: int = 1
    """Ranks to split the model over; it need not divide anything."""
    max_new_tokens: int = 100
    """Tokens to add at most; the model may end before."""
    temperature: float = 0.0
    """Above 0: draw tokens, likely ones more often the lower it is."""
    top_p: float = 1.0
    """Below 1: draw from the likeliest tokens that have this probability together."""
    seed: int = 0
    """Rules the draws."""
    beams: int = 1
    """Above 1: search for a likely text along so many. It is then shown at the end."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else."""

    def check(self) -> None:
        """Raises: DataError: says which option cannot be."""
        _check_tp(self.tp)
        for name, value, fits, allowed in (
            ("max-new-tokens", self.max_new_tokens, self.max_new_tokens > 0, "a positive number is needed"),
            ("beams", self.beams, self.beams > 0, "a positive number is needed"),
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "zero is the least"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "a probability above 0 is needed"),
            ("prompt", repr(self.prompt), bool(self.prompt), "a model goes on with something"),
        ):
            if not fits:
                raise DataError(f"--{name}", str(value), allowed, f"Give --{name} another value")


def _check_tp(tp: int) -> None:
    if tp < 1:
        raise DataError("--tp", str(tp), "a positive number is needed", "Give --tp another value")
