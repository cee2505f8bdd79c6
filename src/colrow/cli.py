"""The command line: `colrow train`, `colrow plan`. Exit codes: 0 done, 1 a rank failed, 2 wrong use."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import torch
import tyro

import colrow
from colrow import runs
from colrow.errors import ColrowError, DataError
from colrow.launch import RankFailedError, launch, leave, under_torchrun
from colrow.models import GPT
from colrow.options import TrainOptions
from colrow.parallelize import find_plan
from colrow.resolved import Resolved
from colrow.show import Show
from colrow.train import train

DESCRIPTION = """Tensor and sequence parallelism in plain PyTorch.

Split it any way; only the memory and the time change.

Try:

  colrow train --tp 2              train a small GPT on two CPU ranks
  colrow train --resume --tp 4     go on with it on four
  colrow plan --tp 4               what each rank would hold
  torchrun --nproc-per-node 4 -m colrow train --tp 2     two replicas of two ranks

COMMAND --help says more."""


MOST_RANKS = 64
"""Ranks that the command starts by itself: more is a slip of the keyboard."""


@dataclass(frozen=True)
class PlanOptions:
    """Show what becomes of each parameter: its rule, its shape whole and on a rank, its bytes. Starts no ranks."""

    model: Literal["gpt"] = "gpt"
    """Which model."""
    tp: int = 2
    """Ranks to split it over."""
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


def main() -> None:
    """The entry point."""
    code = run(sys.argv[1:])
    if under_torchrun():
        leave(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Carry out a command line and return its exit code. What the user can mend is one line on stderr."""
    options = parse(arguments)
    try:
        if isinstance(options, PlanOptions):
            show_plan(options)
        else:
            run_training(options, arguments)
    except RankFailedError as error:
        print(f"{error.traceback}colrow: error: {error}", file=sys.stderr)
        return 1
    except ColrowError as error:
        print(f"colrow: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("colrow: interrupted", file=sys.stderr)
        return 130
    return 0


def parse(arguments: Sequence[str], defaults: TrainOptions | None = None) -> TrainOptions | PlanOptions:
    """tyro's reading of a command line; its own errors, and --help, leave by SystemExit (2, and 0)."""
    kinds = (
        Annotated[TrainOptions, tyro.conf.subcommand("train", default=defaults or TrainOptions(), prefix_name=False)],
        Annotated[PlanOptions, tyro.conf.subcommand("plan", default=PlanOptions(), prefix_name=False)],
    )
    kind: Any = kinds[0] | kinds[1]
    return tyro.cli(kind, prog="colrow", description=DESCRIPTION, args=arguments)


def run_training(options: TrainOptions, arguments: Sequence[str]) -> None:
    """Start the ranks; a resumed run takes the options that are not given from its folder."""
    if options.resume:
        folder = options.out or runs.latest()
        resumed = parse(arguments, TrainOptions.from_saved(runs.saved_options(folder)))
        if isinstance(resumed, TrainOptions):
            options = replace(resumed, out=folder)
    options.check()
    if options.tp > MOST_RANKS and not under_torchrun():
        given, fix = f"{options.tp} ranks", "Give fewer, or use torchrun"
        raise DataError("--tp", given, f"at most {MOST_RANKS} are started on one machine", fix)
    result = launch(train, options, ranks=options.tp)
    if options.json and result is not None:
        print(json.dumps(result), flush=True)


def show_plan(options: PlanOptions) -> None:
    """`colrow plan`: everything is decided on meta tensors."""
    if options.tp < 1:
        raise DataError("--tp", str(options.tp), "a positive number is needed", "Give --tp another value")
    training = TrainOptions(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        context=options.context,
        vocab_size=options.vocab_size,
        gated=options.gated,
        rotary=options.rotary,
    )
    training.check()
    with torch.device("meta"):
        model = GPT(training.model(options.vocab_size))
    resolved = colrow.resolve(model, find_plan(model), options.tp)
    if options.json:
        print(json.dumps(plan_numbers(resolved)))
    else:
        Show(talks=True, to_stderr=False).split(resolved)


def plan_numbers(resolved: Resolved) -> dict[str, Any]:
    """A resolved plan in numbers, as `colrow plan --json` prints it."""
    split = {f"{site.name}.{name}" for site in resolved.sites for name, s in site.splits.items() if s.sharded}
    return {
        "tp": resolved.tp,
        "parameters": [asdict(row) for row in resolved.rows],
        "replicated_bytes": sum(row.bytes_per_rank for row in resolved.rows if row.name not in split),
        "sharded_bytes_per_rank": sum(row.bytes_per_rank for row in resolved.rows if row.name in split),
    }
