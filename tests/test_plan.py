"""The plan: which trials a selection stands for, and in which order they run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from harness import frameworks, plan
from harness.project import UserError


def options(**changes: object) -> plan.Options:
    chosen = {
        "workloads": ["cnn_cifar10"], "frameworks": [], "modes": ["default"], "profile": "smoke", "device": "cpu",
        "repeats": 3, "threads": [2], "data": "auto", "timeout_s": None, "interpreters": {},
    }  # fmt: skip
    return plan.Options.model_validate({**chosen, **changes})


def test_default_is_each_framework_in_its_default_mode() -> None:
    trials = plan.plan(options())
    assert Counter(trial.framework for trial in trials) == dict.fromkeys(frameworks.load_all(), 3)
    assert all(trial.mode == frameworks.load(trial.framework).default_mode("cpu", "cnn_cifar10") for trial in trials)
    assert len({trial.name for trial in trials}) == len(trials)


def test_repeats_follow_each_other_and_each_is_shuffled() -> None:
    trials = plan.plan(options(modes=["all"], repeats=6))
    assert [trial.repeat for trial in trials] == sorted(trial.repeat for trial in trials)
    orders = {
        tuple((trial.framework, trial.mode) for trial in trials if trial.repeat == repeat) for repeat in range(1, 7)
    }
    assert len(orders) > 1
    assert trials == plan.plan(options(modes=["all"], repeats=6))
    assert trials != plan.plan(options(modes=["all"], repeats=6, order_seed=1))


def test_each_repeat_has_a_seed_of_its_own_and_frameworks_share_it() -> None:
    trials = plan.plan(options())
    assert {(trial.repeat, trial.seed) for trial in trials} == {(1, 0), (2, 1), (3, 2)}


def test_modes_are_those_that_a_framework_has() -> None:
    trials = plan.plan(options(modes=["eager"], repeats=1))
    assert {trial.mode for trial in trials} == {"eager"}
    everything = {(trial.framework, trial.mode) for trial in plan.plan(options(modes=["all"], repeats=1))}
    assert everything == {(name, mode) for name, framework in frameworks.load_all().items() for mode in framework.modes}


def test_timeout_is_the_profiles_unless_given() -> None:
    assert {trial.timeout_s for trial in plan.plan(options(timeout_s=5))} == {5}
    assert min(trial.timeout_s for trial in plan.plan(options())) > 60


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frameworks": ["caffe"]}, "no framework 'caffe'; there are: chainer, mxnet"),
        ({"workloads": ["mnist"]}, "no workload 'mnist'; there are: cnn_cifar10"),
        ({"modes": ["fast"]}, "no mode 'fast'"),
        ({"frameworks": ["chainer"], "modes": ["compiled"]}, "no notebook matches .*chainer, mode compiled"),
    ],
)
def test_selection_that_matches_nothing_names_the_filter(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan.plan(options(**change))


def test_interpreters_are_pairs() -> None:
    known = frameworks.load_all()
    assert plan.interpreters(["torch=/usr/bin/python3"], known) == {"torch": Path("/usr/bin/python3")}
    for wrong in ("torch", "torch=", "caffe=/usr/bin/python3"):
        with pytest.raises(UserError):
            plan.interpreters([wrong], known)


def test_default_mode_may_depend_on_the_workload() -> None:
    trials = plan.plan(options(workloads=["cnn_cifar10", "resnet50_features"], frameworks=["torch"], repeats=1))
    assert {trial.workload: trial.mode for trial in trials} == {"cnn_cifar10": "eager", "resnet50_features": "compiled"}


def test_precision_is_a_parameter_of_the_notebook() -> None:
    assert plan.plan(options(precision="float64"))[0].parameters()["precision"] == "float64"


def test_a_sweep_is_every_number_of_threads_with_every_batch_size() -> None:
    trials = plan.plan(options(frameworks=["torch"], threads=[1, 2], batch_sizes=[1, 64], repeats=2))
    assert Counter((trial.repeat, trial.threads, trial.batch_size) for trial in trials) == {
        (repeat, threads, size): 1 for repeat in (1, 2) for threads in (1, 2) for size in (1, 64)
    }
    assert len({trial.name for trial in trials}) == len(trials) == 8
    assert all(trial.parameters()["batch_size"] == trial.batch_size for trial in trials)
    assert {trial.name for trial in trials if trial.repeat == 1} == {
        f"cnn_cifar10.torch.eager.{threads}t-{size}b.1" for threads in (1, 2) for size in (1, 64)
    }


def test_what_is_not_swept_over_is_not_in_the_name() -> None:
    (trial,) = plan.plan(options(frameworks=["torch"], threads=[1], batch_sizes=[32], repeats=1))
    assert (trial.name, trial.threads, trial.batch_size) == ("cnn_cifar10.torch.eager.1", 1, 32)


def test_without_a_batch_size_it_is_the_specifications() -> None:
    trials = plan.plan(options(workloads=["cnn_cifar10", "resnet50_features"], frameworks=["torch"], repeats=1))
    assert {(trial.workload, trial.batch_size) for trial in trials} == {("cnn_cifar10", 64), ("resnet50_features", 32)}
