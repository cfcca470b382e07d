"""Which GPUs this process sees, found without loading CUDA or ROCm: loading them would fix the choice of GPUs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"

# Devices that only the CUDA or ROCm runtime keeps open (on WSL: /dev/dxg); nvidia-smi and its library do not.
_RUNTIME_DEVICES = {"/dev/nvidia-uvm", "/dev/kfd", "/dev/dxg"}


@dataclass(frozen=True)
class VisibleGpus:
    """GPUs that this process sees. Entry i of `variable` selects GPU `ids[i]`.

    Two processes on one host see the same GPU if its id is the same: a UUID where known, because under a scheduler's
    cgroups, index 0 may be another GPU in each process.
    """

    variable: str
    entries: tuple[str, ...]
    ids: tuple[str, ...]


def visible_gpus(variables: Mapping[str, str], nvidia: Sequence[str] | None, amd: Sequence[str] | None) -> VisibleGpus:
    """Apply the variables that restrict GPUs to the ids of those that are installed (None: unknown)."""
    if nvidia is not None or (amd is None and not variables.keys() & {HIP, ROCR}):
        found, variable = _listed(variables.get(CUDA), nvidia), CUDA
    else:
        # HIP selects from the GPUs that ROCr leaves, and reads CUDA's variable if its own is not set.
        if ROCR in variables or amd is not None:
            amd = tuple(_listed(variables.get(ROCR), amd).values())
        variable = CUDA if CUDA in variables and HIP not in variables else HIP
        found = _listed(variables.get(variable), amd)
    return VisibleGpus(variable, tuple(found), tuple(found.values()))


def _listed(text: str | None, ids: Sequence[str] | None) -> dict[str, str]:
    """Map the entries of a variable to ids. As in CUDA, an invalid entry ends the list and a repeated one voids it."""
    if text is None:
        return {str(i): one for i, one in enumerate(ids or ())}
    found: dict[str, str] = {}
    for entry in map(str.strip, text.split(",")):
        one = _id_of(entry, ids)
        if one is None:
            break
        if one in found.values():
            return {}
        found[entry] = one
    return found


def _id_of(entry: str, ids: Sequence[str] | None) -> str | None:
    """Id of the GPU that an entry selects: an index, a UUID or its beginning, or a part of a GPU (MIG)."""
    if entry.startswith("MIG-"):
        return entry
    if entry.startswith("GPU-"):
        matches = [one for one in ids or () if one.lower().startswith(entry.lower())]
        if len(matches) == 1:
            return matches[0]
        all_known = ids is not None and all(one.startswith("GPU-") for one in ids)
        return None if all_known else entry
    number = re.match(r"\+?[0-9]+", entry)
    if number is None:
        return None
    index = int(number[0])
    if ids is None:
        return str(index)
    return ids[index] if index < len(ids) else None


def installed_gpus(variables: Mapping[str, str]) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Find the ids of the NVIDIA and of the AMD GPUs that this process may open; None where none is found."""
    nvidia = nvidia_gpus()
    if not nvidia and CUDA not in variables:  # slow, so only where no variable lists them
        nvidia = _nvidia_smi()
    return nvidia or None, amd_gpus() or None


def nvidia_gpus(proc: Path = Path("/proc/driver/nvidia/gpus"), devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Ids of the GPUs of NVIDIA's driver on Linux, in the order of their PCI addresses."""
    found = []
    for path in sorted(proc.glob("*/information")):
        fields = dict(re.findall(r"^(.+?):\s*(.*?)\s*$", path.read_text(), re.MULTILINE))
        # The driver lists all GPUs of the host; a container or a scheduler's cgroup grants access to some of them.
        if os.access(devices / f"nvidia{fields.get('Device Minor', '')}", os.R_OK | os.W_OK):
            uuid = fields.get("GPU UUID", "?")
            found.append(path.parent.name if "?" in uuid else uuid)  # unknown until the GPU is first used
    return tuple(found)


def _nvidia_smi() -> tuple[str, ...]:
    """Ids of NVIDIA GPUs without the driver's files (WSL), or before its device nodes are created."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    try:
        done = subprocess.run([command, "-L"], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(re.findall(r"^GPU \d+: .*\(UUID: (GPU-[^)]+)\)", done.stdout, re.MULTILINE))


def amd_gpus(nodes: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> tuple[str, ...]:
    """Ids of the GPUs of AMD's driver, in ROCr's order. CPUs are nodes too."""
    found = []
    for path in sorted(nodes.glob("*/properties"), key=lambda path: int(path.parent.name)):
        try:
            fields = dict(re.findall(r"^(\w+) (\d+)$", path.read_text(), re.MULTILINE))
        except OSError:  # a cgroup hides this GPU
            continue
        if int(fields.get("simd_count", 0)) > 0:
            unique = int(fields.get("unique_id", 0))
            found.append(f"GPU-{unique:016x}" if unique else f"node {path.parent.name}")
    return tuple(found)


def initialised_by(open_files: Path = Path("/proc/self/fd")) -> str:
    """Name what in this process has already initialised its GPUs, after which the variables have no effect; or ''."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "PyTorch"
    if {"cuda", "rocm", "gpu"} & set(getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", ())):
        return "JAX"
    context = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
    if getattr(context, "_initialized", False):
        return "TensorFlow"
    # Also torch.cuda.is_available() and an MPI library that moves GPU memory initialise CUDA.
    for path in open_files.glob("*"):
        try:
            if str(path.readlink()) in _RUNTIME_DEVICES:
                return "another library (or torch.cuda.is_available())"
        except OSError:  # closed since
            continue
    return ""
