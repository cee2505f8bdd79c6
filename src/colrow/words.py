"""How numbers, shapes, verbs and kinds are written, in every table, drawing and page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from colrow.traced import Kind, Layer, Part

KINDS: Final[Mapping[Kind, str]] = {
    "stream": "norms, dropout, residuals",
    "attention": "attention",
    "mlp": "MLP",
    "experts": "experts",
    "embedding": "embedding",
    "head": "head and loss",
    "other": "replicated gradients, other",
}
BYTES: Final[Mapping[str, int]] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def seconds(time: float) -> str:
    return f"{time:.2f} s" if time >= 1 else f"{time * 1000:.1f} ms"


def verb_name(verb: str) -> str:
    """`all_reduce` as prose has it; "identity" where nothing was sent."""
    return verb.replace("_", "-") or "identity"


def counted(counts: Mapping[str, int]) -> str:
    """Collectives by verb, "2 all-gathers and 2 reduce-scatters"."""
    said = [f"{n} {verb_name(verb)}{'s' if n != 1 else ''}" for verb, n in counts.items() if n]
    return joined(said) or "no collective"


def joined(words: list[str]) -> str:
    """The words as a list in a sentence."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def total(parts: Iterable[Part]) -> dict[str, int]:
    """Collectives of these parts by verb, forward and backward together."""
    found = Counter[str]()
    for part in parts:
        found.update(part.forward)
        found.update(part.backward)
    return dict(found)


def alike(layers: Iterable[Layer]) -> bool:
    """Whether the regions of every layer send as often as the first one's."""
    counts = [total(part for kind, part in layer.kinds.items() if kind != "stream") for layer in layers]
    return all(count == counts[0] for count in counts)
