"""Records summed up: medians over repeats with their spread, and what differs from what.

The sample is a process: a trial gives one figure, however many steps it is made of. Trials of the same repeat ran close
to each other, in shuffled order, so frameworks are compared repeat by repeat, and intervals come from drawing whole
repeats anew (percentile bootstrap; Efron and Tibshirani, 1993). Rows differ where the interval of their ratio excludes
1 and an exact test says so, too (Wilcoxon's signed ranks where repeats are paired, Mann and Whitney's where they
aren't), corrected for the number of rows by Holm (1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from harness.project import UserError

#: Trials that differ in any of these are never summed up in one row.
KEYS = [
    "machine", "workload", "framework", "mode", "precision", "profile", "device", "threads", "batch_size",
    "data", "weights", "optimizer",
]  # fmt: skip

#: What distinguishes the rows of one table; in everything else of `KEYS` they agree.
ROW = ["framework", "mode", "optimizer"]
TABLE = [key for key in KEYS if key not in ROW]

#: Below this many repeats no distribution-free 95 % interval of a median exists, so no winner is named.
EXPLORATORY_BELOW = 6

LEVEL = 0.05  # of wrong claims that there is a difference, over all rows of a table
POWER = 0.9  # with which the smallest detectable difference is found
RESAMPLES = 2000

FIGURES = [
    "import_s", "data_s", "build_s", "first_step_s", "step_median_s", "examples_per_s", "seconds_per_1000",
    "evaluate_s", "metric_value", "forward_error", "loss_error", "gradient_error", "steps_error", "update_error",
    "peak_rss_mib", "peak_device_mib", "energy_j", "achieved_gflops", "peak_gflops", "mfu", "cpu_per_wall",
    "foreign_load", "steal", "trial_s", "overhead_s",
]  # fmt: skip
INTERVALS = ["examples_per_s", "seconds_per_1000", "first_step_s"]  # figures that have a 95 % interval

Verdict = Literal["baseline", "faster", "slower", "no difference shown", "too few repeats"]


class Ratio(NamedTuple):
    """How many times as fast one row is as another, and how sure that is."""

    repeats: int  # pairs, or the smaller of two samples that aren't paired
    ratio: float
    low: float  # of the 95 % interval; of the range below `EXPLORATORY_BELOW` repeats
    high: float
    p: float  # of the exact test that nothing differs
    deviation: float  # standard error of the logarithm of the ratio
    freedom: int  # its degrees of freedom

    def detectable(self, comparisons: int) -> float:
        """Return the smallest ratio above 1 that would be found with `POWER`, by Student's distribution."""
        if self.freedom < 1:
            return math.nan
        quantiles = stats.t.ppf([1 - LEVEL / 2 / comparisons, POWER], self.freedom)
        return math.exp(float(quantiles.sum()) * self.deviation)

    def verdict(self, adjusted_p: float, needed: int) -> Verdict:
        """Return what may be said, given p corrected for all rows and how many repeats a claim needs."""
        if self.repeats < needed:
            return "too few repeats"
        if adjusted_p > LEVEL or self.low <= 1 <= self.high:
            return "no difference shown"
        return "faster" if self.ratio > 1 else "slower"


def summarize(table: pd.DataFrame, baseline: str | None = None) -> pd.DataFrame:
    """Return one row for each combination of `KEYS` that occurs among the trials that went through.

    Columns: `repeats`; `framework_version`; `noisy`, `unsteady` and `outliers`, how many trials were disturbed, reached
    no steady state, lie outside Tukey's fences; for each figure `<figure>` (median), `_min`, `_max`, and for those of
    `INTERVALS` `_low`, `_high` (95 %, from `EXPLORATORY_BELOW` repeats on) and `_cv`. Then how many times as fast the
    row is as its table's baseline: `baseline`, `ratio`, `ratio_low`, `ratio_high`, `verdict`, `detectable` (the
    smallest ratio that would be found), `repeats_needed` for a claim; and `winner`.

    `baseline` is a framework, or framework:mode; the fastest row of each table where it is None. Raises `UserError` for
    a baseline that no table has.
    """
    good = table[table.status == "ok"]
    groups = good.groupby(KEYS, dropna=False, sort=True)
    columns: dict[str, Any] = {"repeats": groups.size(), "framework_version": groups.framework_version.first()}
    columns["noisy"] = groups.noisy.sum()
    columns["unsteady"] = (good.warmup == "no steady state").groupby([good[key] for key in KEYS], dropna=False).sum()
    for figure in FIGURES:
        columns[figure] = groups[figure].median()
        columns[f"{figure}_min"] = groups[figure].min()
        columns[f"{figure}_max"] = groups[figure].max()
    summary = pd.DataFrame(columns)
    samples = {figure: groups[figure].apply(lambda values: values.dropna().to_numpy(float)) for figure in INTERVALS}
    for figure, values in samples.items():
        summary[f"{figure}_cv"] = [np.std(v, ddof=1) / np.mean(v) if len(v) > 1 else np.nan for v in values]
        summary[[f"{figure}_low", f"{figure}_high"]] = _intervals(list(values))
    summary["outliers"] = [_outliers(values) for values in samples["examples_per_s"]]
    return _compared(summary.reset_index(), good, baseline)


def scaling(table: pd.DataFrame, axis: Literal["threads", "batch_size"]) -> pd.DataFrame:
    """Return how throughput goes with the number of threads or the batch size, where a run swept over it.

    One row for each row of a table and value of `axis`, with `examples_per_s`, `examples_per_s_min`,
    `examples_per_s_max` and, against the smallest value, `ratio`, `ratio_low`, `ratio_high`.
    """
    good = table[table.status == "ok"]
    others = [key for key in KEYS if key != axis]
    rows = []
    for names, group in good.groupby(others, dropna=False, sort=True):
        values = sorted(group[axis].dropna().unique())
        for value in values if len(values) > 1 else []:
            trials = group[group[axis] == value]
            ratio = paired(trials, group[group[axis] == values[0]])
            rate = trials.examples_per_s
            found = dict(zip(others, names, strict=True))
            found |= {axis: value, "repeats": len(trials), "framework_version": trials.framework_version.iloc[0]}
            found |= {
                "examples_per_s": rate.median(),
                "examples_per_s_min": rate.min(),
                "examples_per_s_max": rate.max(),
            }
            rows.append(found | {"ratio": ratio.ratio, "ratio_low": ratio.low, "ratio_high": ratio.high})
    return pd.DataFrame(rows)


def failures(table: pd.DataFrame) -> pd.DataFrame:
    """Return the trials that didn't go through: workload, framework, mode, repeat, status, error."""
    columns = ["workload", "framework", "mode", "repeat", "status", "error"]
    return table.loc[table.status != "ok", columns].sort_values(columns[:4])


def paired(trials: pd.DataFrame, base: pd.DataFrame) -> Ratio:
    """Return how many times as fast `trials` are as `base`, by the repeats of a run that both have."""
    return _paired([_logs(_rates(trials), _rates(base))])[0]


def unpaired(trials: Sequence[float], base: Sequence[float]) -> Ratio:
    """Return how many times as fast one sample of throughputs is as another, of another run."""
    a, b = np.log(np.asarray(trials, float)), np.log(np.asarray(base, float))
    fewest = min(len(a), len(b))
    difference = float(np.median(a) - np.median(b))
    if fewest >= EXPLORATORY_BELOW:
        found = stats.bootstrap(
            (a, b), lambda x, y, axis: np.median(x, axis=axis) - np.median(y, axis=axis), n_resamples=RESAMPLES,
            method="percentile", rng=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
        low, high = float(found.low), float(found.high)
    else:
        low, high = float(a.min() - b.max()), float(a.max() - b.min())
    ties = len(set(a) | set(b)) < len(a) + len(b)
    p = float(stats.mannwhitneyu(a, b, method="asymptotic" if ties else "exact").pvalue)
    freedom = len(a) + len(b) - 2
    error = math.nan
    if freedom:
        pooled = (np.sum((a - a.mean()) ** 2) + np.sum((b - b.mean()) ** 2)) / freedom
        error = math.sqrt(float(pooled) * (1 / len(a) + 1 / len(b)))
    return Ratio(fewest, math.exp(difference), math.exp(low), math.exp(high), p, error, freedom)


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected for being several, so that all claims together err at the level of one (Holm, 1979)."""
    order = np.argsort(p, kind="stable")
    scaled = np.asarray(p, float)[order] * (len(p) - np.arange(len(p)))
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
    return [float(value) for value in corrected]


def repeats_needed(comparisons: int, paired: bool = True) -> int:
    """Return how many repeats a claim about one of so many rows needs: with fewer, no exact test can be sure enough.

    With n pairs the smallest p is 2 / 2ⁿ, with two samples of n it is 2 / C(2n, n).
    """
    needed = EXPLORATORY_BELOW
    while 2 / (2**needed if paired else math.comb(2 * needed, needed)) > LEVEL / max(1, comparisons):
        needed += 1
    return needed


def _compared(summary: pd.DataFrame, good: pd.DataFrame, baseline: str | None) -> pd.DataFrame:
    """Add the comparison of each row with the baseline of its table, and the winners."""
    if summary.empty:
        return summary
    by_row = {tuple(map(_hashable, key)): trials for key, trials in good.groupby(KEYS, dropna=False, sort=False)}
    names = [tuple(map(_hashable, key)) for key in summary[KEYS].itertuples(index=False)]
    rates = {index: _rates(by_row[name]) for index, name in zip(summary.index, names, strict=True)}
    tables = []
    for _, group in summary.groupby(TABLE, dropna=False, sort=False):
        fastest = group.examples_per_s.astype(float).idxmax()
        tables.append((group, fastest, fastest if baseline is None else _baseline(group, baseline)))
    if all(base is None for _, _, base in tables):
        known = ", ".join(sorted(set(summary.framework + ":" + summary["mode"])))
        raise UserError(f"--baseline: there is no row {baseline!r}; there are: {known}")

    pairs = [
        (index, base)
        for group, fastest, chosen in tables
        for base in {fastest, chosen} - {None}
        for index in group.index.drop([base])
    ]
    ratios = dict(zip(pairs, _paired([_logs(rates[index], rates[base]) for index, base in pairs]), strict=True))
    found = []
    for group, fastest, base in tables:
        against = _against(list(group.index), base, ratios)
        shown = dict(zip(group.index, group.framework + ":" + group["mode"], strict=True))
        beaten = _against(list(group.index), fastest, ratios).verdict.drop(fastest)
        won = bool(len(beaten)) and bool((beaten == "slower").all())
        found.append(against.assign(baseline=shown.get(base, pd.NA), winner=(against.index == fastest) & won))
    return summary.join(pd.concat(found))


def _rates(trials: pd.DataFrame) -> dict[tuple[str, int], float]:
    """Return the throughput of each trial by its run and repeat."""
    keys = zip(trials.run, trials.repeat, strict=True)
    return dict(zip(keys, map(float, trials.examples_per_s), strict=True))


def _logs(rates: dict[tuple[str, int], float], base: dict[tuple[str, int], float]) -> np.ndarray:
    """Return the logarithms of the ratios, repeat by repeat."""
    return np.array([math.log(rate / base[key]) for key, rate in rates.items() if key in base])


def _paired(samples: Sequence[np.ndarray]) -> list[Ratio]:
    """Return what each sample of logarithms of ratios, one for each repeat, comes to."""
    found = []
    for logs, (low, high), p in zip(samples, _intervals(samples), _signed_rank_test(samples), strict=True):
        if not len(logs):
            found.append(Ratio(0, math.nan, math.nan, math.nan, 1.0, math.nan, 0))
            continue
        if math.isnan(low):
            low, high = logs.min(), logs.max()
        error = float(np.std(logs, ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
        middle = math.exp(np.median(logs))
        found.append(Ratio(len(logs), middle, math.exp(low), math.exp(high), p, error, len(logs) - 1))
    return found


def _signed_rank_test(samples: Sequence[np.ndarray]) -> np.ndarray:
    """Return p of Wilcoxon's test for each sample, exact up to 13 repeats, also where values are equal."""
    found = np.ones(len(samples))
    sizes = np.array([len(sample) for sample in samples], int)
    for size in sorted(set(sizes[sizes >= EXPLORATORY_BELOW])):  # with fewer it could show nothing
        chosen = np.flatnonzero(sizes == size)
        values = np.stack([samples[int(position)] for position in chosen])
        signed_ranks = np.sign(values) * stats.rankdata(np.abs(values), axis=1)
        found[chosen] = stats.permutation_test(
            (signed_ranks,), np.mean, permutation_type="samples", vectorized=True, axis=1, n_resamples=2**13,
            batch=max(1, 10**7 // values.size), rng=np.random.default_rng(0),
        ).pvalue  # fmt: skip
    return found


def _hashable(value: Any) -> Any:
    return None if pd.isna(value) else value  # NaN is no key: it isn't equal to itself


def _baseline(group: pd.DataFrame, name: str) -> Any:
    """Return the index of the row that `name`, a framework or framework:mode, stands for; None where there is none."""
    framework, _, mode = name.partition(":")
    found = group[(group.framework == framework) & ((group["mode"] == mode) if mode else True)]
    return found.examples_per_s.astype(float).idxmax() if len(found) else None


def _against(rows: list[Any], base: Any, ratios: dict[tuple[Any, Any], Ratio]) -> pd.DataFrame:
    """Return the columns that compare each row of a table with the row `base`; empty ones where that is None."""
    others = {index: ratios[index, base] for index in rows if (index, base) in ratios}
    needed = repeats_needed(len(others))
    corrected = dict(zip(others, holm([ratio.p for ratio in others.values()]), strict=True))
    found: dict[Any, dict[str, Any]] = {
        index: {
            "ratio": ratio.ratio, "ratio_low": ratio.low, "ratio_high": ratio.high,
            "verdict": ratio.verdict(corrected[index], needed), "detectable": ratio.detectable(len(others)),
        }
        for index, ratio in others.items()
    }  # fmt: skip
    if base is not None:
        found[base] = {"ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0, "verdict": "baseline", "detectable": math.nan}
    columns = ["ratio", "ratio_low", "ratio_high", "verdict", "detectable"]
    return pd.DataFrame.from_dict(found, orient="index", columns=columns).reindex(rows).assign(repeats_needed=needed)


def _intervals(samples: Sequence[np.ndarray]) -> np.ndarray:
    """Return the 95 % interval of the median of each sample, (samples, 2); NaN for a sample that is too small."""
    found = np.full((len(samples), 2), np.nan)
    for position, sample in enumerate(samples):
        if len(sample) >= EXPLORATORY_BELOW and np.allclose(sample, sample[0], rtol=1e-9):
            found[position] = sample[0]
        elif len(sample) >= EXPLORATORY_BELOW:  # each by itself, so that a row's interval depends on no other row
            found[position] = stats.bootstrap(
                (sample,), np.median, n_resamples=RESAMPLES, method="percentile", vectorized=True,
                rng=np.random.default_rng(0),
            ).confidence_interval  # fmt: skip
    return found


def _outliers(values: np.ndarray) -> int:
    """Return how many values lie outside Tukey's fences; they are counted, never dropped."""
    low, high = np.percentile(values, [25, 75])
    reach = 1.5 * (high - low)
    return int(((values < low - reach) | (values > high + reach)).sum()) if len(values) > 3 else 0
