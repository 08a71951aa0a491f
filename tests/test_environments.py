"""The frameworks' environments, built for real from tiny packages made here, without network."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from harness import environments, frameworks, project
from harness.environments import Environment
from tests.conftest import has_ended

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


class Shelf:
    """A folder of frameworks, one of packages, and one of environments: all that a build needs."""

    def __init__(self, root: Path) -> None:
        self.frameworks, self.wheels, self.environments = (
            root / name for name in ("frameworks", "wheels", "environments")
        )
        self.frameworks.mkdir(parents=True)
        self.wheels.mkdir()
        self.options = ["--no-index", "--find-links", str(self.wheels)]
        for package in ("ipykernel", "numpy"):
            self.wheel(package, "1.0")

    def wheel(self, package: str, version: str, code: str = "", requires: Sequence[str] = ()) -> None:
        """Make a wheel of one module."""
        info = f"{package}-{version}.dist-info"
        metadata = [f"Name: {package}", f"Version: {version}", *(f"Requires-Dist: {name}" for name in requires)]
        with zipfile.ZipFile(self.wheels / f"{package}-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{package}.py", textwrap.dedent(code))
            archive.writestr(f"{info}/METADATA", "\n".join(["Metadata-Version: 2.1", *metadata, ""]))
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")

    def add(
        self, name: str, code: str = "", requires: Sequence[str] = (), python: str = PYTHON
    ) -> frameworks.Framework:
        """Add a framework whose package is one module of this code."""
        self.wheel(name, "1.0", code, requires)
        (self.frameworks / f"{name}.toml").write_text(
            textwrap.dedent(
                f"""
                title = "{name.title()}"
                package = "{name}"
                import_name = "{name}"
                homepage = "https://example.org"
                python = ["{python}"]
                default_mode = {{ cpu = "eager" }}
                [modes.eager]
                about = "as it is"
                [variables]
                {name.upper()}_THREADS = "{{threads}}"
                [devices.cpu]
                requirements = ["{name}==1.0", "numpy==1.0", "ipykernel==1.0"]
                """
            )
        )
        self.lock(name, f"{name}==1.0", "ipykernel==1.0", "numpy==1.0")
        return frameworks.load(name)

    def lock(self, name: str, *pins: str) -> None:
        """Write the lock file of a framework."""
        (self.frameworks / f"{name}.cpu.lock").write_text("\n".join([*pins, ""]))

    def build(self, *chosen: frameworks.Framework) -> list[Environment]:
        """Build the environments of these frameworks."""
        return environments.build(chosen, "cpu", self.options, lambda line: None)


def use(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """Let the harness work on a shelf instead of the project."""
    monkeypatch.setattr(frameworks, "FOLDER", shelf.frameworks)
    monkeypatch.setattr(environments, "FOLDER", shelf.environments)
    monkeypatch.setattr(environments, "JUPYTER_PATH", shelf.environments / "jupyter")
    return shelf


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """A shelf of this test's own, in a folder whose name has a space."""
    return use(Shelf(tmp_path / "a shelf"), monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """A shelf with one environment that is ready, built once; tests put back what they change."""
    with pytest.MonkeyPatch.context() as patch:
        shelf = use(Shelf(tmp_path_factory.mktemp("a whole") / "shelf"), patch)
        assert [built.status for built in shelf.build(shelf.add("tiny"))] == ["ready"]
    return shelf


@pytest.fixture
def tiny(whole: Shelf, monkeypatch: pytest.MonkeyPatch) -> frameworks.Framework:
    """The framework of the shelf that is whole."""
    use(whole, monkeypatch)
    return frameworks.load("tiny")


def inspect(framework: frameworks.Framework, interpreter: Path | None = None) -> Environment:
    """Inspect the environment for the CPU."""
    return environments.inspect(framework, "cpu", interpreter)


def test_what_is_built_is_ready_and_holds_the_lock(tiny: frameworks.Framework) -> None:
    environment = inspect(tiny)
    assert (environment.status, environment.reason, environment.framework) == ("ready", "", "tiny")
    assert environment.lock_hash
    code = "import tiny, importlib.metadata as m; print(m.version('tiny'), m.version('ipykernel'))"
    assert environment.python
    assert subprocess.check_output([environment.python, "-c", code], text=True).split() == ["1.0", "1.0"]


def test_what_is_ready_is_not_built_again(whole: Shelf, tiny: frameworks.Framework) -> None:
    mark = whole.environments / "tiny-cpu" / "ready.json"
    before = mark.stat().st_mtime_ns
    empty = ["--no-index", "--find-links", str(whole.frameworks)]  # as without network
    assert environments.build([tiny], "cpu", empty, lambda line: None) == [inspect(tiny)]
    assert mark.stat().st_mtime_ns == before


def test_inspection_is_fast(tiny: frameworks.Framework) -> None:
    began = time.perf_counter()
    inspect(tiny)
    assert time.perf_counter() - began < 0.05


def test_half_built_is_never_whole(whole: Shelf, tiny: frameworks.Framework) -> None:
    mark = whole.environments / "tiny-cpu" / "ready.json"
    content = mark.read_text()
    try:
        for broken in ("", content[: len(content) // 2], "{}"):
            mark.write_text(broken)
            assert inspect(tiny).status in ("missing", "stale")
        mark.unlink()
        assert inspect(tiny).status == "missing"
    finally:
        mark.write_text(content)
    assert inspect(tiny).status == "ready"


def test_changed_lock_is_stale(whole: Shelf, tiny: frameworks.Framework) -> None:
    lock = tiny.lock_file("cpu")
    content = lock.read_text()
    before = inspect(tiny).lock_hash
    try:
        lock.write_text(content.replace("numpy==1.0", "numpy==1.1"))
        assert inspect(tiny).status == "stale"
        assert inspect(tiny).lock_hash != before
    finally:
        lock.write_text(content)


def test_environment_in_another_folder_is_stale(
    whole: Shelf, tiny: frameworks.Framework, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(whole.environments, moved, symlinks=True)
    monkeypatch.setattr(environments, "FOLDER", moved)
    assert inspect(tiny).status == "stale"


def test_vanished_interpreter_is_stale(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    base = tmp_path / "installed" / f"python{PYTHON}"
    base.parent.mkdir()
    base.symlink_to(getattr(sys, "_base_executable", sys.executable))
    monkeypatch.setattr(environments, "find_python", lambda versions: base)
    framework = shelf.add("tiny")
    assert shelf.build(framework)[0].status == "ready"
    base.unlink()
    assert inspect(framework).status == "stale"


def test_changed_lock_is_built_anew(shelf: Shelf) -> None:
    framework = shelf.add("tiny")
    shelf.build(framework)
    shelf.wheel("numpy", "1.1")
    shelf.lock("tiny", "tiny==1.0", "ipykernel==1.0", "numpy==1.1")
    leftover = shelf.environments / "tiny-cpu" / "leftover"
    leftover.touch()
    built = shelf.build(framework)[0]
    assert built.status == "ready"
    assert not leftover.exists()
    code = "import importlib.metadata as m; print(m.version('numpy'))"
    assert built.python
    assert subprocess.check_output([built.python, "-c", code], text=True).strip() == "1.1"


def test_environments_are_built_in_parallel_and_one_that_fails_stops_no_other(shelf: Shelf, tmp_path: Path) -> None:
    meet = """
        import pathlib, time
        here, there = pathlib.Path({0!r}), pathlib.Path({1!r})
        here.touch()
        end = time.monotonic() + 60
        while not there.exists():
            assert time.monotonic() < end
            time.sleep(0.1)
        """
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    chosen = [
        shelf.add("one", meet.format(one, two)),
        shelf.add("two", meet.format(two, one)),
        shelf.add("broken", "raise ImportError('libexample.so.1: cannot open shared object file')"),
        shelf.add("absent"),
        shelf.add("lacking", requires=["nvidia-example"]),
    ]
    (shelf.wheels / "absent-1.0-py3-none-any.whl").unlink()
    built = {environment.framework: environment for environment in shelf.build(*chosen)}
    assert {name: environment.status for name, environment in built.items()} == {
        "one": "ready", "two": "ready", "broken": "unavailable", "absent": "unavailable", "lacking": "unavailable",
    }  # fmt: skip
    assert "ImportError: libexample.so.1: cannot open shared object file" in built["broken"].reason
    assert "No matching distribution found for absent==1.0" in built["absent"].reason
    assert "requires nvidia-example, which is not installed" in built["lacking"].reason
    for name in ("broken", "absent", "lacking"):
        assert "\n" not in built[name].reason
        assert inspect(frameworks.load(name)).status == "missing"


def test_interrupted_build_ends_all_that_it_started(shelf: Shelf, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    shelf.add("endless", f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    script = f"""
from pathlib import Path
from harness import environments, frameworks
frameworks.FOLDER, environments.FOLDER = Path({str(shelf.frameworks)!r}), Path({str(shelf.environments)!r})
environments.build([frameworks.load("endless")], "cpu", {shelf.options!r}, print)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=project.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=20)[0]
    assert has_ended(int(pid.read_text()))
    assert inspect(frameworks.load("endless")).status == "missing"


def test_python_that_is_not_found_says_what_to_install(shelf: Shelf) -> None:
    built = shelf.build(shelf.add("future", python="3.99"))[0]
    assert built.status == "unavailable"
    assert "needs Python 3.99" in built.reason
    assert "install 3.99" in built.reason


def test_python_is_found_and_shims_that_fail_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim = tmp_path / f"python{PYTHON}"
    shim.write_text("#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    base = Path(getattr(sys, "_base_executable", sys.executable)).parent
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), str(base), os.environ["PATH"]]))
    found = environments.find_python(["3.99", PYTHON])
    assert found
    assert found != shim
    version = subprocess.check_output([found, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True)
    assert version.strip() == PYTHON


def test_lock_that_is_missing_says_how_to_write_it(shelf: Shelf) -> None:
    framework = shelf.add("tiny")
    framework.lock_file("cpu").unlink()
    environment = inspect(framework)
    assert environment.status == "unavailable"
    assert "rosetta environments lock tiny --device cpu" in environment.reason


def test_device_that_a_framework_does_not_have_is_unsupported(tiny: frameworks.Framework) -> None:
    environment = environments.inspect(tiny, "cuda")
    assert environment.status == "unsupported"
    assert "cuda" in environment.reason


def test_given_interpreter_is_used_as_it_is(shelf: Shelf) -> None:
    framework = shelf.add("pytest")  # this interpreter has that, ipykernel and numpy
    environment = inspect(framework, Path(sys.executable))
    assert (environment.status, environment.python) == ("ready", Path(sys.executable))
    assert environment.lock_hash == inspect(framework, Path(sys.executable)).lock_hash
    assert not shelf.environments.exists()


def test_given_interpreter_is_checked_and_not_changed(shelf: Shelf, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    files = {path: path.lstat().st_mtime_ns for path in (tmp_path / "bare").rglob("*")}
    python = tmp_path / "bare" / "bin" / "python"
    environment = inspect(shelf.add("tiny"), python)
    assert environment.status == "unavailable"
    assert (
        environment.reason
        == f"{python}: lacks ipykernel, numpy, tiny; install with: {python} -m pip install ipykernel numpy tiny"
    )
    assert {path: path.lstat().st_mtime_ns for path in (tmp_path / "bare").rglob("*")} == files


def test_given_interpreter_that_is_none_says_so(shelf: Shelf, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    framework = shelf.add("tiny")
    for python in (tmp_path / "no" / "python", broken, tmp_path):
        environment = inspect(framework, python)
        assert environment.status == "unavailable"
        assert str(python) in environment.reason
        assert "\n" not in environment.reason


def test_each_environment_is_a_kernel(whole: Shelf, tiny: frameworks.Framework) -> None:
    spec = json.loads((environments.JUPYTER_PATH / "kernels" / "rosetta-tiny" / "kernel.json").read_text())
    assert spec["argv"][0] == str(inspect(tiny).python)
    assert spec["argv"][1:3] == ["-m", "ipykernel_launcher"]
    assert (spec["display_name"], spec["language"]) == ("Tiny (Rosetta)", "python")
    assert spec["env"]["PYTHONPATH"] == str(project.ROOT)
    assert int(spec["env"]["OMP_NUM_THREADS"]) == int(spec["env"]["TINY_THREADS"]) >= 1


def test_stray_variables_do_not_reach_a_kernel(tiny: frameworks.Framework) -> None:
    kept = {
        "PATH": "/bin", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "0", "CUDA_HOME": "/cuda", "CUDA_PATH": "/cuda",
        "LD_LIBRARY_PATH": "/lib", "OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_L2_SIZE": "512", "ROSETTA_DATA": "/data",
    }  # fmt: skip
    stray = [
        "OMP_PROC_BIND", "OMP_WAIT_POLICY", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "MKL_DYNAMIC",
        "GOTO_NUM_THREADS", "TF_ENABLE_ONEDNN_OPTS", "TF_XLA_FLAGS", "XLA_FLAGS", "JAX_PLATFORMS",
        "TORCH_LOGS", "TORCHDYNAMO_DISABLE", "TRITON_CACHE_DIR", "MKLDNN_VERBOSE", "CUDA_LAUNCH_BLOCKING",
        "TORCHINDUCTOR_MAX_AUTOTUNE", "PYTORCH_CUDA_ALLOC_CONF", "MXNET_SUBGRAPH_BACKEND",
        "CHAINER_DTYPE", "CUPY_TF32", "KERAS_BACKEND", "DNNL_VERBOSE", "ONEDNN_MAX_CPU_ISA",
        "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV",
    ]  # fmt: skip
    outside = {**kept, **dict.fromkeys(stray, "stray"), "OMP_NUM_THREADS": "64", "OPENBLAS_NUM_THREADS": "64"}
    inside = environments.kernel_environment(outside, tiny, 3)
    assert kept.items() <= inside.items()
    assert "stray" not in inside.values()
    assert inside["OMP_NUM_THREADS"] == inside["OPENBLAS_NUM_THREADS"] == inside["MKL_NUM_THREADS"] == "3"
    assert inside["TINY_THREADS"] == "3"
    assert outside["OMP_NUM_THREADS"] == "64"


def test_fault_of_the_system_or_of_a_lock_stops_no_other_build(shelf: Shelf) -> None:
    one, two, three = shelf.add("one"), shelf.add("two"), shelf.add("three")
    (shelf.environments / "one-cpu.log").mkdir(parents=True)
    shelf.lock("two", "two>=1")
    built = shelf.build(one, two, three)
    assert [environment.status for environment in built] == ["unavailable", "unavailable", "ready"]
    assert "Is a directory" in built[0].reason
    assert "line 1" in built[1].reason


def test_mark_that_is_no_mark_is_missing(shelf: Shelf) -> None:
    framework = shelf.add("tiny")
    (shelf.environments / "tiny-cpu").mkdir(parents=True)
    for content in ("[]", "null", '{"base": 3}'):
        (shelf.environments / "tiny-cpu" / "ready.json").write_text(content)
        assert inspect(framework).status == "missing"


def test_given_interpreter_may_be_relative_and_named_from_anywhere(
    shelf: Shelf,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    framework = shelf.add("pytest")
    (tmp_path / "stray-1.0.dist-info").mkdir()
    (tmp_path / "stray-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: stray\nVersion: 1.0\n")
    before = inspect(framework, Path(sys.executable))
    monkeypatch.chdir(tmp_path)
    relative = inspect(framework, Path(os.path.relpath(sys.executable)))
    assert relative.python
    assert relative.python.is_absolute()
    assert relative.lock_hash == before.lock_hash


def test_another_wanted_python_is_stale(whole: Shelf, tiny: frameworks.Framework) -> None:
    assert inspect(tiny.model_copy(update={"python": ["3.8"]})).status == "stale"
    assert inspect(tiny.model_copy(update={"python": ["3.8", PYTHON]})).status == "ready"


def test_python_behind_a_shim_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim = tmp_path / f"python{PYTHON}"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert environments.find_python([PYTHON]) == Path(sys._base_executable)  # type: ignore[attr-defined]


def test_removal_that_is_cut_short_leaves_nothing_that_looks_whole(
    shelf: Shelf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    framework = shelf.add("tiny")
    shelf.build(framework)
    lock = framework.lock_file("cpu").read_text()
    shelf.lock("tiny", "tiny==1.0", "ipykernel==1.0")
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        shelf.build(framework)
    framework.lock_file("cpu").write_text(lock)
    assert inspect(framework).status == "missing"


def test_interrupt_ends_grandchildren_and_waiting_for_a_lock(shelf: Shelf, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    shelf.add(
        "busy",
        f"import subprocess\np = subprocess.Popen(['sleep', '600'])\nopen({str(pid)!r}, 'w').write(str(p.pid))\n"
        "p.wait()",
    )
    waits = shelf.add("waits")
    shelf.environments.mkdir()
    script = f"""
from pathlib import Path
from harness import environments, frameworks
frameworks.FOLDER, environments.FOLDER = Path({str(shelf.frameworks)!r}), Path({str(shelf.environments)!r})
environments.build([frameworks.load(n) for n in ("busy", "waits")], "cpu", {shelf.options!r}, print)
"""
    with FileLock(shelf.environments / ".waits-cpu.lock"):
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        while not (pid.exists() and pid.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(2)
        assert "KeyboardInterrupt" in process.communicate(timeout=20)[0]
        time.sleep(0.5)
        assert has_ended(int(pid.read_text()))
    assert inspect(waits).status == "missing"


def test_wrong_build_of_an_indexed_package_says_what_to_do(shelf: Shelf) -> None:
    shelf.add("tiny", requires=["nvidia-example"])
    path = shelf.frameworks / "tiny.toml"
    path.write_text(path.read_text() + 'indexes = { tiny = "https://example.org/cpu" }\n')
    built = shelf.build(frameworks.load("tiny"))[0]
    assert built.status == "unavailable"
    assert "is https://example.org/cpu in reach? Name an index that has it with --pip" in built.reason
    assert str(shelf.environments) not in built.reason


def test_variables_that_only_begin_alike_are_kept(tiny: frameworks.Framework) -> None:
    kept = {"TFTP_ROOT": "x", "FLAGSHIP": "x"}
    assert kept.items() <= environments.kernel_environment(kept, tiny, 1).items()


@pytest.mark.parametrize(
    ("simd", "core"),
    [("avx avx2 fma avx512f", "SkylakeX"), ("avx avx2 fma", "Haswell"), ("avx", None), ("asimd", None), ("", None)],
)
def test_an_openblas_older_than_the_processor_is_told_its_vector_extensions(
    tiny: frameworks.Framework, monkeypatch: pytest.MonkeyPatch, simd: str, core: str | None
) -> None:
    monkeypatch.setattr("common.machine.simd", lambda: simd)
    assert environments.kernel_environment({}, tiny, 1).get("OPENBLAS_CORETYPE") == core
    asked = environments.kernel_environment({"OPENBLAS_CORETYPE": "Zen"}, tiny, 1)
    assert asked["OPENBLAS_CORETYPE"] == "Zen"
