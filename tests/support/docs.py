"""Commands in documentation pages."""

import re
from pathlib import Path


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("make ")]
