"""What the report's pictures are drawn with: colours, styles, axes, legends, and a picture as PNG and SVG.

Colours are Okabe and Ito's, which colour-blind readers tell apart; series differ by marker and dash as well. For the page a
picture becomes an SVG whose colours are CSS variables, so that it follows the reader's light or dark mode.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

try:
    import matplotlib
    from matplotlib import ticker
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
except ImportError:
    raise ValueError("drawing needs matplotlib: pip install 'grouped_lora_ops[report]'.") from None

INK, MUTED, GRID, PAPER = "#1b1b1f", "#6e6e73", "#dcdce0", "#ffffff"
BLUE, ORANGE, GREEN, RED, PINK, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"
THEME = {  # colour: (CSS variable, the same in dark mode)
    INK: ("--ink", "#ececf1"),
    MUTED: ("--muted", "#a0a0a8"),
    GRID: ("--grid", "#3a3a40"),
    PAPER: ("--paper", "#18181b"),
    BLUE: ("--blue", "#4aa8e0"),
    ORANGE: ("--orange", "#f0b429"),
    GREEN: ("--green", "#2cc79b"),
    RED: ("--red", "#ff8a3d"),
    PINK: ("--pink", "#e3a1c4"),
    SKY: ("--sky", "#8fd0f5"),
}
CONTENDERS = {  # colour, marker
    "ours": (BLUE, "o"),
    "torch": (GREEN, "s"),
    "sglang": (PINK, "D"),
    "vllm": (SKY, "^"),
    "torch_lora": (PINK, "P"),
    "no_lora": (SKY, "v"),
}
FLOOR = dict(color=INK, linestyle="--", linewidth=1.1)
BAR = dict(color=MUTED, linestyle=":", linewidth=1.3)
PEER = dict(color=ORANGE, marker="D", linestyle="-.", linewidth=1.2)
BASE = dict(color=GREEN, linestyle="-", marker="s", linewidth=1.2)
TORCH_LORA = dict(color=GREEN, linestyle="--", marker="s", linewidth=1.2)
BESIDE = dict(color=RED, linestyle="-", marker="^", linewidth=1.2)
OF_LAYERS = ((GREEN, "s"), (PINK, "P"), (SKY, "v"))
STEPS = ((SKY, "v"), (BLUE, "o"), (GREEN, "s"), (ORANGE, "D"), (RED, "^"), (PINK, "P"))  # slots, adapters: few to many
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "grouped_lora_ops",
}


@dataclass(frozen=True)
class Picture:
    name: str  # of its file
    section: str
    title: str
    text: str
    figure: Figure

    def png(self) -> bytes:
        out = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            FigureCanvasAgg(self.figure).print_png(out, metadata={"Software": None})
        return out.getvalue()

    def svg(self) -> str:
        """For an HTML page: no header, no ids of groups (they would repeat), colours as variables."""
        out = io.StringIO()
        with matplotlib.rc_context(STYLE):
            FigureCanvasSVG(self.figure).print_svg(out, metadata={"Date": None, "Creator": None})
        text = out.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
        text = re.sub(r'<g id="[^"]*"', "<g", text)
        text = re.sub(r'(<svg[^>]*?) width="[^"]*pt"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*pt"', r"\1", text))
        for colour, (variable, _) in THEME.items():
            text = re.sub(re.escape(colour), f"var({variable})", text, flags=re.I)
        width = self.figure.get_size_inches()[0] * 96
        label = self.title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
        return text.replace("<svg", f'<svg role="img" aria-label="{label}" style="max-width:{width:.0f}px"', 1)


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def look_of(contender: str) -> dict:
    colour, marker = CONTENDERS[contender]
    ours = contender == "ours"
    return dict(color=colour, marker=marker, linewidth=2.2 if ours else 1.2, zorder=3 if ours else 2)


def plain(value: float, _=None) -> str:
    """A tick of a logarithmic axis, without powers."""
    return f"{value:.0f}" if value >= 1 and value == int(value) else f"{value:g}"


def grid_of_panels(
    rows: int, columns: int, width: float = 3.0, height: float = 2.2, sharey: bool = True, sharex: bool = True
):
    """(figure, axes [rows][columns]) with room above for a legend."""
    figure = Figure(figsize=(columns * width + 0.7, rows * height + 0.75), layout="constrained", dpi=130)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06)
    return figure, axes


def over_tokens(axis, counts: Iterable[int]) -> None:
    """A logarithmic axis whose ticks are the counts that were measured, the commonest where all would touch."""
    axis.set_xscale("log", base=2)
    often = Counter(counts)
    least = max(1.3, (max(often) / min(often)) ** (1 / 8)) if often else 2
    chosen: list[int] = []
    for count in sorted(often, key=lambda count: (-often[count], count)):
        if all(max(count, other) / min(count, other) >= least for other in chosen):
            chosen.append(count)
    axis.set_xticks(sorted(chosen), [plain(count) for count in sorted(chosen)])
    axis.xaxis.set_minor_locator(ticker.NullLocator())


def per_cent(axis) -> None:
    """An axis of per cent that shows +5 and +1000: linear up to 10, logarithmic beyond."""
    axis.set_yscale("symlog", linthresh=10, linscale=0.6)
    axis.yaxis.set_major_locator(ticker.FixedLocator([-100, -30, -10, 0, 10, 30, 100, 300, 1000, 3000]))
    axis.yaxis.set_minor_locator(ticker.NullLocator())
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{v:+.0f} %" if v else "0"))


def log_values(axis) -> None:
    """A logarithmic axis of values with labels at 1, 2 and 5, or at 1 alone where that would be many."""
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    parts = (1.0, 2.0, 5.0) if high / max(low, 1e-9) < 300 else (1.0,)
    axis.yaxis.set_major_locator(ticker.LogLocator(10, parts))
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(plain))
    axis.yaxis.set_minor_locator(ticker.NullLocator())


def legend(figure: Figure, handles: list) -> None:
    """One for all panels, above them, where it hides nothing; an entry takes 1.55 inches at most, on average."""
    columns = max(1, min(len(handles), int(figure.get_size_inches()[0] / 1.55)))
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, handlelength=2.4, columnspacing=1.6)


def handle(label: str, colour: str, marker: str = "", dash: str = "-", width: float = 1.6) -> Line2D:
    return Line2D([], [], color=colour, marker=marker, linestyle=dash, linewidth=width, label=label)
