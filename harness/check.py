"""Whether an installation is as fast as it should be: a run held against what is published. Entry point: `check`.

What is expected here is what the nearest published machine reached, times how much faster this machine's peak is. A
workload is bound by arithmetic, by memory, or by both, so between the ratio of the two matrix products and that of
the two memory bandwidths everything is as expected. Causes are found by looking at what the trials recorded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import pandas as pd
from rich.console import Group
from rich.table import Table
from rich.text import Text

from common.trial import NOISY_FAULTS, NOISY_LOAD

#: What must agree for two rows to have done the same work.
ROW = ["workload", "framework", "mode", "profile", "device", "precision", "batch_size"]
#: So far from the expected range is still as expected: runs of one machine differ by as much.
TOLERANCE = 0.15

COLUMNS = [*ROW, "threads", "measured", "machine", "expected_low", "expected_high", "verdict", "slower", "causes"]

#: Cores by which OpenBLAS and PyTorch name code without AVX.
_NO_AVX = re.compile(r"\b(Katmai|Coppermine|Northwood|Prescott|Banias|Core2|Penryn|Dunnington|Nehalem|Atom|Bobcat"
                     r"|Athlon|Opteron|Barcelona|DEFAULT|NO AVX)\b", re.IGNORECASE)  # fmt: skip
_ONEDNN = re.compile(r"oneDNN|MKL-?DNN", re.IGNORECASE)


def check(table: pd.DataFrame, public: pd.DataFrame) -> pd.DataFrame:
    """Return one row of `COLUMNS` for each row of a run that went through.

    `measured` and the range `expected_low` to `expected_high` are in examples per second, the latter from the published
    `machine`; `verdict` is "as expected", "faster than expected", "slower than expected", or why nothing can be told;
    `slower` by what share of `expected_low`; `causes` a list of what was found, for rows that are slower.
    """
    good, known = table[table.status == "ok"], public[(public.status == "ok") & public.peak_gflops.notna()]
    rows = []
    for names, trials in good.groupby([*ROW, "threads"], dropna=False, sort=True):
        row: dict[str, object] = dict(zip([*ROW, "threads"], names, strict=True))
        row |= {"measured": float(trials.examples_per_s.median()), "causes": []}
        same = known[(known[ROW] == trials[ROW].iloc[0]).all(axis=1)]
        if trials.peak_gflops.isna().all():
            row["verdict"] = "no peak of this machine was measured"
        elif same.empty:
            row["verdict"] = "nothing is published of this row"
        else:
            row |= _judged(trials, same)
        rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS)


def terminal(found: pd.DataFrame) -> Group:
    """Return what was found for the terminal: a table, then the likely causes of what is slower."""
    table = Table(title="Held against what is published, examples/s", title_justify="left", title_style="bold")
    for name in ("workload", "framework", "mode", "threads", "measured", "expected", "published of", "verdict"):
        table.add_column(name, justify="right" if name in ("threads", "measured", "expected") else "left")
    causes = []
    for _, row in found.iterrows():
        verdict = f"{row.slower:.0%} slower" if row.verdict == "slower than expected" else row.verdict
        expected = "" if pd.isna(row.expected_low) else f"{row.expected_low:.1f}–{row.expected_high:.1f}"
        machine = "" if pd.isna(row.machine) else row.machine
        cells = [row.workload, row.framework, row["mode"], row.threads, f"{row.measured:.1f}", expected, machine]
        table.add_row(*map(Text, map(str, cells)), Text(verdict, style="red" if "slower" in verdict else ""))
        if row.verdict == "slower than expected":
            name = f"{row.workload} {row.framework} {row['mode']}, likely causes:"
            nothing = f"none found; looked at {', '.join(name for name, _ in _CAUSES)}"
            causes += [Text(f"\n{name}", style="bold"), *(Text(f"* {cause}") for cause in row.causes or [nothing])]
    return Group(table, *causes)


def _judged(trials: pd.DataFrame, same: pd.DataFrame) -> dict[str, object]:
    """Return the columns that come from holding trials against the same row of the nearest published machine."""

    def distance(there: pd.DataFrame) -> float:
        steps = [abs(math.log(_middle(trials, name) / _middle(there, name))) for name in _PEAKS]
        return sum(steps) + (set(_words(trials.simd)) != set(_words(there.simd)))

    _, there = min(same.groupby(["machine", "threads"]), key=lambda pair: distance(pair[1]))
    factors = [_middle(trials, name) / _middle(there, name) for name in _PEAKS]
    rate, measured = _middle(there, "examples_per_s"), _middle(trials, "examples_per_s")
    low, high = rate * min(factors), rate * max(factors)
    found: dict[str, object] = {"machine": there.machine.iloc[0], "expected_low": low, "expected_high": high}
    found |= {"verdict": "as expected", "slower": max(0.0, 1 - measured / low)}
    if measured > high * (1 + TOLERANCE):
        found["verdict"] = "faster than expected"
    if measured < low * (1 - TOLERANCE):
        found |= {"verdict": "slower than expected"}
        found["causes"] = [f"{name}: {cause}" for name, look in _CAUSES for cause in look(trials, there)]
    return found


_PEAKS = ("peak_gflops", "peak_bandwidth_gbs")


def _threads(here: pd.DataFrame, there: pd.DataFrame) -> Iterator[str]:
    if here.threads.iloc[0] < there.threads.iloc[0]:
        yield f"{here.threads.iloc[0]}, there {there.threads.iloc[0]}"
    busy, busy_there = (_middle(rows, "cpu_per_wall") / float(rows.threads.iloc[0]) for rows in (here, there))
    if busy < 0.8 * busy_there:
        yield f"kept {busy:.0%} of its cores busy, there {busy_there:.0%}"


def _blas(here: pd.DataFrame, there: pd.DataFrame) -> Iterator[str]:
    slow = [text for text in _words(here.blas, whole=True) if _NO_AVX.search(text)]
    if slow and "avx" in _words(here.simd):
        yield f"code without AVX, which this processor has: {slow[0]}"
    elif _words(here.blas, whole=True) != _words(there.blas, whole=True):
        yield f"{_shown(here.blas)}, there {_shown(there.blas)}"


def _onednn(here: pd.DataFrame, there: pd.DataFrame) -> Iterator[str]:
    if _ONEDNN.search(_shown(there.blas)) and not _ONEDNN.search(_shown(here.blas)):
        yield "not used, there it is"


def _vectors(here: pd.DataFrame, there: pd.DataFrame) -> Iterator[str]:
    lacking = [name for name in _words(there.simd) if name not in _words(here.simd)]
    if lacking:
        yield f"this processor lacks {' '.join(lacking)}"


def _debug(here: pd.DataFrame, there: pd.DataFrame) -> Iterator[str]:
    if here.python.str.contains("debug").any():
        yield f"Python {here.python.iloc[0]}"
    if here.settings.str.contains("debug=True").any():
        yield "the framework is one"


def _cudnn(here: pd.DataFrame, there: pd.DataFrame) -> Iterator[str]:
    if (here.device == "cuda").any() and here.cudnn.isna().all() and there.cudnn.notna().any():
        yield f"none found, there {_shown(there.cudnn)}"


def _throttling(here: pd.DataFrame, there: pd.DataFrame) -> Iterator[str]:
    if (here.throttled > 0).any():
        yield f"heat slowed cores down {here.throttled.sum()} times during {(here.throttled > 0).sum()} trials"
    clocks = here.cpu_mhz.dropna()
    if len(clocks) and clocks.min() < 0.85 * clocks.max():
        yield f"the clock varied from {clocks.min():.0f} to {clocks.max():.0f} MHz between trials"


def _foreign(here: pd.DataFrame, there: pd.DataFrame) -> Iterator[str]:
    for column, who in (("foreign_load", "other processes"), ("steal", "other virtual machines")):
        disturbed = here[here[column] > NOISY_LOAD]
        if len(disturbed):
            yield f"{who} took up to {disturbed[column].max():.1f} cores during {len(disturbed)} of {len(here)} trials"


def _swapping(here: pd.DataFrame, there: pd.DataFrame) -> Iterator[str]:
    rate = (here.major_faults / here.timed_s).max()
    if pd.notna(rate) and rate > NOISY_FAULTS:
        yield f"{rate:.0f} pages a second came from disk"


def _versions(here: pd.DataFrame, there: pd.DataFrame) -> Iterator[str]:
    for column in ("framework_version", "numpy", "python", "cuda", "driver"):
        if _shown(here[column]) != _shown(there[column]):
            yield f"{column.replace('_', ' ')} {_shown(here[column])}, there {_shown(there[column])}"


def _settings(here: pd.DataFrame, there: pd.DataFrame) -> Iterator[str]:
    if _shown(here.settings) != _shown(there.settings):
        yield f"{_shown(here.settings)}, there {_shown(there.settings)}"


def _steadiness(here: pd.DataFrame, there: pd.DataFrame) -> Iterator[str]:
    unsteady = int((here.warmup == "no steady state").sum())
    if unsteady:
        yield f"step times kept shifting in {unsteady} of {len(here)} trials"


#: Where causes are looked for, in the order in which they are told.
_CAUSES: list[tuple[str, Callable[[pd.DataFrame, pd.DataFrame], Iterator[str]]]] = [
    ("foreign load", _foreign), ("throttling", _throttling), ("swapping", _swapping), ("threads", _threads),
    ("debug build", _debug), ("BLAS", _blas), ("oneDNN", _onednn), ("cuDNN", _cudnn),
    ("vector extensions", _vectors), ("versions", _versions), ("settings", _settings), ("steadiness", _steadiness),
]  # fmt: skip


def _middle(rows: pd.DataFrame, column: str) -> float:
    return float(rows[column].astype(float).median())


def _words(column: pd.Series[str], whole: bool = False) -> list[str]:
    """Return what the trials told, each word (or each text as a `whole`) once."""
    texts = sorted(set(map(str, column.dropna())))
    return texts if whole else list(dict.fromkeys(" ".join(texts).split()))


def _shown(column: pd.Series[str]) -> str:
    return " / ".join(_words(column, whole=True)) or "none"
