"""The plan of a run: which trials, in which order. The first stage of the pipeline."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from harness import frameworks, project
from harness.project import UserError

#: Quick is for exploring; full is for claims, which take ten repeats.
REPEATS = {"smoke": 1, "quick": 3, "full": 10}
PRECISIONS = ("float32", "float64")


class Options(BaseModel):
    """What a run was asked for; kept in the run's folder, so that it can be resumed."""

    model_config = ConfigDict(extra="forbid")

    workloads: list[str]
    frameworks: list[str]
    modes: list[str]
    profile: str
    device: str
    precision: str = "float32"
    repeats: int
    threads: list[int]
    batch_sizes: list[int] = []  # the specification's where there are none
    data: str
    timeout_s: float | None
    interpreters: dict[str, Path]
    order_seed: int = 0


class Trial(BaseModel):
    """One notebook to be executed once."""

    model_config = ConfigDict(frozen=True)

    workload: str
    framework: str
    mode: str
    profile: str
    device: str
    precision: str
    repeat: int
    seed: int
    threads: int
    batch_size: int
    data: str
    timeout_s: float
    sweep: str = ""  # what tells it from trials that differ in threads or batch size alone

    @property
    def name(self) -> str:
        """The trial's name, unique within its run."""
        return ".".join([self.workload, self.framework, self.mode, *filter(None, [self.sweep]), str(self.repeat)])

    def columns(self) -> dict[str, str | int]:
        """What the plan says about the trial, as columns of its record."""
        return {**self.model_dump(exclude={"threads", "data", "timeout_s", "sweep"}), "trial": self.name}

    @property
    def notebook(self) -> Path:
        """The notebook to execute."""
        return project.notebook(self.workload, self.framework)

    def parameters(self) -> dict[str, str | int]:
        """What the notebook's parameters cell is given."""
        return self.model_dump(
            include={"mode", "precision", "profile", "device", "data", "threads", "batch_size", "seed"}
        )


def plan(options: Options) -> list[Trial]:
    """Return the trials of a run in the order in which they run.

    All trials of one repeat come before those of the next, shuffled within each repeat, so that a
    drift of the machine falls on all frameworks alike. Raises `UserError` for a name that isn't
    known and for a selection that matches nothing.
    """
    known = frameworks.load_all()
    _require("workload", options.workloads, project.workloads())
    _require("framework", options.frameworks, list(known))
    all_modes = {mode for framework in known.values() for mode in framework.modes}
    _require("mode", options.modes, ["default", "all", *sorted(all_modes)])

    chosen = [
        (workload, name, mode, threads, batch_size)
        for workload in options.workloads or project.workloads()
        for name in options.frameworks or list(known)
        if project.notebook(workload, name).exists()
        for mode in _modes(known[name], workload, options.modes, options.device)
        for threads in options.threads
        for batch_size in options.batch_sizes or [0]
    ]
    if not chosen:
        filters = {"workload": options.workloads, "framework": options.frameworks, "mode": options.modes}
        asked = ", ".join(f"{name} {'/'.join(values)}" for name, values in filters.items() if values)
        raise UserError(f"no notebook matches {asked}; see `rosetta frameworks` for what there is")

    shuffle = random.Random(options.order_seed)
    trials = []
    for repeat in range(1, options.repeats + 1):
        for workload, name, mode, threads, batch_size in shuffle.sample(chosen, len(chosen)):
            specification = project.specification(workload)
            sweep = [f"{threads}t"] if len(options.threads) > 1 else []
            sweep += [f"{batch_size}b"] if len(options.batch_sizes) > 1 else []
            trials.append(
                Trial(
                    workload=workload,
                    framework=name,
                    mode=mode,
                    profile=options.profile,
                    device=options.device,
                    precision=options.precision,
                    repeat=repeat,
                    seed=repeat - 1,
                    threads=threads,
                    batch_size=batch_size or specification.BATCH_SIZE,
                    data=options.data,
                    timeout_s=options.timeout_s or specification.PROFILES[options.profile].timeout_s,
                    sweep="-".join(sweep),
                )
            )
    return trials


def _modes(framework: frameworks.Framework, workload: str, asked: Sequence[str], device: str) -> list[str]:
    if "all" in asked:
        return list(framework.modes)
    chosen = {framework.default_mode(device, workload) if mode == "default" else mode for mode in asked or ["default"]}
    return [mode for mode in framework.modes if mode in chosen]


def _require(what: str, asked: Sequence[str], known: Sequence[str]) -> None:
    for name in asked:
        if name not in known:
            raise UserError(f"there is no {what} {name!r}; there are: {', '.join(known)}")


def interpreters(asked: Sequence[str], known: Mapping[str, object]) -> dict[str, Path]:
    """Parse `FRAMEWORK=INTERPRETER` pairs. Raises `UserError` for a malformed pair or a framework not known."""
    pairs = {}
    for pair in asked:
        name, separator, path = pair.partition("=")
        if not separator or not path:
            raise UserError(f"--python takes FRAMEWORK=INTERPRETER, for example torch=/usr/bin/python3, not {pair!r}")
        _require("framework", [name], list(known))
        pairs[name] = Path(path).expanduser()
    return pairs
