"""The command line: `colrow train`, `generate`, `verify`, `trace`, `plan`, `families`.

Exit codes: 0 done, or it holds; 1 a rank failed, or it does not hold; 2 wrong use.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import tyro

import colrow
from colrow import families, runs, source
from colrow.draw import to_excalidraw, to_svg
from colrow.errors import ColrowError, DataError
from colrow.finetune import defaults_for, finetune
from colrow.generate import generate
from colrow.launch import RankFailedError, launch, leave, under_torchrun
from colrow.model_options import FamiliesOptions, GenerateOptions, PlanOptions, TraceOptions, VerifyOptions
from colrow.models import tiny
from colrow.options import TrainOptions
from colrow.page import to_html
from colrow.report import watch
from colrow.show import Show
from colrow.show_trace import show_trace
from colrow.train import train
from colrow.verification import verify_source

DESCRIPTION = """Tensor and sequence parallelism in plain PyTorch.

Split it any way; only the memory and the time change.

Try:

  colrow train --tp 2                                    train a small GPT on two CPU ranks
  colrow train --resume --tp 4                           go on with it on four
  colrow train --model DIR --data FILE --tp 2            finetune a Hugging Face model
  colrow generate --model DIR --tp 2 --prompt "Once"     go on with a text
  colrow verify --model llama --tp 3                     prove that a split equals one process
  colrow verify --model path/to/model --tp 4             the same for a model of yours
  colrow trace --model llama --tp 2 --html trace.html    see what a step sends and keeps
  colrow plan --model path/to/model --tp 4               what each rank would hold
  colrow families                                        the models that are split without a plan
  torchrun --nproc-per-node 4 -m colrow train --tp 2     two replicas of two ranks

COMMAND --help says more."""


MOST_RANKS = 64
"""Ranks that the command starts by itself: more is a slip of the keyboard."""


PATIENCE = 1800.0
"""Seconds that the other ranks wait while the first one computes with the model whole, or writes it."""
SOON_VERIFIED = 2e9
"""Bytes of a model that `colrow verify` computes whole in a time that one waits for."""
Options = TrainOptions | GenerateOptions | VerifyOptions | TraceOptions | PlanOptions | FamiliesOptions


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
        match options:
            case VerifyOptions():
                return run_verify(options)
            case TraceOptions():
                run_trace(options)
            case PlanOptions():
                show_plan(options)
            case FamiliesOptions():
                list_families(options)
            case GenerateOptions():
                run_generate(options)
            case TrainOptions():
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


def parse(arguments: Sequence[str], defaults: TrainOptions | None = None) -> Options:
    """tyro's reading of a command line; its own errors, and --help, leave by SystemExit (2, and 0)."""
    kinds = (
        Annotated[TrainOptions, tyro.conf.subcommand("train", default=defaults or TrainOptions(), prefix_name=False)],
        Annotated[GenerateOptions, tyro.conf.subcommand("generate", prefix_name=False)],
        Annotated[VerifyOptions, tyro.conf.subcommand("verify", default=VerifyOptions(), prefix_name=False)],
        Annotated[TraceOptions, tyro.conf.subcommand("trace", default=TraceOptions(), prefix_name=False)],
        Annotated[PlanOptions, tyro.conf.subcommand("plan", default=PlanOptions(), prefix_name=False)],
        Annotated[FamiliesOptions, tyro.conf.subcommand("families", default=FamiliesOptions(), prefix_name=False)],
    )
    kind: Any = kinds[0] | kinds[1] | kinds[2] | kinds[3] | kinds[4] | kinds[5]
    return tyro.cli(kind, prog="colrow", description=DESCRIPTION, args=arguments)


def run_training(options: TrainOptions, arguments: Sequence[str]) -> None:
    """Start the ranks. Options that are not given come from the folder of a resumed run, or suit the model."""
    defaults, out = None, options.out
    if options.resume:
        out = options.out or runs.latest()
        defaults = TrainOptions.from_saved(runs.saved_options(out))
    elif options.finetunes:
        defaults = defaults_for(options)
    if defaults is not None:
        again = parse(arguments, defaults)
        options = replace(again, out=out) if isinstance(again, TrainOptions) else options
    options.check()
    check_ranks(options.tp)
    if options.finetunes:
        result = launch(finetune, options, ranks=options.tp, timeout=PATIENCE)
    else:
        result = launch(train, options, ranks=options.tp)
    if options.json and result is not None:
        print(json.dumps(result), flush=True)


def check_ranks(tp: int) -> None:
    """Refuse more ranks than the command starts by itself."""
    if tp > MOST_RANKS and not under_torchrun():
        given, fix = f"{tp} ranks", "Give fewer, or use torchrun"
        raise DataError("--tp", given, f"at most {MOST_RANKS} are started on one machine", fix)


def run_generate(options: GenerateOptions) -> None:
    """`colrow generate`: the first rank writes the text as it comes."""
    if options.prompt == "-":
        if under_torchrun():
            raise DataError("--prompt", "stdin, under torchrun", "every rank needs it", "Give the prompt itself")
        options = replace(options, prompt=sys.stdin.read().rstrip("\n"))
    options.check()
    check_ranks(options.tp)
    source.find_language_model(options.model)
    result = launch(generate, options, ranks=options.tp, timeout=PATIENCE)
    if options.json and result is not None:
        print(json.dumps(result), flush=True)


def run_verify(options: VerifyOptions) -> int:
    """`colrow verify`: the exit code says whether it holds."""
    options.check()
    check_ranks(options.tp)
    model = options.source()
    show = Show(talks=True, to_stderr=options.json)
    with show.working(f"{options.model} on {options.tp} ranks and on one"):
        verdict = launch(verify_source, model, options.settings(), ranks=options.tp, timeout=PATIENCE)
    if verdict is None:  # under torchrun the first rank speaks
        return 0
    if options.json:
        print(json.dumps(verdict.as_json(), allow_nan=False), flush=True)
    else:
        show.verdict(options.model, verdict, verbose=options.verbose)
    return 0 if verdict.ok else 1


def run_trace(options: TraceOptions) -> None:
    """`colrow trace`: watch a step, and write what was asked for."""
    options.check()
    check_ranks(options.tp)
    model = source.find(options.model)
    show = Show(talks=True, to_stderr=options.json)
    with show.working(f"{options.model} on {options.tp} ranks and on one"):
        trace = launch(watch, model, options.watching(), ranks=options.tp, timeout=PATIENCE)
    if trace is None:  # under torchrun the first rank speaks
        return
    written = []
    for file, draw in ((options.html, to_html), (options.svg, to_svg), (options.excalidraw, to_excalidraw)):
        if file is not None:
            file.write_text(draw(trace), encoding="utf-8")
            written.append(str(file))
    if options.json:
        print(json.dumps(trace.as_json(), allow_nan=False), flush=True)
    else:
        show_trace(show, trace, written)


def show_plan(options: PlanOptions) -> None:
    """`colrow plan`: everything is decided on meta tensors."""
    options.check()
    model = options.on_meta()
    report = colrow.plan(model, options.tp, sequence_parallel=options.sequence_parallel)
    if options.json:
        print(json.dumps(report.as_json()))
        return
    family = str(getattr(getattr(model, "config", None), "model_type", None))
    quick = report.totals.whole_bytes <= SOON_VERIFIED or family not in tiny.FAMILIES
    Show(talks=True, to_stderr=False).plan(options.model, report, options.model if quick else family)


def list_families(options: FamiliesOptions) -> None:
    """`colrow families`: those that are split without a plan, and are built in."""
    known = [(name, family) for name, family in tiny.FAMILIES.items() if name in families.FAMILIES]
    aliases = {name: family for name, (family, _) in tiny.ALIASES.items() if family in families.FAMILIES}
    if options.json:
        listed = [{"name": name, "note": family.note, "classes": list(family.kinds)} for name, family in known]
        print(json.dumps({"families": listed, "aliases": aliases}))
    else:
        Show(talks=True, to_stderr=False).families(known, aliases)
