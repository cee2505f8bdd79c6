"""What a command tells a person: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from colrow.figures import size, table
from colrow.models.tiny import Family
from colrow.plan_report import PlanReport
from colrow.verdict import Divergence, Verdict

WORST = 5
"""Gradients that a verdict shows, unless it is asked for all."""


@dataclass(frozen=True)
class StepNumbers:
    """One training step in numbers; `step` counts from 1."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    memory: int

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}  {self.tokens_per_second:,.0f} tokens/s  {size(self.memory)} a rank"


class Show:
    """The one place that prints.

    Arguments:
        talks: whether this rank is the one that does.
        to_stderr: leave stdout to the machine that reads it.
    """

    def __init__(self, *, talks: bool, to_stderr: bool) -> None:
        self.console = Console(stderr=to_stderr, quiet=not talks, highlight=False, soft_wrap=True)

    def line(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style))

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Columns as wide as they need; the first row is their names."""
        for number, line in enumerate(table(rows)):
            self.line(line, style="" if number else "bold")

    def working(self, text: str) -> AbstractContextManager[object]:
        """A spinner on a terminal, for as long as the ranks work."""
        if not self.console.is_terminal or self.console.quiet:
            return nullcontext()
        return self.console.status(text)

    def verdict(self, model: str, verdict: Verdict, *, verbose: bool) -> None:
        """Whether it holds, the errors beside what they may be, the worst gradients, and what to do next."""
        v, loss = verdict, verdict.loss
        mode = "tensor and sequence parallel" if v.sequence_parallel else "tensor parallel"
        said = "holds: the split model equals one process" if v.ok else "DOES NOT HOLD: the split model differs"
        whole = "in one process" + (" in float64" if v.dtype != "float64" else "")
        self.line(f"{said}\n", style="bold green" if v.ok else "bold red")
        self.line(f"{model}, tp {v.tp}, {mode}, {v.dtype}{f', dropout {v.dropout}' if v.dropout else ''}\n")
        found = {
            "loss": (loss.rel_error, f"{loss.parallel:.6f}, and {loss.reference:.6f} {whole}"),
            "logits": (v.logits_rel_error, ""),
            "gradients": (v.max_grad_rel_error, f"the worst of {len(v.parameters)} parameters"),
            "grad_norm": (v.grad_norm_rel_error, ""),
            "step": (v.step_rel_error, "the weights after one step of AdamW"),
        }
        rows = [("", "rel. error", "may be", "")]
        rows += [(name, f"{error:.1e}", f"{v.tolerance[name]:.1e}", note) for name, (error, note) in found.items()]
        self.table([*rows, ("replicas", "equal" if v.replicas_equal else "DIFFER", "equal", "bit for bit")])
        if v.first_divergence is not None:
            self._divergence(v.first_divergence)
        ordered = sorted(v.parameters, key=lambda g: g.rel_error if g.rel_error == g.rel_error else float("inf"))
        shown = v.parameters if verbose else ordered[::-1][:WORST]
        title = "gradient of" if verbose else "worst gradients"
        self.line("")
        self.table([(title, "rel. error"), *((g.name, f"{g.rel_error:.1e}") for g in shown)])
        self.line("\nnext:", style="bold")
        for line in _next_steps(model, v):
            self.line(f"  {line}")

    def _divergence(self, found: Divergence) -> None:
        """Where the split model leaves the whole one, and why."""
        self.line("\nfirst divergence:", style="bold")
        of = found.parameter or found.module or "the model"
        times = "" if found.ratio is None else f", {found.ratio:.7g} times the right one"
        self.line(
            f"  {of}: its {found.where} differs" if found.where != "replicas" else f"  {of}: the ranks' replicas differ"
        )
        self.line(f"  relative error {found.rel_error:.1e}{times}")
        self.line(f"  {found.cause}")

    def families(self, known: Iterable[tuple[str, Family]], aliases: Mapping[str, str]) -> None:
        """One line a family: its name, what is particular to it, and the classes it is known in."""
        rows = [("family", "particular", "AutoModel")]
        self.table([*rows, *((name, f.note, " ".join(map(_short_class, f.kinds))) for name, f in known)])
        self.line(f"\nalso built in: {', '.join(f'{name} ({what})' for name, what in aliases.items())}")
        self.line("\nnext:", style="bold")
        self.line("  colrow verify --model llama --tp 3    prove that a split equals one process")
        self.line("  colrow plan --model llama --tp 3      what each rank would hold")

    def split(self, report: PlanReport) -> None:
        """What becomes of each parameter, and what a rank holds: as much as a run begins with."""
        for line, style in report.lines(brief=True):
            self.line(line, style)
        self.line("")

    def plan(self, model: str, report: PlanReport, quick: str) -> None:
        """A plan in full, and what to do next. `quick`: the model, or a tiny one of its family, to verify."""
        for line, style in report.lines():
            self.line(line, style)
        self.line("\nnext:", style="bold")
        steps = {
            f"colrow plan --model {model} --tp {report.tp * 2}": "another degree",
            f"colrow verify --model {quick} --tp {report.tp}": "prove that the split equals one process",
            'colrow.parallelize(model, mesh["tp"])': "split it in your own code",
        }
        for line in table([(f"  {step}", what) for step, what in steps.items()]):
            self.line(line)

    @contextmanager
    def training(self, start: int, total: int) -> Iterator[Training]:
        """The progress of steps `start` to `total`."""
        if not self.console.is_terminal or self.console.quiet:
            yield Training(self, None, start, total)
            return
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True) as bar:
            yield Training(self, bar, start, total)


class Training:
    """A running progress bar; or, without one, a line now and then."""

    def __init__(self, show: Show, bar: Progress | None, start: int, total: int) -> None:
        self.show, self.bar, self.total = show, bar, total
        self.every = max(1, (total - start) // 10)
        self.task = None if bar is None else bar.add_task("", total=total, completed=start)

    def step(self, numbers: StepNumbers) -> None:
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=numbers.step, description=str(numbers))
        elif numbers.step % self.every == 0 or numbers.step == self.total:
            self.show.line(f"step {numbers.step:>5} of {self.total}  {numbers}")

    def validation(self, step: int, loss: float, before: float | None) -> None:
        change = "" if before is None else f"  ({loss - before:+.4f})"
        self.show.line(f"step {step:>5}  validation loss {loss:.4f}{change}", style="bold")


def _short_class(kind: str) -> str:
    """`ForCausalLM`; the base model has a name of its own."""
    return kind.removeprefix("AutoModel") or "(base)"


def _next_steps(model: str, v: Verdict) -> list[str]:
    """What to type after a verdict."""
    if v.ok:
        tp = f"colrow verify --model {model} --tp {v.tp + 1}"
        return [f"{tp:<44}  another degree", 'colrow.parallelize(model, mesh["tp"])         split it in your own code']
    again, found = f"colrow verify --model {model} --tp {v.tp}", v.first_divergence
    at = f"the rule of {found.module} and of its neighbours" if found and found.module else "the rule of each parameter"
    steps = [(f"colrow plan --model {model} --tp {v.tp}", at)]
    if v.dtype != "float64":
        steps.insert(0, (again, "in float64: whether it is rounding or a fault"))
    elif v.sequence_parallel:
        steps.append((f"{again} --no-sequence-parallel", "whether sequence parallelism is at fault"))
    width = max(len(command) for command, _ in steps)
    return [f"{command:<{width}}    {why}" for command, why in steps]
