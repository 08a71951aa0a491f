"""What this machine is called, and which of its devices can be used."""

from __future__ import annotations

import re
import subprocess

from common import machine
from harness.project import UserError


def usable_device(asked: str) -> str:
    """Return "cpu" or "cuda" for what was asked: "auto" takes an NVIDIA GPU where one works."""
    if asked == "auto":
        return "cuda" if nvidia_gpu() else "cpu"
    if asked not in ("cpu", "cuda"):
        raise UserError(f"--device takes auto, cpu or cuda, not {asked!r}")
    if asked == "cuda" and not nvidia_gpu():
        raise UserError("--device cuda: nvidia-smi finds no NVIDIA GPU on this machine")
    return asked


def machine_name() -> str:
    """Return a name for this kind of machine: its processor, cores and GPU, for example "amd-epyc-2-cores"."""
    name = re.sub(r"\(R\)|\(TM\)|CPU|Processor|@.*", " ", machine.processor())
    words = [*name.split(), str(machine.usable_cores()), "cores", *nvidia_gpu().split()]
    return "-".join(re.sub(r"[^a-z0-9.]+", "-", word.lower()).strip("-") for word in words)


def nvidia_gpu() -> str:
    """Return the name of the first NVIDIA GPU, or an empty text where there is none that works."""
    return _nvidia_smi("name")


def nvidia_driver() -> str:
    """Return the version of the NVIDIA driver, or an empty text."""
    return _nvidia_smi("driver_version")


def _nvidia_smi(query: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return shown.strip().splitlines()[0].strip() if shown.strip() else ""
