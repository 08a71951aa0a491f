"""The command `rosetta`: reads what the user asks for, calls the stages in order, and shows what they return."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import pandas as pd
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common import identity, machine
from common.data import DataError
from harness import (
    check,
    compare,
    devices,
    doctor,
    environments,
    frameworks,
    plan,
    project,
    publish,
    records,
    reference,
    report,
    run,
    steps,
    verify,
)
from harness.environments import Environment
from harness.project import UserError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
)
environments_app = typer.Typer(no_args_is_help=True, help="Build and lock the frameworks' environments.")
app.add_typer(environments_app, name="environments")
console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)  # no line of a log is wrapped

Names = list[str]
FrameworkArguments = Annotated[Names | None, typer.Argument(help="Frameworks; all where none is named.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda; auto takes an NVIDIA GPU where one works.")]
PipOption = Annotated[str, typer.Option("--pip", help='Options handed to pip, for example "--index-url URL".')]
ThreadsOption = Annotated[Names, typer.Option(help="Threads for each trial, or several counts; 0: every usable core.")]
BatchSizeOption = Annotated[
    Names, typer.Option(help="Examples of a step, or several counts; the specification's if none.")
]
BaselineOption = Annotated[
    str | None, typer.Option(help="FRAMEWORK or FRAMEWORK:MODE that all others are held against; the fastest if none.")
]
RunArgument = Annotated[Path, typer.Argument(help="Folder of a run.")]
TimeoutOption = Annotated[
    float | None, typer.Option(min=1, help="Seconds for one trial; the profile's own where not given.")
]
WorkloadOption = Annotated[Names, typer.Option(help="Workloads; all where none is named.")]
FrameworkOption = Annotated[Names, typer.Option(help="Frameworks; all where none is named.")]
ModeOption = Annotated[Names, typer.Option(help="Modes: names, or default, or all.")]
PythonOption = Annotated[
    Names,
    typer.Option("--python", help="FRAMEWORK=INTERPRETER: use this Python as it is; it is checked, never changed."),
]


def main() -> NoReturn:
    """Run the command line; exit code 0: all ok, 1: a trial isn't, 2: unusable input, 130: interrupted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell's background job ignores it
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app(standalone_mode=True)
    except (UserError, DataError) as error:
        print(f"rosetta: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


@app.command("frameworks")
def frameworks_command(device: DeviceOption = "auto", python: PythonOption = []) -> None:  # noqa: B006
    """Show the frameworks: versions, modes, and whether their environments are ready.

    Example: `rosetta frameworks --device cpu`
    """
    device = devices.usable_device(device)
    known = frameworks.load_all()
    own = plan.interpreters(python, known)
    table = Table()
    for name in ("framework", "version", "modes (default first)", f"{device} environment"):
        table.add_column(name)
    for name, framework in known.items():
        environment = environments.inspect(framework, device, own.get(name))
        default = framework.default_mode(device)
        modes = [default, *(mode for mode in framework.modes if mode != default)]
        state = environment.status + (f": {environment.reason}" if environment.reason else "")
        table.add_row(name, framework.version(device), ", ".join(modes), Text(state))
    console.print(table)


@environments_app.command("build")
def build_command(names: FrameworkArguments = None, device: DeviceOption = "auto", pip: PipOption = "") -> None:
    """Build the environments that are missing or out of date, in parallel.

    Example: `rosetta environments build torch mxnet --device cpu`
    """
    device = devices.usable_device(device)
    built = _ready(_known(names), device, {}, pip)
    if any(environment.status != "ready" for environment in built.values()):
        raise typer.Exit(1)


@environments_app.command("lock")
def lock_command(names: FrameworkArguments = None, device: DeviceOption = "cpu", pip: PipOption = "") -> None:
    """Write the lock files anew from the requirements in the frameworks' files.

    Example: `rosetta environments lock torch --device cuda`
    """
    for framework in _known(names).values():
        console.print(environments.write_lock(framework, device, pip.split()))


@app.command("run")
def run_command(
    context: typer.Context,
    workload: WorkloadOption = [],  # noqa: B006
    framework: FrameworkOption = [],  # noqa: B006
    mode: ModeOption = ["default"],  # noqa: B006
    profile: Annotated[str | None, typer.Option(help="smoke, quick or full; quick on a CPU, full on a GPU.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Processes for each row of the table.")] = None,
    device: DeviceOption = "auto",
    precision: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    threads: ThreadsOption = [],  # noqa: B006
    batch_size: BatchSizeOption = [],  # noqa: B006
    data: Annotated[str, typer.Option(help="real, synthetic, or auto: real where they can be had.")] = "auto",
    timeout: TimeoutOption = None,
    python: PythonOption = [],  # noqa: B006
    pip: PipOption = "",
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run; a new one in results/runs where not given.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Folder of a run to go on with; what it was asked for holds.")
    ] = None,
) -> None:
    """Execute the benchmark: every chosen workload, framework and mode, one trial at a time.

    Options that take several values repeat or take commas.

    Example: `rosetta run --workload cnn_cifar10 --framework torch,mxnet --mode all --repeats 3`
    """
    if resume:
        given = [name for name in context.params if str(context.get_parameter_source(name)).endswith("COMMANDLINE")]
        if refused := sorted(set(given) - {"resume", "pip"}):
            raise UserError(f"--resume goes on with what was asked for before; leave out --{', --'.join(refused)}")
        folder, options = resume.resolve(), run.options_of(resume)
    else:
        options = _options(
            workload, framework, mode, profile, repeats, device, precision, threads, batch_size, data, timeout, python
        )
        folder = None
    trials = plan.plan(options)
    planned = sorted({trial.workload for trial in trials})
    sources = {name: project.specification(name).prepare(options.profile, options.data) for name in planned}
    trials = [trial.model_copy(update={"data": sources[trial.workload]}) for trial in trials]
    for name, source in sources.items():
        if source == "synthetic":
            console.print(
                Text(f"{name}: SYNTHETIC DATA, of the real set's shapes; the table is marked", style="bold yellow")
            )

    chosen = {name: frameworks.load(name) for name in dict.fromkeys(trial.framework for trial in trials)}
    ready = _ready(chosen, options.device, options.interpreters, pip)
    folder = folder or run.create(options, output)
    counts = "/".join(map(str, options.threads))
    console.print(f"{len(trials)} trials, profile {options.profile}, {options.device}, {counts} threads: {folder}")
    disturbing = [finding.subject for finding in doctor.examine() if finding.state == "disturbs"]
    if disturbing:
        console.print(Text(f"may disturb measurements: {', '.join(disturbing)}; see `rosetta doctor`", style="yellow"))
    try:
        run.carry_out(folder, trials, ready, _progress())
    except KeyboardInterrupt:
        console.print(
            f"\n{_counts(folder, trials)}; interrupted, go on with: rosetta run --resume {folder}", soft_wrap=True
        )
        raise
    console.print(report.terminal(records.read_csv(folder / "results.csv")))
    console.print(f"{folder / 'results.csv'}", soft_wrap=True)
    console.print(_counts(folder, trials))
    if run.count(folder, trials)["done"] < len(trials):
        raise typer.Exit(1)


@app.command("verify")
def verify_command(
    workload: WorkloadOption = [],  # noqa: B006
    framework: FrameworkOption = [],  # noqa: B006
    mode: ModeOption = ["default"],  # noqa: B006
    device: DeviceOption = "auto",
    precision: Annotated[Names, typer.Option(help="float32, float64; both where none is named.")] = [],  # noqa: B006
    threads: ThreadsOption = [],  # noqa: B006
    timeout: TimeoutOption = None,
    python: PythonOption = [],  # noqa: B006
    pip: PipOption = "",
    output: Annotated[Path | None, typer.Option(help="Folder for identity.csv and identity.md.")] = None,
) -> None:
    """Hold implementations against the float64 reference without timing them, and show the errors beside their gates.

    Exit code 1 if any of them is refused.

    Example: `rosetta verify --workload gru_imdb --framework torch,mxnet --mode all`
    """
    trials = []
    for each in _values(precision) or plan.PRECISIONS:
        options = _options(
            workload, framework, mode, "smoke", 1, device, each, threads, [], "synthetic", timeout, python
        )
        trials += plan.plan(options)
    trials.sort(key=lambda trial: (trial.workload, plan.PRECISIONS.index(trial.precision), trial.framework, trial.mode))
    chosen = {name: frameworks.load(name) for name in dict.fromkeys(trial.framework for trial in trials)}
    ready = _ready(chosen, options.device, options.interpreters, pip)
    tables = []
    for position, trial in enumerate(trials, 1):
        table = verify.verify(trial, ready[trial.framework])
        tables.append(table)
        name = f"{trial.workload} {trial.framework} {trial.mode} {trial.precision}"
        console.print(f"[{position:>{len(str(len(trials)))}}/{len(trials)}] {name}  {table.status[0]}", markup=False)
    found = pd.concat(tables, ignore_index=True)
    console.print(verify.terminal(found))
    if output:
        verify.write(found, output)
    counted = found.drop_duplicates(["workload", "framework", "mode", "precision"]).status.value_counts()
    console.print(", ".join(f"{number} {status}" for status, number in counted.items()))
    if set(counted.index) != {"ok"}:
        raise typer.Exit(1)


@app.command("collect")
def collect_command(folder: RunArgument) -> None:
    """Rebuild results.csv and steps.parquet of a run from its executed notebooks alone.

    Example: `rosetta collect results/latest`
    """
    folder = folder.resolve()
    table = records.collect(folder)
    records.write_csv(table, folder / "results.csv")
    steps.write(folder)
    console.print(f"{folder / 'results.csv'}: {len(table)} trials")


@app.command("report")
def report_command(folder: RunArgument = project.LATEST, baseline: BaselineOption = None) -> None:
    """Write a run's tables and HTML notebooks anew, and show the table.

    Example: `rosetta report results/latest --baseline torch`
    """
    table = report.write(folder.resolve(), baseline)
    console.print(report.terminal(table, baseline))


@app.command("summary")
def summary_command(folder: RunArgument = project.LATEST, baseline: BaselineOption = None) -> None:
    """Sum a run up, row by row with its spread, against a baseline: writes summary.csv and summary.md, shows the table.

    Example: `rosetta summary results/latest --baseline torch:eager`
    """
    folder = folder.resolve()
    table = records.collect(folder)
    report.write_summary(table, folder, baseline)
    console.print(report.terminal(table, baseline))
    console.print(f"{folder / 'summary.csv'}", soft_wrap=True)


@app.command("compare")
def compare_command(
    a: Annotated[str, typer.Argument(help="A run's folder, a results.csv, or a published machine[/profile].")],
    b: Annotated[str, typer.Argument(help="What is held against it, of the same kinds.")],
    fail_if_slower: Annotated[
        str | None,
        typer.Option(metavar="PERCENT", help="Exit code 1 where B is shown to be slower by as much or more."),
    ] = None,
    format: Annotated[str, typer.Option(help="table, csv or json.")] = "table",
) -> None:
    """Hold result B against result A: how many times as fast, how sure that is, and what changed in the environment.

    With --fail-if-slower the exit code is 2 where rows can't be told apart for lack of repeats, or can't be compared.

    Example: `rosetta compare results/runs/before results/runs/after --fail-if-slower 5%`
    """
    shown = {"table": compare.terminal, "csv": compare.as_csv, "json": compare.as_json}
    if format not in shown:
        raise UserError(f"--format takes {', '.join(shown)}, not {format!r}")
    percent = _percent(fail_if_slower) if fail_if_slower is not None else None
    found = compare.compare(compare.read(a), compare.read(b))
    if format == "table":
        console.print(compare.terminal(found))
    else:
        sys.stdout.write(shown[format](found))  # type: ignore[arg-type]  # only a table is no text
    if percent is None:
        return
    slower, undecided = compare.slower_than(found, percent)
    if len(slower):
        print(f"rosetta: slower by {percent:g} % or more: {_rows(slower)}", file=sys.stderr)
        raise typer.Exit(1)
    if len(undecided) or found.ratio.isna().all():
        rows = _rows(undecided) or "no row is in common"
        raise UserError(f"can't tell whether B is slower: {rows}; measure both with the same options and --repeats 10")


@app.command("check")
def check_command(folder: RunArgument = project.LATEST) -> None:
    """Tell whether an installation is as fast as it should be, by what is published of the nearest machine.

    Exit code 1 if any row is slower than expected; the likely causes are told beside it.

    Example: `rosetta check results/latest`
    """
    found = check.check(records.collect(folder.resolve()), publish.published())
    console.print(check.terminal(found))
    if (found.verdict == "slower than expected").any():
        raise typer.Exit(1)


@app.command("doctor")
def doctor_command() -> None:
    """Tell what on this machine will disturb a measurement, before one is made.

    Example: `rosetta doctor`
    """
    console.print(doctor.terminal(doctor.examine()))


@app.command("publish")
def publish_command(folder: RunArgument = project.LATEST) -> None:
    """Copy a run to results/published, under its machine and profile, and renew the README's table.

    It replaces what was published of its workloads. Refused is a run that lacks rows that are public now, that wasn't
    finished, or that nobody could repeat.

    Example: `rosetta publish results/latest`
    """
    console.print(publish.publish(folder.resolve()))


@app.command("reference")
def reference_command(
    workloads: Annotated[Names | None, typer.Argument(help="Workloads; all where none is named.")] = None,
    output: Annotated[Path, typer.Option(help="Folder to write to.")] = identity.REFERENCE,
) -> None:
    """Write the float64 golden values anew by executing the workloads' reference notebooks.

    Example: `rosetta reference cnn_cifar10`
    """
    torch = frameworks.load("torch")
    environment = _ready({"torch": torch}, "cpu", {}, "")["torch"]
    for workload in workloads or project.workloads():
        console.print(reference.write(workload, environment, output.absolute()))


@app.command("lab")
def lab_command() -> None:
    """Open JupyterLab on the notebooks; each opens on the kernel of its framework's environment.

    Example: `rosetta lab`
    """
    os.environ["JUPYTER_PATH"] = str(environments.JUPYTER_PATH)
    os.execvp(sys.executable, [sys.executable, "-m", "jupyterlab", f"--notebook-dir={project.ROOT}"])


def _options(
    workload: Names, framework: Names, mode: Names, profile: str | None, repeats: int | None, device: str,
    precision: str, threads: Names, batch_size: Names, data: str, timeout: float | None, python: Names,
) -> plan.Options:  # fmt: skip
    """Check what the command line says and fill in what it leaves open."""
    device = devices.usable_device(device)
    profile = profile or ("full" if device == "cuda" else "quick")
    if profile not in plan.REPEATS:
        raise UserError(f"--profile takes {', '.join(plan.REPEATS)}, not {profile!r}")
    if precision not in plan.PRECISIONS:
        raise UserError(f"--precision takes {', '.join(plan.PRECISIONS)}, not {precision!r}")
    if data not in ("auto", "real", "synthetic"):
        raise UserError(f"--data takes auto, real or synthetic, not {data!r}")
    cores = machine.usable_cores()
    thread_counts = [count or cores for count in _counts_of("--threads", threads, 0)] or [cores]
    if max(thread_counts) > cores:
        raise UserError(f"--threads {max(thread_counts)}: this process may use {cores} cores")
    return plan.Options(
        workloads=_values(workload) or project.workloads(),
        frameworks=_values(framework),
        modes=_values(mode),
        profile=profile,
        device=device,
        precision=precision,
        repeats=repeats or plan.REPEATS[profile],
        threads=list(dict.fromkeys(thread_counts)),
        batch_sizes=_counts_of("--batch-size", batch_size, 1),
        data=data,
        timeout_s=timeout,
        interpreters=plan.interpreters(_values(python), frameworks.load_all()),
    )


def _values(given: Names) -> Names:
    """Split values at commas, keep their order, drop repetitions."""
    return list(dict.fromkeys(part.strip() for value in given for part in value.split(",") if part.strip()))


def _counts_of(option: str, given: Names, least: int) -> list[int]:
    """Return the numbers that an option was given. Raises `UserError` for one that is none or below `least`."""
    values = _values(given)
    for value in values:
        if not value.isdecimal() or int(value) < least:
            raise UserError(f"{option} takes whole numbers from {least} on, for example 1,2, not {value!r}")
    return [int(value) for value in values]


def _percent(text: str) -> float:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 < percent < 100:
        raise UserError(f"--fail-if-slower takes a percentage between 0 and 100, for example 5%, not {text!r}")
    return percent


def _rows(found: pd.DataFrame) -> str:
    """Name the rows of a comparison in one line, with the reason where there is one."""
    reasons = [f" ({row.why})" if row.why else "" for _, row in found.iterrows()]
    names = found.workload + " " + found.framework + " " + found["mode"]
    return ", ".join(name + reason for name, reason in zip(names, reasons, strict=True))


def _known(names: Names | None) -> dict[str, frameworks.Framework]:
    known = frameworks.load_all()
    for name in names or []:
        if name not in known:
            raise UserError(f"there is no framework {name!r}; there are: {', '.join(known)}")
    return {name: known[name] for name in names or known}


def _ready(
    chosen: dict[str, frameworks.Framework], device: str, own: dict[str, Path], pip: str
) -> dict[str, Environment]:
    """Return an environment for each framework, built where it was missing; those that can't be had say why."""
    found = {name: environments.inspect(framework, device, own.get(name)) for name, framework in chosen.items()}
    missing = [chosen[name] for name, environment in found.items() if environment.status in ("missing", "stale")]
    if missing:
        built = environments.build(missing, device, pip.split(), lambda line: console.print(Text(line, style="dim")))
        found.update({environment.framework: environment for environment in built})
    for name, environment in found.items():
        if environment.status != "ready":
            console.print(Text(f"{name}: {environment.status}: {environment.reason}", style="yellow"), soft_wrap=True)
    return found


def _progress() -> run.Progress:
    """Return what prints a line for each trial; on a terminal the line also tells the stage that it has reached."""
    label = ""

    def begin(position: int, total: int, trial: plan.Trial) -> None:
        nonlocal label
        label = f"[{position:>{len(str(total))}}/{total}] {' '.join(trial.name.split('.'))}"
        stage("Start of the kernel")

    def stage(heading: str) -> None:
        if console.is_terminal:
            console.print(Text(f"\r\x1b[K{label}  {heading} …"), end="")

    def end(trial: plan.Trial, record: records.Record) -> None:
        clear = "\r\x1b[K" if console.is_terminal else ""
        if record.status == "ok":
            result = Text(f"{record.examples_per_s:.1f} examples/s, {record.metric} {record.metric_value:.3f}")
            if record.noisy:
                taken = (record.foreign_load or 0) + (record.steal or 0)
                result.append(f"  noisy: others took {taken:.1f} cores; see `noisy` in results.csv", style="yellow")
        else:
            result = Text(f"{record.status}: {record.error}", style="red")
        console.print(Text(f"{clear}{label}  ") + result, soft_wrap=True)

    def waiting() -> None:
        console.print("another run is busy on this machine; waiting for its trial to end")

    return run.Progress(begin, stage, end, waiting)


def _counts(folder: Path, trials: list[plan.Trial]) -> str:
    """Return the line that counts, for example "11 done, 0 failed, 1 skipped"."""
    counted = run.count(folder, trials)
    return ", ".join(f"{number} {name}" for name, number in counted.items() if number or name != "not run")
