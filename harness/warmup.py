"""Whether a trial reached a steady state, told from its step times. The entry point is `classify`.

After Barrett, Bolz-Tereick, Killick, Mount and Tratt, "Virtual Machine Warmup Blows Hot and Cold" (OOPSLA 2017): PELT
(Killick, Fearnhead and Eckley, 2012) cuts the series into segments of the same mean; segments that are as fast as the
last one are equivalent to it; steady is what follows the last segment that isn't. Nothing is left out of the figures
for it: the warm-up that is left out is a fixed number of steps, and this label shows whether it was enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import ruptures

Kind = Literal["flat", "warm-up", "slowdown", "no steady state"]

FEWEST_STEPS = 20  # below, there is nothing to tell segments from
SHORTEST = 3  # steps of a segment
EQUIVALENT = 0.1  # segments are as fast as the last one if their means differ by no more than this share of its mean
STEADY_SHARE = 0.25  # at least so much of the series must be steady, as in Barrett et al.
PENALTY = 15  # times log n for each changepoint, as in Barrett et al.
FENCES = 3  # what lies so many interquartile ranges outside is moved to there: single steps aren't a change


class Warmup(NamedTuple):
    """What the series of step times shows; its fields are columns of the record."""

    warmup: Kind | None  # None: too short a series to tell
    steady_step: int | None  # the first step of the steady state, counted from 0; None: there is none


def classify(seconds: Sequence[float]) -> Warmup:
    """Return what the step times of one trial show, all steps in order, in seconds."""
    if len(seconds) < FEWEST_STEPS:
        return Warmup(None, None)
    series = np.asarray(seconds, float)
    low, high = np.percentile(series, [25, 75])
    series = np.clip(series, low - FENCES * (high - low), high + FENCES * (high - low))
    # The noise of a step, whatever the mean does: differences of neighbours, their spread by the median.
    noise = np.median(np.abs(np.diff(series))) / (0.6745 * np.sqrt(2))
    if noise == 0:
        noise = series.std() or 1.0
    scaled = (series / noise).reshape(-1, 1)
    penalty = PENALTY * np.log(len(series))
    ends = ruptures.KernelCPD(kernel="linear", min_size=SHORTEST).fit(scaled).predict(pen=penalty)
    starts = [0, *ends[:-1]]
    means = [float(series[start:end].mean()) for start, end in zip(starts, ends, strict=True)]
    differs = [abs(mean - means[-1]) > EQUIVALENT * means[-1] for mean in means]
    if not any(differs):
        return Warmup("flat", 0)
    last = max(position for position, other in enumerate(differs) if other)
    steady = int(ends[last])
    if len(series) - steady < STEADY_SHARE * len(series):
        return Warmup("no steady state", None)
    faster = any(other and mean < means[-1] for mean, other in zip(means, differs, strict=True))
    return Warmup("slowdown" if faster else "warm-up", steady)
