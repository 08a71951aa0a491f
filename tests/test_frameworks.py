"""The frameworks' files and their locks: valid, complete, and all that a framework needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness import frameworks
from harness.project import UserError

KNOWN = frameworks.load_all()
VARIANTS = [(name, device) for name, framework in KNOWN.items() for device in framework.devices]

VALID = """
title = "Tiny"
package = "Tiny_Frame"
import_name = "tiny"
homepage = "https://example.org"
python = ["3.11"]
default_mode = { cpu = "eager" }

[modes.eager]
about = "as it is"

[devices.cpu]
requirements = ["tiny-frame==1.0"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of frameworks that holds one."""
    monkeypatch.setattr(frameworks, "FOLDER", tmp_path)
    (tmp_path / "tiny.toml").write_text(VALID)
    return tmp_path


def test_each_file_is_a_framework() -> None:
    files = {path.stem for path in Path(frameworks.__file__).parent.glob("*.toml")}
    assert {"torch", "tensorflow", "mxnet", "chainer"} <= set(KNOWN) == files


@pytest.mark.parametrize(("name", "device"), VARIANTS)
def test_lock_pins_every_requirement_and_what_a_kernel_needs(name: str, device: str) -> None:
    framework = KNOWN[name]
    pins = framework.pins(device)
    assert {"ipykernel", "numpy"} <= set(pins)
    for requirement in framework.devices[device].requirements:
        package, version = re.sub(r"\[.*\]", "", requirement).split("==")
        assert pins[frameworks.normal_name(package)] == version, requirement
    assert framework.version(device)


@pytest.mark.parametrize(("name", "device"), VARIANTS)
def test_lock_says_who_wrote_it_and_names_no_place(name: str, device: str) -> None:
    text = KNOWN[name].lock_file(device).read_text()
    assert text.startswith(f"# Written by: rosetta environments lock {name} --device {device} (Python 3.")
    assert not re.search(r"://|file:|@|--|\s/", text.split("\n", 1)[1])


@pytest.mark.parametrize("name", [name for name, device in VARIANTS if device == "cpu"])
def test_cpu_lock_brings_no_cuda(name: str) -> None:
    assert not [package for package in KNOWN[name].pins("cpu") if re.match("nvidia|cuda|cupy|triton", package)]


@pytest.mark.parametrize(("name", "device"), VARIANTS)
def test_what_builds_an_sdist_stays_as_it_is(name: str, device: str) -> None:
    """The lock must not replace what the packages were built with."""
    pins = KNOWN[name].pins(device)
    for requirement in KNOWN[name].devices[device].build:
        package, version = requirement.split("==")
        assert pins.get(package, version) == version


def test_file_is_read(folder: Path) -> None:
    tiny = frameworks.load("tiny")
    assert frameworks.load_all() == {"tiny": tiny}
    assert (tiny.title, tiny.default_mode("cpu"), tiny.packages()) == ("Tiny", "eager", ["tiny-frame"])


def test_version_is_the_locks(folder: Path) -> None:
    assert frameworks.load("tiny").version("cpu") == ""
    (folder / "tiny.cpu.lock").write_text("# by hand\ntiny-frame==1.0\n\nipykernel==7.4.0\n")
    assert frameworks.load("tiny").version("cpu") == "1.0"
    assert frameworks.load("tiny").version("cuda") == ""


def test_a_new_framework_is_one_toml_and_its_lock(folder: Path) -> None:
    (folder / "other.toml").write_text(VALID.replace("Tiny", "Other"))
    assert list(frameworks.load_all()) == ["other", "tiny"]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('title = "Tiny"', "", "title: Field required"),
        ('title = "Tiny"', 'titel = "Tiny"', "title: Field required"),
        ('about = "as it is"', 'about = "as it is"\nfast = true', "modes.eager.fast: Extra inputs"),
        ('["3.11"]', '["three"]', "python.0: String should match"),
        ('["3.11"]', "[]", "python: List should have at least 1 item"),
        ("[devices.cpu]", "[devices.tpu]", "devices.tpu"),
        ('{ cpu = "eager" }', '{ cpu = "graph" }', "default_mode 'graph' isn't one of the modes: eager"),
        ('{ cpu = "eager" }', '{ cuda = "eager" }', "default_mode must name a mode for each of the devices"),
        ('title = "Tiny"', "title = ", "not valid TOML"),
    ],
)
def test_error_names_the_file_and_the_field(folder: Path, before: str, after: str, message: str) -> None:
    (folder / "tiny.toml").write_text(VALID.replace(before, after))
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        frameworks.load("tiny")
    assert str(raised.value).startswith(f"{folder / 'tiny.toml'}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("line", ["numpy", "numpy>=1.0", "numpy==1.0+local", "--find-links /x", "numpy @ file:///x"])
def test_line_of_a_lock_that_pins_nothing_is_refused(folder: Path, line: str) -> None:
    (folder / "tiny.cpu.lock").write_text(f"tiny-frame==1.0\n{line}\n")
    with pytest.raises(UserError, match=r"tiny\.cpu\.lock: line 2: "):
        frameworks.load("tiny").pins("cpu")


def test_missing_lock_says_how_to_write_it(folder: Path) -> None:
    with pytest.raises(UserError, match="rosetta environments lock tiny --device cpu"):
        frameworks.load("tiny").pins("cpu")


def test_a_workload_may_have_a_default_mode_of_its_own(folder: Path) -> None:
    modes = '[modes.graph]\nabout = "traced"\n[workloads.gru_imdb]\ndefault_mode = { cpu = "graph" }\n'
    (folder / "tiny.toml").write_text(VALID + modes)
    tiny = frameworks.load("tiny")
    assert tiny.default_mode("cpu", "gru_imdb") == "graph"
    assert tiny.default_mode("cpu", "cnn_cifar10") == tiny.default_mode("cpu") == "eager"
    (folder / "tiny.toml").write_text(VALID + modes.replace('cpu = "graph"', 'cpu = "fast"'))
    with pytest.raises(UserError, match="default_mode 'fast' isn't one of the modes: eager, graph"):
        frameworks.load("tiny")
