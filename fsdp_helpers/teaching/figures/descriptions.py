"""Describe a figure, for readers who can't see it, in words and numbers generated from the drawing."""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

MOST_BARS, MOST_CHARACTERS = 60, 2_000


def put_in_words(fig: Figure, words: str) -> None:
    """Attach a description to a drawing whose labels alone wouldn't say much."""
    fig.set_label(words)


def describe(fig: Figure) -> str:
    """Return the description attached to a figure or, if there is none, each panel's title, axes and numbers."""
    if fig.get_label():
        return str(fig.get_label())
    parts = [part for ax in fig.axes if (part := _describe_axes(ax))]
    names = [text.get_text() for legend in fig.legends for text in legend.get_texts()]
    text = " ".join([*parts, *_sentence("Key", names)])
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."


def _describe_axes(ax: Axes) -> str:
    title = (ax.get_title("left") or ax.get_title()).replace("\n", "; ")
    labels = [label.replace("\n", " ") for label in (ax.get_ylabel(), ax.get_xlabel()) if label]
    legend = ax.get_legend()
    names = [text.get_text() for text in legend.get_texts()] if legend else []
    texts = [text.get_text().replace("\n", " ").strip() for text in ax.texts]
    return " ".join(
        [
            *_sentence("Figure", [part for part in (title, " against ".join(labels)) if part]),
            *_bars(ax),
            *(_line(line) for line in ax.get_lines() if len(line.get_xdata()) > 2 or _is_named(line)),
            *(_points(points) for points in ax.collections if isinstance(points, PathCollection) and _is_named(points)),
            *_sentence("Key", [name for name in names if name not in {_name(line) for line in ax.get_lines()}]),
            *_sentence("Labels", texts),
        ]
    )


def _sentence(what: str, parts: Iterable[str]) -> list[str]:
    """Return a list with one sentence, or an empty list if there's nothing to say."""
    said = "; ".join(dict.fromkeys(part for part in parts if part))
    return [f"{what}: {said}."] if said else []


def _line(line: Line2D) -> str:
    """Return a sentence with a line's first and last values, and its range."""
    xs, ys = ([float(value) for value in np.asarray(data)] for data in line.get_data())
    name = f"{_name(line)}: " if _is_named(line) else "A line: "
    if len(set(xs)) == 1:
        return f"{name}at {xs[0]:,.4g}."
    if len(set(ys)) == 1:
        return f"{name}{ys[0]:,.4g} throughout."
    if len(ys) <= 4:
        return name + ", ".join(f"{y:,.4g} at {x:,.4g}" for x, y in zip(xs, ys, strict=True)) + "."
    ends = f"from {ys[0]:,.4g} at {xs[0]:,.4g} to {ys[-1]:,.4g} at {xs[-1]:,.4g}"
    return f"{name}{ends}, lowest {min(ys):,.4g}, highest {max(ys):,.4g}."


def _points(points: PathCollection) -> str:
    """Return a sentence with the values of a few points or, if there are many, their range."""
    places = [(float(x), float(y)) for x, y in points.get_offsets()]
    if len(places) <= 4:
        return f"{_name(points)}: {', '.join(f'{y:,.4g} at {x:,.4g}' for x, y in places)}."
    heights = [y for _, y in places]
    return f"{_name(points)}: {len(places)} points from {min(heights):,.4g} to {max(heights):,.4g}."


def _name(drawn: Artist) -> str:
    return str(drawn.get_label())


def _is_named(drawn: Artist) -> bool:
    return not _name(drawn).startswith("_")


def _bars(ax: Axes) -> list[str]:
    """Return the bars' lengths and labels by row or, if there are many bars, the number of bars with each label."""
    rows: dict[str, list[tuple[str, float]]] = {}
    for container in ax.containers:
        if isinstance(container, BarContainer):
            label = "" if container.get_label().startswith("_") else f"{container.get_label()} "
            for name, length in _lengths(ax, container):
                rows.setdefault(name, []).append((label, length))
    if sum(map(len, rows.values())) > MOST_BARS:
        counts = {name: Counter(label for label, _ in bars) for name, bars in rows.items()}
        told = [f"{name}: " + ", ".join(f"{label}{num}" for label, num in of.items()) for name, of in counts.items()]
        return _sentence("Numbers of bars", told)
    lengths = [
        f"{name}: " + ", ".join(f"{label}{length:,.4g}" for label, length in bars) for name, bars in rows.items()
    ]
    return _sentence("Bars", lengths)


def _lengths(ax: Axes, container: BarContainer) -> Iterator[tuple[str, float]]:
    """Yield the name of each bar's row or column, and the bar's length."""
    lying = container.orientation == "horizontal"
    names = _row_names(ax) if lying else _tick_names(ax.xaxis)
    for bar in container.patches:
        middle = bar.get_y() + bar.get_height() / 2 if lying else bar.get_x() + bar.get_width() / 2
        name = next((name for place, name in names.items() if abs(place - middle) < 0.5), f"{middle:g}")
        yield name, bar.get_width() if lying else bar.get_height()


def _row_names(ax: Axes) -> dict[float, str]:
    """Return the row names of these axes or, if they have none, those of the nearest earlier axes with names."""
    before = ax.figure.axes[: ax.figure.axes.index(ax) + 1]
    return next((names for one in reversed(before) if (names := _tick_names(one.yaxis))), {})


def _tick_names(axis: Axis) -> dict[float, str]:
    texts = [label.get_text().replace("\n", " ") for label in axis.get_ticklabels()]
    named = zip(axis.get_ticklocs(), texts, strict=False)
    return {place: name for place, name in named if name}
