"""Commands in documentation pages."""

import re
from pathlib import Path


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("make ")]


def python_sections(page: Path) -> dict[str, str]:
    """Python code of each section of a page, by its heading."""
    sections = re.split(r"^#+ (.+)\n", page.read_text(), flags=re.MULTILINE)[1:]
    found = {title: python_blocks(text) for title, text in zip(sections[::2], sections[1::2], strict=True)}
    return {title: "\n".join(blocks) for title, blocks in found.items() if blocks}


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)
