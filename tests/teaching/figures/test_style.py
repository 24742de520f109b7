"""Colors are told apart with any color vision, and the ink on them can be read."""

from itertools import combinations

import numpy as np
import pytest

from fsdp_helpers.teaching.figures.style import (
    FULL_GRADIENTS,
    GREEN,
    OP_COLORS,
    PEAK_COLORS,
    SERIES_COLORS,
    STRATEGY_COLORS,
    VERMILION,
    ink_on,
)

# What is left of linear red, green and blue without the cones for long waves (protanope) or for middle ones
# (deuteranope): F. Viénot, H. Brettel and J. Mollon, "Digital video colormaps for checking the legibility of displays
# by dichromats", 1999.
SEEN_BY = {
    "protanope": [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]],
    "deuteranope": [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]],
    "all cones": np.eye(3),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])  # of sRGB, D65
APART = 12  # in CIE 1976 L*a*b*, where about 2.3 can just be noticed side by side


def lab(who: str, color: str) -> np.ndarray:
    """Return a color as L*, a* and b*, as that person sees it."""
    values = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    seen = np.clip(SEEN_BY[who] @ linear, 0, 1)
    share = TO_XYZ @ seen / TO_XYZ.sum(axis=1)
    x, y, z = np.where(share > 0.008856, np.cbrt(share), 7.787 * share + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distance(who: str, one: str, other: str) -> float:
    return float(np.linalg.norm(lab(who, one) - lab(who, other)))


def test_the_simulation_confuses_what_dichromats_confuse():
    black_white = [distance(who, "#000000", "#ffffff") for who in SEEN_BY]
    assert black_white == pytest.approx([100] * 3, abs=0.1)  # lightness needs no color vision
    # A red and the green that is as bright to them: 0.29275 = 0.70725 x 0.414, and 0.11238 = 0.88762 x 0.127
    for who, green in (("deuteranope", "#00ac00"), ("protanope", "#006400")):
        assert distance(who, "#ff0000", green) < APART / 2 < 100 < distance("all cones", "#ff0000", green)


NOT_HATCHED = {kind: color for kind, color in PEAK_COLORS.items() if kind != FULL_GRADIENTS}


def alike(who: str, colors: dict[str, str]) -> list[tuple[str, str]]:
    """Return the names of the colors that a person could take for each other."""
    pairs = combinations(colors.items(), 2)
    return [(one, other) for (one, first), (other, second) in pairs if distance(who, first, second) < APART]


@pytest.mark.parametrize(
    "colors",
    [STRATEGY_COLORS, NOT_HATCHED, OP_COLORS, dict(enumerate(SERIES_COLORS))],
    ids=["strategies", "parts", "collectives", "series"],
)
@pytest.mark.parametrize("who", SEEN_BY)
def test_colors_differ_with_any_color_vision(who, colors):
    assert alike(who, colors) == []


def test_a_palette_of_red_and_green_would_be_refused():
    tempting = STRATEGY_COLORS | {"fsdp": "#d55e00", "fsdp-auto-wrap": "#8d8200"}  # vermilion and olive
    assert alike("deuteranope", tempting) == [("fsdp", "fsdp-auto-wrap")]
    assert alike("all cones", tempting) == []
    assert distance("deuteranope", VERMILION, GREEN) > APART  # what the series uses instead


def test_ink_is_black_on_light_and_white_on_dark_colors():
    assert [ink_on(color) for color in ("#ffffff", "#000000", "#e69f00", "#0072b2")] == [
        "black",
        "white",
        "black",
        "white",
    ]
