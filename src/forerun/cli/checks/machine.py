"""Checks of the machine: versions, cores, memory, bandwidth, matrix rates."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator

import torch
from packaging.requirements import Requirement

from forerun.bench import machine
from forerun.cli.checks.check import Check
from forerun.engine.profile_key import cpu_name
from forerun.target.checkpoint import GIB, available_memory


def machine_checks() -> Iterator[Check]:
    yield from _versions()
    cores, threads = machine.usable_cores(), torch.get_num_threads()
    yield Check("cpu", "ok", f"{cpu_name()}, {cores} usable cores")
    yield Check.of(
        "threads", threads <= cores, f"{threads}", f"at most {cores}, the usable cores", f"--threads {cores}"
    )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    yield Check.of(
        "load", load <= cores, f"{load:.1f} processes wait or run", f"at most {cores}",
        "what is measured below is too low while other work runs",
    )  # fmt: skip
    yield Check("memory", "ok", f"{available_memory(torch.device('cpu')) / GIB:.1f} GiB available")
    yield from _devices()
    yield from _rates()


def _versions() -> Iterator[Check]:
    """Installed versions against those the package asks for."""
    asked = {r.name: r.specifier for r in map(Requirement, importlib.metadata.requires("forerun") or ())}
    for name, version in machine.versions().items():
        wanted = asked.get(name)
        fine = wanted is None or wanted.contains(version, prereleases=True)
        yield Check.of(name, fine, version, str(wanted), f'pip install "{name}{wanted}"')


def _devices() -> Iterator[Check]:
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        yield Check(f"cuda:{i}", "ok", f"{card.name}, {card.total_memory / GIB:.0f} GiB")
    if torch.backends.mps.is_available():
        yield Check("mps", "ok", "available")


def _rates() -> Iterator[Check]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield Check("read bandwidth", "ok", f"{machine.read_bandwidth(device)} on {device}")
    single = machine.matrix_rate(torch.float32, device)
    yield Check("float32 GEMM", "ok", str(single))
    half = machine.matrix_rate(torch.bfloat16, device)
    yield Check.of(
        "bfloat16 GEMM", half.median >= single.median, str(half), "no slower than float32",
        "--dtype float32: this device has no fast bfloat16 arithmetic",
    )  # fmt: skip
