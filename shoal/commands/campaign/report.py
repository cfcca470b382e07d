"""The files at the end of a campaign."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.base import disk
from shoal.errors import DiskFault


@dataclass(frozen=True)
class CampaignReport:
    """A table, a note on its columns, and the files that contain both and the plot."""

    table: str
    note: str
    files: dict[Path, str]

    def write(self) -> None:
        """Write the files."""
        for path, content in self.files.items():
            try:
                disk.write_file(path, content.encode())
            except OSError as error:
                raise DiskFault(f"{path} could not be written: {error.strerror}. The table is above") from None
