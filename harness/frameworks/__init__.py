"""The frameworks: one .toml each, with a lock file for each device. The entry points are `load` and `load_all`."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.project import UserError

FOLDER = Path(__file__).parent

_PIN = re.compile(r"([A-Za-z0-9][\w.-]*)==([\w.!]+)")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Mode(_Model):
    """How a framework executes."""

    about: str
    programs: list[str] = []  # one of these must be on PATH


class Device(_Model):
    """The variant of a framework for one kind of device."""

    requirements: Annotated[list[str], Field(min_length=1)]
    package: str | None = None  # where its distribution has another name than the framework's
    indexes: dict[str, str] = {}  # package: an index that is asked for this one beside pip's own
    build: list[str] = []  # installed first; everything else is then built without isolation


class Exceptions(_Model):
    """Where one workload is treated otherwise than all others."""

    default_modes: Annotated[dict[str, str], Field(alias="default_mode")]  # by device


class Framework(_Model):
    """One framework's file."""

    name: str
    title: str
    package: str  # the distribution whose version is reported
    import_name: str
    homepage: str
    python: Annotated[list[Annotated[str, Field(pattern=r"^3\.\d+$")]], Field(min_length=1)]  # preferred first
    modes: Annotated[dict[str, Mode], Field(min_length=1)]
    default_modes: Annotated[dict[str, str], Field(alias="default_mode")]  # by device
    workloads: dict[str, Exceptions] = {}
    variables: dict[str, str] = {}  # set before its import; "{threads}" stands for the number of threads
    devices: Annotated[dict[Annotated[str, Field(pattern="^(cpu|cuda)$")], Device], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        if set(self.default_modes) != set(self.devices):
            raise ValueError("default_mode must name a mode for each of the devices, and for no other")
        exceptions = [mode for workload in self.workloads.values() for mode in workload.default_modes.values()]
        for mode in (*self.default_modes.values(), *exceptions):
            if mode not in self.modes:
                raise ValueError(f"default_mode {mode!r} isn't one of the modes: {', '.join(self.modes)}")
        return self

    def default_mode(self, device: str, workload: str = "") -> str:
        """Return the mode that runs where none is asked for: the fastest by our measurements."""
        exceptions = self.workloads[workload].default_modes if workload in self.workloads else {}
        return {**self.default_modes, **exceptions}.get(device, next(iter(self.modes)))

    def packages(self) -> list[str]:
        """Return the names that the framework's distribution has, whatever the device."""
        return sorted({normal_name(device.package or self.package) for device in self.devices.values()})

    def lock_file(self, device: str) -> Path:
        """Return where the lock file for this device lies, or would lie."""
        return FOLDER / f"{self.name}.{device}.lock"

    def pins(self, device: str) -> dict[str, str]:
        """Return what the lock file for this device pins: versions by normalised name.

        Raises `UserError` where there is no lock file or where a line pins nothing.
        """
        path = self.lock_file(device)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError:
            raise UserError(
                f"{path}: no lock file; write it with: rosetta environments lock {self.name} --device {device}"
            ) from None
        pins = {}
        for number, line in enumerate(lines, 1):
            if line.strip() and not line.startswith("#"):
                pin = _PIN.fullmatch(line.strip())
                if not pin:
                    raise UserError(f"{path}: line {number}: {line.strip()!r} isn't of the form name==version")
                pins[normal_name(pin.group(1))] = pin.group(2)
        return pins

    def version(self, device: str) -> str:
        """Return the framework's version in the lock file for this device; empty where it has none."""
        if device not in self.devices or not self.lock_file(device).exists():
            return ""
        return self.pins(device).get(normal_name(self.devices[device].package or self.package), "")


def load(name: str) -> Framework:
    """Return one framework. Raises `UserError` that names the file and the field where the file isn't valid."""
    path = FOLDER / f"{name}.toml"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        return Framework.model_validate({**content, "name": name})
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from None
    except ValueError as error:
        if not isinstance(error, ValidationError):
            raise UserError(f"{path}: not valid TOML: {error}") from None
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {field + ': ' if field else ''}{first['msg']}") from None


def load_all() -> dict[str, Framework]:
    """Return all frameworks by name: each .toml in this folder is one."""
    return {path.stem: load(path.stem) for path in sorted(FOLDER.glob("*.toml"))}


def normal_name(package: str) -> str:
    """Return a package's name as registries compare it: "Jinja2" is "jinja2", "ml_dtypes" is "ml-dtypes"."""
    return re.sub(r"[-_.]+", "-", package).lower()


def pins_hash(pins: Iterable[tuple[str, str]]) -> str:
    """Return a hash of pinned packages, whatever their order."""
    return hashlib.sha256("\n".join(sorted(f"{name}=={version}" for name, version in pins)).encode()).hexdigest()[:16]
