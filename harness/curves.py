"""Loss curves: how the training loss of each framework went down, one chart for each workload of a folder of trials."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from harness import frameworks, project, records

#: A point of a curve is the mean over this share of all steps: the loss of a single batch says little.
WINDOW = 1 / 30


def write(folder: Path) -> list[Path]:
    """Draw <workload>.loss.svg for each workload of which `folder`/trials holds losses; return the files.

    One curve for each framework and mode: the mean over its repeats. The same trials give the same bytes.
    """
    titles = {name: framework.title for name, framework in frameworks.load_all().items()}
    losses: dict[str, dict[str, list[np.ndarray]]] = {}
    for path in sorted((folder / "trials").glob("*.ipynb")):
        record, series = records.read_trial(path), records.read_series(path)
        if record.status == "ok" and series.get("step_losses"):
            name = f"{titles.get(record.framework, record.framework)}, {record.mode}"
            if record.batch_size != project.specification(record.workload).BATCH_SIZE:
                name += f", batch size {record.batch_size}"
            curve = np.array(series["step_losses"], float)
            losses.setdefault(record.workload, {}).setdefault(name, []).append(curve)
    return [_draw(workload, curves, folder / f"{workload}.loss.svg") for workload, curves in losses.items()]


def _draw(workload: str, curves: dict[str, list[np.ndarray]], target: Path) -> Path:
    # Text stays text; without a salt of our own and a date, each drawing would differ from the last.
    with matplotlib.rc_context({"svg.hashsalt": workload, "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        for name, repeats in curves.items():
            mean = np.mean(repeats, axis=0)
            window = max(1, round(len(mean) * WINDOW))
            smooth = np.convolve(mean, np.ones(window) / window, mode="valid")
            axes.plot(np.arange(len(smooth)) + (window + 1) / 2, smooth, label=name, linewidth=1.2)
        axes.set_title(project.specification(workload).TITLE)
        axes.set_xlabel("step")
        axes.set_ylabel("training loss, running mean")
        axes.legend()
        axes.grid(alpha=0.3)
        figure.savefig(target, metadata={"Date": None})
    return target
