"""The drawing of a traced layer, as SVG and for Excalidraw."""

from __future__ import annotations

from colrow import excalidraw, svg
from colrow.bands import layer_items
from colrow.rows import region_items
from colrow.scene import INK, MUTED, Scene, Text
from colrow.traced import Trace

APART = 52
"""From one part of the drawing to the next."""


def to_svg(trace: Trace) -> str:
    return svg.to_svg(scene(trace))


def to_excalidraw(trace: Trace) -> str:
    return excalidraw.to_excalidraw(scene(trace))


def scene(trace: Trace) -> Scene:
    """The layer under sequence parallelism, if that was on; then each region as matrices, an MLP first."""
    picture = trace.picture
    drawn = Scene(f"{picture.layer or 'A layer'} of {trace.model} on {trace.tp} ranks", "")
    if trace.sequence_parallel:
        drawn.below(layer_items(trace), APART)
    for region in sorted(picture.regions, key=lambda region: region.kind != "mlp"):
        drawn.below(region_items(trace, region), APART)
    if not picture.regions:
        nothing = f"No attention, MLP or experts was seen in a layer on {trace.tp} ranks."
        drawn.below([Text(0, 0, nothing, INK, 16)], APART)
    mode = "tensor and sequence parallel" if trace.sequence_parallel else "tensor parallel"
    about = (
        f"Made from one training step of {trace.model}, {picture.layer or 'no layer'}: tp {trace.tp}, {mode}, batch "
        f"{trace.batch} x {trace.sequence}, {trace.dtype}. Shapes, counts and bytes are as seen by rank 1, which "
        "is 0 to torch."
    )
    drawn.below([Text(0, 0, about, MUTED, 12)], 20)
    texts = (item.text.replace("\n", " ") for item in drawn.items if isinstance(item, Text))
    drawn.description = ". ".join(text.rstrip(".") for text in texts)
    return drawn
