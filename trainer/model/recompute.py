"""What `parallel.activation_checkpoint` makes of each layer. Pure."""

from __future__ import annotations

from functools import cache

from flashckpt.errors import LayoutError
from flashckpt.trainer.config.parallel import RECOMPUTE_MODES, Recompute

FULL, FEED_FORWARD, SELECTIVE, KEPT = "full", "ffn", "selective", "none"
RECOMPUTES_FEED_FORWARD = (FULL, FEED_FORWARD)
RECOMPUTES_ATTENTION = (FULL,)


@cache
def parse_recompute(mode: str) -> Recompute:
    """Return what a mode says.

    Raises:
        LayoutError: The mode is not known.
    """
    found = Recompute.parse(mode)
    if found is None:
        raise LayoutError("parallel.activation_checkpoint has no such mode", found=repr(mode), expected=RECOMPUTE_MODES)
    return found


@cache
def recompute_of(mode: str, layer: int) -> str:
    """Return what is computed again of a layer: "none", "ffn", "full", or "selective" (all but products and attention).

    Raises:
        LayoutError: The mode is not known.
    """
    parsed = parse_recompute(mode)
    if parsed.mode == "groups":
        return FULL
    if parsed.mode == "full":
        return FULL if layer % parsed.number == 0 else KEPT
    return parsed.mode


def group_size(mode: str) -> int:
    """Return how many layers are computed again together: those of a group keep the input of its first layer alone."""
    parsed = parse_recompute(mode)
    return parsed.number if parsed.mode == "groups" else 1
