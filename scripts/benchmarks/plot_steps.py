"""Draws what ``benchmark.py step --json`` writes: python scripts/benchmarks/plot_steps.py OUT.png < FILE.json

A script of its own, because only drawing needs matplotlib.
"""

import json
import sys
from collections import defaultdict
from typing import Any

import matplotlib.pyplot as plt

PANELS = (("rows", "context"), ("context", "rows"))


def draw(records: list[dict[str, Any]], file: str) -> None:
    """Ratio to the floor over rows, a line for each context, and over contexts, a line for each row count."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 4.5), sharey=True, layout="constrained")
    for ax, (along, other) in zip(axes, PANELS, strict=True):
        lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for r in records:
            if r["decoding"] != "prefill":
                how = "plain" if r["decoding"] == "plain" else f"block {r['block']}"
                lines[f"{how}, {r[other]:,} {other}, {r['sampling']}"].append((r[along], r["ratio"]))
        for label, points in sorted(lines.items()):
            ax.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
        ax.axhline(1, color="black", linewidth=0.8)
        ax.set_xscale("symlog", base=2, linthresh=1)
        values = sorted({r[along] for r in records})
        ax.set_xticks(values, [f"{value:,}" for value in values])
        ax.set(xlabel=along, ylim=(0, None))
        ax.legend(fontsize="small")
    axes[0].set_ylabel("measured / floor")
    first = records[0]
    figure.suptitle(f"{first['device']}, {first['shape']}, {first['dtype']}, kernels {first['kernels']}")
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    draw(json.load(sys.stdin), sys.argv[1])
