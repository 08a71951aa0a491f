"""The frameworks' environments: one virtual environment each, from a lock file, also a Jupyter kernel.

`inspect` tells at once whether an environment is ready, `build` makes those that aren't.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from filelock import FileLock, Timeout

from common import machine
from harness import records
from harness.frameworks import Framework
from harness.project import ROOT, UserError

FOLDER = ROOT / "environments"
JUPYTER_PATH = FOLDER / "jupyter"

#: What every numerical library may listen to for its number of threads.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)  # fmt: skip

#: Variables from outside that would steer a framework or its libraries, or lead Python astray.
STRAY = re.compile(
    r"^(OMP|KMP|GOMP|MKL|GOTO|BLIS|NUMEXPR|VECLIB|DNNL|MKLDNN|ONEDNN|TF|XLA|JAX|KERAS|TORCH[A-Z]*|INDUCTOR|TRITON|PYTORCH|ATEN|MXNET"
    r"|DMLC|CHAINER|CUPY|NNABLA|FLAGS|CUBLAS|CUDNN|NCCL|NVIDIA_TF32|CUDA_LAUNCH)_|^OPENBLAS_NUM_THREADS$"
    r"|^PYTHON(PATH|HOME|STARTUP|OPTIMIZE|WARNINGS)$|^VIRTUAL_ENV$|^LD_PRELOAD$|^IPYTHON|^JUPYTER"
)

#: Run in an interpreter that the user gave: what is installed there, as JSON.
PROBE = """
import importlib.metadata as m, json, sys
print(json.dumps({"python": sys.version.split()[0], "packages": sorted(
    {(d.metadata["Name"] or "").lower().replace("_", "-") + "==" + d.version for d in m.distributions()})}))
"""


class Environment(NamedTuple):
    """Where a framework runs, or why it can't."""

    framework: str
    device: str
    status: Literal["ready", "missing", "stale", "unavailable", "unsupported"]
    reason: str = ""
    python: Path | None = None
    lock_hash: str = ""


def inspect(framework: Framework, device: str, interpreter: Path | None = None) -> Environment:
    """Return a framework's environment as it is: the project's own, or the interpreter that the user gave.

    A missing or stale one can be built; an unavailable or unsupported one can't, and `reason` says what to do.
    """
    if device not in framework.devices:
        return Environment(framework.name, device, "unsupported", f"{framework.title} has no {device} variant here")
    if interpreter is not None:
        return _inspect_given(framework, device, interpreter)
    lock = framework.lock_file(device)
    if not lock.exists():
        command = f"rosetta environments lock {framework.name} --device {device}"
        return Environment(framework.name, device, "unavailable", f"{lock.name} is missing; write it with: {command}")
    lock_hash = _hash(lock.read_bytes())
    folder = _folder(framework, device)
    python = folder / "bin" / "python"
    try:
        mark = json.loads((folder / "ready.json").read_text())
        expected = _mark(framework, device, Path(mark["base"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Environment(framework.name, device, "missing", "not built yet", None, lock_hash)
    wanted = any((folder / "lib" / f"python{version}").is_dir() for version in framework.python)
    if mark != expected or not wanted or not python.exists():
        return Environment(framework.name, device, "stale", "lock file, interpreter or folder changed", None, lock_hash)
    return Environment(framework.name, device, "ready", "", python, lock_hash)


def build(
    chosen: Sequence[Framework], device: str, pip_options: Sequence[str], tell: Callable[[str], None]
) -> list[Environment]:
    """Build environments in parallel; one that fails says why and never stops another.

    `tell` is given a line at each step. Everything started here ends with it, also when interrupted.
    """
    processes = _Processes()
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=len(chosen))
    try:
        jobs = [pool.submit(_build, framework, device, pip_options, tell, processes) for framework in chosen]
        return [job.result() for job in jobs]
    except BaseException:
        processes.end()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def kernel_environment(outside: Mapping[str, str], framework: Framework, threads: int) -> dict[str, str]:
    """Return the environment of a kernel: the outside one without what would steer a framework, with `threads` set.

    Processor workarounds of OpenBLAS (`OPENBLAS_CORETYPE`) stay: without them results can be wrong. Where there are
    none, it is told the processor's vector extensions: one older than the processor would do without them.
    """
    kept = {name: value for name, value in outside.items() if not STRAY.match(name)}
    core = openblas_core(machine.simd())
    told = {"OPENBLAS_CORETYPE": core} if core else {}
    return {**told, **kept, **thread_variables(framework, threads)}


def openblas_core(simd: str) -> str | None:
    """Return by what name OpenBLAS knows kernels for these vector extensions (`machine.simd`), if it has such."""
    extensions = set(simd.split())
    if not {"avx2", "fma"} <= extensions:
        return None
    return "SkylakeX" if "avx512f" in extensions else "Haswell"


def thread_variables(framework: Framework, threads: int) -> dict[str, str]:
    """Return all variables that limit a framework to `threads` threads, and what else it needs set before import."""
    own = {name: value.format(threads=threads) for name, value in framework.variables.items()}
    return {**dict.fromkeys(THREAD_VARIABLES, str(threads)), **own}


def kernel_command(python: Path) -> list[str]:
    """Return the command that starts a kernel; what libraries write to stderr by themselves stays out of notebooks."""
    return [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}", "--IPKernelApp.capture_fd_output=False"]


def write_lock(framework: Framework, device: str, pip_options: Sequence[str] = ()) -> Path:
    """Resolve a framework's requirements and write its lock file: every package pinned, for Linux on x86-64.

    Raises `UserError` where the framework has no such variant or its requirements can't be resolved.
    """
    if device not in framework.devices:
        raise UserError(f"{framework.name} has no {device} variant in {framework.name}.toml")
    variant = framework.devices[device]
    command = [
        sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate",
        "--python-version", framework.python[0], "--python-platform", "x86_64-manylinux_2_28", *pip_options,
    ]  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(variant.build))
        constraints.flush()
        command += ["--build-constraints", constraints.name]
        requirements = "\n".join(variant.requirements)
        done = subprocess.run(command, input=requirements, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{framework.name}: requirements can't be resolved: {_last_words(done.stderr.splitlines())}")
    # A local version such as +cpu names one index's build: the lock serves all.
    pins = [re.sub(r"\+[\w.]+", "", line) for line in done.stdout.splitlines()]
    if variant.indexes:  # CPU builds come from an index of their own, without what the default builds bring along
        pins = [pin for pin in pins if not re.match(r"(nvidia|cuda|triton)", pin)]
    lock = framework.lock_file(device)
    header = f"# Written by: rosetta environments lock {framework.name} --device {device}"
    records.write_whole(lock, "\n".join([f"{header} (Python {framework.python[0]})", *pins, ""]))
    return lock


def find_python(versions: Sequence[str]) -> Path | None:
    """Return an interpreter of the first of these versions that is found and can make a virtual environment.

    Looked for on PATH, in pyenv, in conda's environments, and through uv.
    """
    for version in versions:
        for candidate in _candidates(version):
            if base := _base(candidate, version):
                return base
    return None


def _candidates(version: str) -> Iterator[Path]:
    for folder in os.get_exec_path():
        yield Path(folder) / f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    yield from sorted(pyenv.glob(f"versions/{version}*/bin/python"), reverse=True)
    known = Path("~/.conda/environments.txt").expanduser()
    conda = known.read_text().splitlines() if known.exists() else []
    if "CONDA_EXE" in os.environ:
        conda.append(str(Path(os.environ["CONDA_EXE"]).parent.parent))
    yield from (Path(folder) / "bin" / f"python{version}" for folder in conda)
    command = [sys.executable, "-m", "uv", "python", "find", "--no-project", "--offline", version]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode == 0:
        yield Path(found.stdout.strip())


def _base(python: Path, version: str) -> Path | None:
    """Return the interpreter behind this one, which may be a shim, if it has the version and can make environments."""
    if not python.exists():
        return None
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2], sys._base_executable)"
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=30, env=_clean(), check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found, _, base = done.stdout.strip().partition(" ")
    return Path(base) if found == version else None


def _inspect_given(framework: Framework, device: str, interpreter: Path) -> Environment:
    """Check an interpreter that the user gave, without changing anything there."""

    def unavailable(reason: str) -> Environment:
        return Environment(framework.name, device, "unavailable", f"{interpreter}: {reason}")

    # Absolute, since trials run in other folders; links are kept, since an environment's interpreter is one.
    interpreter = Path(shutil.which(interpreter) or interpreter).absolute()
    try:
        done = subprocess.run(  # elsewhere, since Python takes packages of the current folder for installed ones
            [interpreter, "-c", PROBE], capture_output=True, text=True, timeout=60, env=_clean(), check=True, cwd="/"
        )
        packages = json.loads(done.stdout)["packages"]
    except OSError as error:
        return unavailable(error.strerror or str(error))
    except (subprocess.SubprocessError, ValueError, KeyError):
        return unavailable("is no Python that answers")
    installed = {line.partition("==")[0] for line in packages}
    missing = [name for name in ("ipykernel", "numpy") if name not in installed]
    if not installed.intersection(framework.packages()):
        missing.append(framework.package)
    if missing:
        return unavailable(
            f"lacks {', '.join(missing)}; install with: {interpreter} -m pip install {' '.join(missing)}"
        )
    return Environment(framework.name, device, "ready", "", interpreter, _hash("\n".join(packages).encode()))


def _build(
    framework: Framework, device: str, pip_options: Sequence[str], tell: Callable[[str], None], processes: _Processes
) -> Environment:
    """Build one environment unless another process has just done so; return it as it then is."""
    try:
        return _build_alone(framework, device, pip_options, tell, processes)
    except (OSError, UserError, _StepFailed) as failure:
        return inspect(framework, device)._replace(status="unavailable", reason=" ".join(str(failure).split()))


def _build_alone(
    framework: Framework, device: str, pip_options: Sequence[str], tell: Callable[[str], None], processes: _Processes
) -> Environment:
    FOLDER.mkdir(exist_ok=True)
    with processes.hold(FOLDER / f".{framework.name}-{device}.lock"):
        before = inspect(framework, device)
        if before.status not in ("missing", "stale"):
            return before
        base = find_python(framework.python)
        if base is None:
            version = framework.python[0]
            how = (
                f"pyenv install {version}, conda create -n py{version} python={version}, or uv python install {version}"
            )
            reason = f"needs Python {' or '.join(framework.python)}, which isn't found; install it: {how}"
            return before._replace(status="unavailable", reason=reason)
        _install(framework, device, base, pip_options, tell, processes)
    _register_kernel(framework, device)
    tell(f"{framework.name}: ready")
    return inspect(framework, device)


def _install(
    framework: Framework,
    device: str,
    base: Path,
    pip_options: Sequence[str],
    tell: Callable[[str], None],
    processes: _Processes,
) -> None:
    """Make the virtual environment and install the lock into it; the mark that says it is whole comes last."""
    folder, variant = _folder(framework, device), framework.devices[device]
    (folder / "ready.json").unlink(missing_ok=True)  # first, so that what is half-removed never looks whole
    shutil.rmtree(folder, ignore_errors=True)
    log = FOLDER / f"{folder.name}.log"
    log.write_bytes(b"")
    python = folder / "bin" / "python"
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-input",
        "--progress-bar",
        "off",
        *pip_options,
    ]
    pins = [f"{name}=={version}" for name, version in framework.pins(device).items()]
    apart = [pin for pin in pins if pin.partition("==")[0] in variant.indexes]

    def step(what: str, *command: str | Path) -> None:
        tell(f"{framework.name}: {what}")
        with log.open("ab") as file:
            code = processes.run([str(part) for part in command], file)
        if code:
            words = _last_words(log.read_text(errors="replace").splitlines())
            advice = ""
            if any(words.startswith(f"{package} ") for package in variant.indexes) and "not installed" in words:
                urls = ", ".join(variant.indexes.values())
                advice = f"; not the {device} build: is {urls} in reach? Name an index that has it with --pip"
            raise _StepFailed(f"{what} failed: {words}{advice} (all of it: {FOLDER.name}/{log.name})")

    step("making the environment", base, "-m", "venv", folder)
    if variant.build:
        step("installing what it is built with", *pip, *variant.build)
    for pin in apart:  # alone, so that no other package is looked for there
        step(
            f"installing {pin}",
            *pip,
            "--retries",
            "1",
            "--extra-index-url",
            variant.indexes[pin.partition("==")[0]],
            pin,
        )
    isolation = ["--no-build-isolation"] if variant.build else []
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as rest:
        rest.write("\n".join(pin for pin in pins if pin not in apart))
        rest.flush()
        step(f"installing {len(pins) - len(apart)} packages", *pip, *isolation, "--requirement", rest.name)
    step("checking that nothing is missing", python, "-m", "pip", "check")
    step(f"importing {framework.import_name}", python, "-c", f"import ipykernel, numpy, {framework.import_name}")
    records.write_whole(folder / "ready.json", json.dumps(_mark(framework, device, base), indent=1))


def _register_kernel(framework: Framework, device: str) -> None:
    """Make the environment a Jupyter kernel in the project's own Jupyter path: the one that the notebooks name."""
    folder = JUPYTER_PATH / "kernels" / f"rosetta-{framework.name}"
    folder.mkdir(parents=True, exist_ok=True)
    python = _folder(framework, device) / "bin" / "python"
    spec = {
        "argv": kernel_command(python),
        "display_name": f"{framework.title} (Rosetta)",
        "language": "python",
        "env": {"PYTHONPATH": str(ROOT), **thread_variables(framework, machine.usable_cores())},
    }
    records.write_whole(folder / "kernel.json", json.dumps(spec, indent=1))


class _StepFailed(Exception):
    """A step of a build failed; the message says which and why."""


class _Processes:
    """The child processes of a build, so that an interrupt can end them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False

    def run(self, command: Sequence[str], log: object) -> int:
        """Run a command to its end and return its exit status."""
        with self._lock:
            if self._ended:
                return 1
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_clean(), start_new_session=True
            )  # type: ignore[call-overload]
            self._running.add(process)
        code = process.wait()
        with self._lock:
            self._running.discard(process)
        return int(code)

    @contextlib.contextmanager
    def hold(self, path: Path) -> Iterator[None]:
        """Hold the lock of an environment; waiting for it ends when the build does."""
        lock = FileLock(path)
        while not self._ended:
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=0.2)
                break
        if not lock.is_locked:
            raise _StepFailed("interrupted")
        try:
            yield
        finally:
            lock.release()

    def end(self) -> None:
        """End what runs, with all that it started, and let nothing more start."""
        with self._lock:
            self._ended = True
            for process in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _mark(framework: Framework, device: str, base: Path) -> dict[str, str]:
    """What makes an environment whole and current: the lock, how it was built, on which interpreter, and where."""
    variant = framework.devices[device]
    recipe = [variant.build, sorted(variant.indexes)]
    try:
        stat = base.resolve().stat()
        interpreter = f"{base.resolve()} {stat.st_size} {int(stat.st_mtime)}"
    except OSError:
        interpreter = "gone"
    return {
        "lock": _hash(framework.lock_file(device).read_bytes()),
        "recipe": _hash(json.dumps(recipe).encode()),
        "base": str(base),
        "interpreter": interpreter,
        "folder": str(_folder(framework, device)),
    }


def _folder(framework: Framework, device: str) -> Path:
    return FOLDER / f"{framework.name}-{device}"


def _clean() -> dict[str, str]:
    """The environment for interpreters and pip: the user's own pip configuration, nothing that leads Python astray."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "__PYVENV"))
    }
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def _last_words(lines: Sequence[str]) -> str:
    """Return the line of a log that says most likely what went wrong."""
    said = [line.strip() for line in lines if line.strip() and not line.startswith("WARNING")]
    errors = [
        line for line in said if re.match(r"(ERROR|error|\w*Error\b|.* requires .*, which is not installed)", line)
    ]
    return (errors or said or ["nothing was said"])[-1][:300]


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
