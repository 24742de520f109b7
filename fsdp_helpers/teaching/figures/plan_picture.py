"""Plans over numbers of ranks as an SVG: redrawn in a moment while a slider moves, legible on a light and a dark page."""

from collections.abc import Sequence

from fsdp_helpers.planning.plan import CATEGORIES, Plan
from fsdp_helpers.quantities import GB
from fsdp_helpers.teaching.figures.style import FONT, PEAK_COLORS
from fsdp_helpers.training.palette import FRAME_COLOR, TEXT_COLOR

WIDTH, HEIGHT = 960, 370
LEFT, RIGHT, TOP, BOTTOM = 60, 610, 36, 320
KEY = 740
BAR = 0.7  # of the room for one number of ranks
NOT_CHOSEN = 0.3  # opacity
LIMIT_COLOR = "#dc2626"
STYLE = f"text{{font-family:{FONT};font-size:15px;fill:{TEXT_COLOR}}}"


def waterfall_svg(plans: Sequence[Plan], chosen: int, highest_bytes: float) -> str:
    """Return one bar per plan, stacked by category; the bar of `chosen` ranks is opaque, a bar that leaves the axis has an arrow."""
    device_bytes = plans[0].cluster.device_memory_bytes
    bars = "".join(_bar(place, plan, chosen, len(plans), highest_bytes) for place, plan in enumerate(plans))
    y = _y(device_bytes, highest_bytes)
    limit = (
        f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{LIMIT_COLOR}" stroke-width="2" stroke-dasharray="8 5"/>'
        f'<text x="{RIGHT + 8}" y="{y + 5:.1f}" style="fill:{LIMIT_COLOR}">device: {device_bytes / GB:.0f} GB</text>'
    )
    ends = (_y(0, highest_bytes), _y(highest_bytes, highest_bytes))
    axis = (
        f'<path d="M{LEFT} {ends[1]}V{ends[0]}H{RIGHT}" fill="none" stroke="{FRAME_COLOR}"/>'
        f'<text x="{LEFT}" y="{TOP - 8}" text-anchor="middle">GB</text>'
        f'<text x="{LEFT - 8}" y="{TOP + 12}" text-anchor="end">{highest_bytes / GB:,.0f}</text>'
        f'<text x="{LEFT - 8}" y="{BOTTOM + 5}" text-anchor="end">0</text>'
        f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">ranks, each with the same batch</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"><style>{STYLE}</style>'
        f"{axis}{bars}{limit}{_key()}</svg>"
    )


def _bar(place: int, plan: Plan, chosen: int, num_bars: int, highest_bytes: float) -> str:
    room = (RIGHT - LEFT) / num_bars
    left, width, ranks = LEFT + room * (place + (1 - BAR) / 2), room * BAR, plan.cluster.world_size
    sizes = [(size, PEAK_COLORS[name]) for name, size in plan.by_category().items()]
    drawn, below = [], 0.0
    for size, color in (*sizes, (plan.cluster.allowance_bytes, "none")):
        top = _y(below + size, highest_bytes)
        height = _y(below, highest_bytes) - top
        frame = f' stroke="{FRAME_COLOR}"' if color == "none" else ""
        drawn.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"{frame}/>'
        )
        below += size
    middle, look = left + width / 2, ' font-weight="700" style="font-size:17px"' if ranks == chosen else ""
    number = f'<text x="{middle:.1f}" y="{_y(below, highest_bytes) - 5:.1f}" text-anchor="middle"{look}>'
    ticks = f'<text x="{middle:.1f}" y="{BOTTOM + 20}" text-anchor="middle"{look}>{ranks:,}</text>'
    beyond = " ↑" if below > highest_bytes else ""
    opacity = 1 if ranks == chosen else NOT_CHOSEN
    return f'<g opacity="{opacity}">{"".join(drawn)}</g>{number}{below / GB:,.0f}{beyond}</text>{ticks}'


def _key() -> str:
    names = [(name, PEAK_COLORS[name]) for name in reversed(CATEGORIES.values())]
    rows = []
    for row, (name, color) in enumerate([("outside the count", "none"), *names]):
        y = BOTTOM - 150 + 22 * row
        rows.append(
            f'<rect x="{KEY}" y="{y}" width="16" height="14" fill="{color}" stroke="{FRAME_COLOR}"/>'
            f'<text x="{KEY + 24}" y="{y + 12}">{name}</text>'
        )
    return "".join(rows)


def _y(size: float, highest_bytes: float) -> float:
    """Return the height at which `size` bytes are drawn, at most the end of the axis."""
    return BOTTOM - (BOTTOM - TOP) * min(1.0, size / highest_bytes)
