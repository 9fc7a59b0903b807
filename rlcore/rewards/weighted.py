"""The reward that most have: a weighted sum of accuracy and format."""

from __future__ import annotations

from rlcore.types import Score


def weighted_score(accuracy: bool, well_formed: bool, format_weight: float) -> Score:
    """(1 - format_weight) * accuracy + format_weight * format, both 0 or 1: a reward in [0, 1]."""
    parts = {"accuracy": float(accuracy), "format": float(well_formed)}
    return Score((1 - format_weight) * parts["accuracy"] + format_weight * parts["format"], parts, graded=True)
