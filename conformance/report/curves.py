"""The loss curves as SVG. matplotlib draws them in CSS variables that page.css defines for light, dark and print."""

import io
import math
import re
from html import escape

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH, HEIGHT, LEFT, RIGHT = 380, 440, 44, 376  # of a panel, in points; a browser scales them
LOSSES, DEVIATIONS, EXACT = (48, 180), (216, 376), 394  # distances from the top
SITES = 6  # number of colours. Each has its own shape too, for readers who cannot tell colours apart
SHAPES, DASHES = "os^Dx|", ["-", (0, (6, 3)), (0, (2, 3)), (0, (9, 3, 2, 3)), (0, (12, 5)), (0, (1, 5))]
NAMES = ("rule", "head", "golden", "failed", "soft", "ink", *(f"c{number}" for number in range(SITES)))
COLOUR = {name: f"#0000{number:02x}" for number, name in enumerate(NAMES, 1)}  # placeholders, written to the SVG as var(--name)
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
STYLE = {"svg.fonttype": "none", "font.size": 11, "lines.scale_dashes": False, "text.color": COLOUR["soft"]}
STYLE |= {"xtick.labelcolor": COLOUR["soft"], "ytick.labelcolor": COLOUR["soft"], "xtick.major.size": 0, "ytick.major.size": 0}
# Removed: styles that page.css sets, unused ids. Each shape gets its fill once; matplotlib repeats it at every use.
TIDY = {
    r"<!--.*?-->|<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>": "",
    r'(?<=<g) id="[^"]*"|font-family: [^;"]*;? ?| transform="rotate\(-0 [^"]*"': "",
    r'(<use [^>]*?) style="[^"]*"': r"\1",
    r'(<path id="[^"]*" d="[^"]*" style=")(stroke: )(var\(--c\d\))': r"\1fill: \3; \2\3",
    r"<g/>|\n *": "",
}


def svg(figure: Figure, attributes: str) -> str:
    """The figure as SVG, with equal bytes each time: no date, no random ids, coordinates to a tenth of a point."""
    figure.patch.set_visible(False)
    lines = [line for axes in figure.axes for line in (*axes.lines, *axes.get_xgridlines(), *axes.get_ygridlines())]
    for number, line in enumerate(lines):
        line.set(clip_on=False, gid=f"line-{number}")
    with io.StringIO() as file, matplotlib.rc_context({"svg.hashsalt": attributes}):
        figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        text = file.getvalue()
    text = re.sub(r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", lambda it: f"<svg {it[1]} {attributes}>", text[text.index("<svg") :])
    for number, line in enumerate(lines):
        css, _, title = line.get_label().partition("|") if "|" in line.get_label() else ("", "", "")
        named = f'<g class="{css}">' + f"<title>{escape(title)}</title>" * bool(title) if css else "<g>"
        text = text.replace(f'<g id="line-{number}">', named)
    for name, colour in COLOUR.items():
        text = text.replace(colour, f"var(--{name})")
    text = re.sub(r'(?<= )(d|x|y)="([^"]*)"', lambda it: re.sub(r"(\.\d)\d+|\n", r"\1", it[0]), text)
    for pattern, replacement in TIDY.items():
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    return text


def style(number: int, dash: int) -> dict:
    """matplotlib's style for a site's curves. dash: the launcher's place in the site's list."""
    return dict(
        color=COLOUR[f"c{number}"], linestyle=DASHES[dash % len(DASHES)], marker=SHAPES[number], markersize=4.4, mew=0.8
    )


@matplotlib.rc_context(STYLE)
def sample(curve: dict) -> str:
    """SVG of a short line for the legend."""
    figure = Figure(figsize=(40 / 72, 12 / 72))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 40), ylim=(0, 12))
    axes.axis("off")
    axes.plot([2, 20, 38], [6, 6, 6], linewidth=1.4, label="curve key|", **style(curve["site"], curve["dash"]))
    return svg(figure, 'class="sample" aria-hidden="true"')


@matplotlib.rc_context(STYLE)
def panel(
    golden: list[float], curves: list[dict], scale: tuple[int, int], limits: dict[float, str], title: str, label: str
) -> str:
    """SVG of one world size: losses above; below, deviations on a logarithmic scale, and exact ones on a separate line."""
    figure, (low, high), steps = Figure(figsize=(WIDTH / 72, HEIGHT / 72)), scale, range(len(golden))
    top = math.ceil(max(golden) * 2) / 2
    a_unit = (high - low) / (DEVIATIONS[1] - DEVIATIONS[0])
    exact = low - (EXACT - DEVIATIONS[1]) * a_unit
    losses = _axes(figure, LOSSES, len(golden), (0, top))
    deviations = _axes(figure, (DEVIATIONS[0], EXACT), len(golden), (exact, high))
    losses.set_yticks([0, top / 2, top], [f"{value:g}" for value in (0, top / 2, top)])
    powers = range(high, low - 1, -max(1, round((high - low) / 5)))
    deviations.set_yticks([exact, *powers], ["exact", *(f"10{str(power).translate(SUPERSCRIPT)}" for power in powers)])
    deviations.yaxis.get_gridlines()[0].set(color=COLOUR["head"], linestyle=(0, (1, 3)))
    deviations.set_xticks(range(0, len(golden), 10))
    losses.plot(steps, golden, color=COLOUR["golden"], linewidth=8, solid_capstyle="round", label="golden|golden trace")
    at = min(6, len(golden) - 1)
    losses.annotate("golden trace", (at, golden[at]), (0, 8), textcoords="offset points")
    for limit, tier in limits.items():
        ends, line = (0, max(len(golden) - 1, 1)), dict(color=COLOUR["failed"], linewidth=1.2, linestyle=(0, (7, 3)))
        deviations.plot(ends, [math.log10(limit)] * 2, label=f"limit|{tier}", **line)
        deviations.annotate(tier, (ends[1], math.log10(limit)), (0, 5), textcoords="offset points", ha="right")
    for curve in curves:
        look = style(curve["site"], curve["dash"])
        shown = [min(max(loss, 0), top) if math.isfinite(loss) else top for loss in curve["losses"][: len(golden)]]
        losses.plot(shown, linewidth=1.4, label=f"curve loss|{curve['label']}", **look | dict(marker=""))
        xs, ys = _apart([_height(off, exact, low, high) for off in curve["off"]], exact)
        deviations.plot(xs, ys, linewidth=0.6, label=f"curve deviation|{curve['label']}", **look)
    figure.text(0, 1 - 13 / HEIGHT, title, weight="bold", size=13, color=COLOUR["ink"])
    figure.text(0, 1 - (LOSSES[0] - 12) / HEIGHT, "loss")
    figure.text(0, 1 - (DEVIATIONS[0] - 12) / HEIGHT, "relative deviation")
    figure.text(RIGHT / WIDTH, 6 / HEIGHT, "step", ha="right")
    return svg(figure, f'role="img" aria-label="{label}"')


def _axes(figure: Figure, span: tuple[int, int], steps: int, ylim: tuple[float, float]) -> Axes:
    where = (LEFT / WIDTH, 1 - span[1] / HEIGHT, (RIGHT - LEFT) / WIDTH, (span[1] - span[0]) / HEIGHT)
    axes = figure.add_axes(where, xlim=(0, max(steps - 1, 1)), ylim=ylim, xticks=[], frameon=False)
    axes.grid(axis="y", color=COLOUR["rule"], linewidth=1)
    axes.tick_params("y", pad=6)
    axes.tick_params("x", pad=13)
    axes.set_axisbelow(True)
    return axes


def _height(off: float, exact: float, low: int, high: int) -> float:
    return exact if off == 0 else min(max(math.log10(off), low), high) if math.isfinite(off) else high


def _apart(heights: list[float], exact: float) -> tuple[list[float], list[float]]:
    """Split the curve between exact and other deviations, so that no line connects them."""
    xs: list[float] = []
    ys: list[float] = []
    for step, height in enumerate(heights):
        if step and (height == exact) != (heights[step - 1] == exact):
            xs, ys = [*xs, math.nan], [*ys, math.nan]
        xs, ys = [*xs, step], [*ys, height]
    return xs, ys
