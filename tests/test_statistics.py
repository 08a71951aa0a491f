"""Statistics: intervals, ratios and verdicts, and how often they are wrong."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from harness import records, statistics
from harness.project import UserError


def results(repeats: int = 10, noise: float = 0.02, seed: int = 0, **rates: float) -> pd.DataFrame:
    """A results.csv of these frameworks (or framework__mode) with examples per second around the given ones."""
    random = np.random.RandomState(seed)
    drift = random.lognormal(0, 0.2, repeats)  # of the machine, the same for all frameworks of a repeat
    rows = []
    for name, rate in rates.items():
        framework, _, mode = name.partition("__")
        for repeat, found in enumerate(rate * drift * random.lognormal(0, noise, repeats), 1):
            rows.append(
                records.Record(
                    run="r", trial=f"{name}.{repeat}", workload="cnn_cifar10", framework=framework,
                    mode=mode or "eager", precision="float32", profile="quick", device="cpu", repeat=repeat, seed=0,
                    status="ok", machine="m", threads=2, batch_size=64, data="real", notebook="n", timed_s=1.0,
                    steps=80, framework_version="1", examples_per_s=found, seconds_per_1000=1000 / found,
                )
            )  # fmt: skip
    return records.frame(rows)


def row(summary: pd.DataFrame, framework: str) -> pd.Series[float]:
    return summary.set_index("framework").loc[framework]


def test_median_has_a_95_percent_interval_from_six_repeats_on() -> None:
    few = row(statistics.summarize(results(5, torch=100)), "torch")
    assert math.isnan(few.examples_per_s_low)
    assert few.examples_per_s_min < few.examples_per_s < few.examples_per_s_max
    many = row(statistics.summarize(results(10, torch=100)), "torch")
    assert many.examples_per_s_min <= many.examples_per_s_low < many.examples_per_s < many.examples_per_s_high
    assert 0 < many.examples_per_s_cv < 0.5


def test_interval_of_the_median_covers_it_in_about_95_of_100_samples() -> None:
    random = np.random.RandomState(1)
    covered = 0
    for _ in range(300):
        low, high = statistics._intervals([random.normal(0, 1, 10)])[0]
        covered += low <= 0 <= high
    assert 0.91 <= covered / 300 <= 0.995


def test_pairing_takes_the_machines_drift_out() -> None:
    """Throughput varies by 20 % between repeats, but alike for both, so a difference of 8 % shows."""
    summary = statistics.summarize(results(noise=0.01, torch=100, mxnet=108), "torch")
    mxnet = row(summary, "mxnet")
    assert mxnet.verdict == "faster"
    assert 1.06 < mxnet.ratio_low < mxnet.ratio < mxnet.ratio_high < 1.10
    assert mxnet.detectable < 1.05
    assert row(summary, "torch").verdict == "baseline"


def test_a_winner_is_named_only_where_it_beats_every_other_row() -> None:
    clear = statistics.summarize(results(torch=100, mxnet=120, chainer=20))
    assert list(clear[clear.winner].framework) == ["mxnet"]
    tie = statistics.summarize(results(torch=119.9, mxnet=120, chainer=20))
    assert not tie.winner.any()
    alone = statistics.summarize(results(torch=100))
    assert not alone.winner.any()


@pytest.mark.parametrize("repeats", [1, 3, 5, 6])
def test_no_winner_below_the_repeats_that_a_claim_needs(repeats: int) -> None:
    summary = statistics.summarize(results(repeats, torch=100, mxnet=200, chainer=20, tensorflow=50), "torch")
    assert not summary.winner.any()
    assert set(summary.verdict) == {"baseline", "too few repeats"}
    assert set(summary.repeats_needed) == {7}


def test_repeats_needed_are_those_of_which_the_exact_test_is_capable() -> None:
    assert statistics.repeats_needed(1) == 6
    assert statistics.repeats_needed(3) == 7
    assert statistics.repeats_needed(1, paired=False) == 6
    for comparisons in (1, 2, 5, 20):
        needed = statistics.repeats_needed(comparisons)
        [smallest] = statistics._signed_rank_test([np.linspace(1, 2, needed)])
        assert smallest * comparisons <= statistics.LEVEL
        assert smallest == pytest.approx(2 / 2**needed)


def test_baseline_is_a_framework_or_one_of_its_modes() -> None:
    table = results(torch__eager=100, torch__compiled=150, mxnet=80)
    fastest = statistics.summarize(table, "torch")
    assert set(fastest.baseline) == {"torch:compiled"}
    eager = statistics.summarize(table, "torch:eager")
    assert set(eager.baseline) == {"torch:eager"}
    assert set(statistics.summarize(table).baseline) == {"torch:compiled"}
    with pytest.raises(UserError, match="no row 'caffe'; there are: mxnet:eager, torch:compiled, torch:eager"):
        statistics.summarize(table, "caffe")


def test_a_table_without_the_baseline_is_summed_up_without_ratios() -> None:
    table = results(torch=100, mxnet=80)
    other = results(chainer=10).assign(workload="gru_imdb")
    summary = statistics.summarize(pd.concat([table, other]), "torch")
    assert pd.isna(row(summary, "chainer").ratio)
    assert pd.notna(row(summary, "mxnet").ratio)


def test_only_repeats_that_both_have_are_compared() -> None:
    table = results(torch=100, mxnet=80)
    table.loc[(table.framework == "mxnet") & (table.repeat > 7), "status"] = "failed"
    ratio = statistics.paired(
        table[(table.framework == "mxnet") & (table.status == "ok")], table[table.framework == "torch"]
    )
    assert ratio.repeats == 7


def test_outliers_are_counted_and_kept() -> None:
    table = results(noise=0.01, torch=100)
    drift = table.examples_per_s / table.examples_per_s.median()
    table["examples_per_s"] = 100 * drift**0.1
    table.loc[3, "examples_per_s"] = 10.0
    found = row(statistics.summarize(table), "torch")
    assert found.outliers == 1
    assert found.examples_per_s_min == 10


def test_disturbed_and_unsteady_trials_are_counted() -> None:
    table = results(torch=100)
    table["noisy"] = [True] * 2 + [False] * 8
    table["warmup"] = ["no steady state"] * 3 + ["flat"] * 7
    found = row(statistics.summarize(table), "torch")
    assert (found.noisy, found.unsteady) == (2, 3)


def test_a_row_depends_on_no_other_row() -> None:
    alone, together = statistics.summarize(results(torch=100)), statistics.summarize(results(torch=100, mxnet=90))
    columns = ["examples_per_s", "examples_per_s_low", "examples_per_s_high"]
    assert list(row(alone, "torch")[columns]) == list(row(together, "torch")[columns])


def test_nothing_that_went_through_is_an_empty_summary() -> None:
    table = results(torch=100).assign(status="failed")
    assert statistics.summarize(table).empty


def test_fully_separated_samples_of_six_differ() -> None:
    ratio = statistics.unpaired([11, 12, 13, 14, 15, 16], [1, 2, 3, 4, 5, 6])
    assert ratio.verdict(ratio.p, statistics.repeats_needed(1, paired=False)) == "faster"


def test_samples_of_unequal_length_of_the_same_do_not_differ() -> None:
    random = np.random.RandomState(0)
    ratio = statistics.unpaired(random.normal(100, 5, 30), random.normal(100, 5, 8))
    assert ratio.verdict(ratio.p, 6) == "no difference shown"


def test_holm_corrects_in_steps() -> None:
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.5, 0.9]) == [1.0, 1.0]
    assert statistics.holm([]) == []


@pytest.mark.parametrize("axis", ["threads", "batch_size"])
def test_a_sweep_is_never_mixed_into_one_row_and_gives_a_scaling_table(axis: str) -> None:
    one, two = results(torch=100), results(torch=180)
    two["examples_per_s"] *= np.random.RandomState(1).lognormal(0, 0.02, len(two))
    one[axis] = 1
    two[axis] = 2
    table = pd.concat([one, two])
    assert len(statistics.summarize(table)) == 2
    scaling = statistics.scaling(table, axis).set_index(axis)  # type: ignore[arg-type]
    assert scaling.ratio[1] == 1
    assert scaling.ratio_low[2] < scaling.ratio[2] < scaling.ratio_high[2]
    assert scaling.ratio[2] == pytest.approx(1.8, rel=0.05)
    assert statistics.scaling(one, axis).empty  # type: ignore[arg-type]
