"""Write an exported policy to a file whose suffix names the format."""

from __future__ import annotations

import contextlib
from pathlib import Path

import safetensors.numpy
from safetensors import SafetensorError, safe_open

from shoal.base import disk
from shoal.errors import DiskFault, MissingExtra, UsageError
from shoal.policies.export.description import description
from shoal.policies.export.layers import tensors
from shoal.policies.policy import FORMAT, SavedPolicy


def export(saved: SavedPolicy, path: Path, source: Path | None) -> None:
    """Write a policy that was loaded from the file `source`, if from any."""
    problems = _problems(path, source)
    if problems:
        raise UsageError(problems)
    content = _FORMATS[path.suffix](saved)
    try:
        disk.write_file(path, content)
    except OSError as error:
        raise DiskFault(f"the export {path} could not be written: {error.strerror}") from None


def _problems(path: Path, source: Path | None) -> list[str]:
    found = []
    if path.suffix not in _FORMATS:
        found.append(
            f"{str(path)!r} names no format that policies are exported to. Supported: a file ending with "
            f"{' or '.join(_FORMATS)}, and policy.to_torch() for a PyTorch module"
        )
    if not path.parent.is_dir():
        found.append(f"there is no folder {path.parent} to export to")
    if path.is_dir():
        found.append(f"{path} is a folder: name a file in it, for example {path / 'policy.onnx'}")
    elif path.exists() and ((source is not None and source.exists() and path.samefile(source)) or _belongs(path)):
        found.append(f"{path} belongs to a run, which needs it as it is: choose another name for the export")
    return found


def _belongs(path: Path) -> bool:
    """Whether a file is a policy file, or lies in a checkpoint."""
    if (path.parent / "manifest.json").is_file():
        return True
    with contextlib.suppress(SafetensorError, OSError), safe_open(path, framework="numpy") as file:
        return (file.metadata() or {}).get("format") == FORMAT
    return False


def _safetensors(saved: SavedPolicy) -> bytes:
    content: bytes = safetensors.numpy.save(tensors(saved.policy, saved.weights), metadata=description(saved))
    return content


def _onnx(saved: SavedPolicy) -> bytes:
    try:
        from shoal.policies.export.onnx_graph import onnx_model
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != "onnx":
            raise
        raise MissingExtra("export to ONNX needs the package onnx. Install it: pip install 'shoal[onnx]'") from None
    return onnx_model(saved).SerializeToString()


_FORMATS = {".safetensors": _safetensors, ".onnx": _onnx}
