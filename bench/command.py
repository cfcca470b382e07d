"""What `shoal bench` does: run one part, or several one after the other."""

from __future__ import annotations

import difflib
import importlib
import shlex
import time
from pathlib import Path
from typing import Any, Protocol

from bench import ALL, PARTS
from bench.options import BenchOptions, PeerOptions, Say
from bench.report import Report, write
from shoal.base import signals
from shoal.cli.console import console, say
from shoal.cli.parsing import parse
from shoal.errors import UsageError

PAGE = Path("docs/benchmarks.md")


class Part(Protocol):
    """The module of a part."""

    OPTIONS: type[BenchOptions]
    """A frozen dataclass whose fields, with their docstrings, become flags."""

    def run(self, options: Any, say: Say) -> Report:
        """Measure and report. `options` is an instance of `OPTIONS`."""


def bench(words: list[str]) -> int:
    """Run the part that is named, or all of `ALL`."""
    parts, rest, command = list(ALL), words, "bench"
    if words and not words[0].startswith("-"):
        part, *rest = words
        if part not in PARTS:
            near = difflib.get_close_matches(part, PARTS, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise UsageError(f"there is no bench {part!r}. {hint}Benches: {', '.join(PARTS)}")
        parts, command = [part], f"bench {part}"
    out = console()

    def print_line(line: str) -> None:
        say(out, line)

    chosen = [(part, *_options(part, rest, command, shared=len(parts) > 1)) for part in parts]
    problems = [problem for _, _, options in chosen for problem in options.problems()]
    if problems:
        raise UsageError(list(dict.fromkeys(problems)))
    _try_environments({env for _, _, options in chosen for env in options.environments()})
    with signals.listening():
        for part, module, options in chosen:
            begun = time.monotonic()
            typed = shlex.join(["shoal", "bench", part, *_without_paths(rest)])
            rough = "QUICK, so figures are rough: leave out --quick for reliable ones. " if options.quick else ""
            say(out, f"{typed}: {PARTS[part][1]}. {rough}".rstrip())
            report = module.run(options, print_line)
            report = report.signed(typed, rough)
            say(out, f"\n{report.text}")
            page = _page(options)
            if page is not None:
                write(page, report)
                say(out, f"Written to {page}")
            say(out, f"{part} took {time.monotonic() - begun:.0f} s\n")
    return 0


def _options(part: str, words: list[str], command: str, shared: bool) -> tuple[Part, BenchOptions]:
    """Import a part and parse its options; if `shared`, accept only the options that every part has."""
    module: Part = importlib.import_module(f"bench.{PARTS[part][0]}")
    kind = module.OPTIONS
    quick = "--quick" in words
    default = kind(**kind.QUICK) if quick else None
    if not shared:
        return module, parse(kind, words, command, default=default)
    names = "\n".join(f"  shoal bench {name:8} {what}" for name, (_, what) in PARTS.items())
    description = (
        f"Measure {', '.join(ALL)}, one after the other. To measure only one, or one of the others:\n\n{names}"
    )
    wanted = parse(PeerOptions, words, command, description)
    values: dict[str, Any] = {"out": wanted.out, "quick": wanted.quick}
    if issubclass(kind, PeerOptions):
        values["peers"] = wanted.peers
    return module, kind(**(kind.QUICK if quick else {}) | values)


def _try_environments(names: set[str]) -> None:
    """Create each environment once, so that a missing package is reported now and not after an hour."""
    from shoal.envs.make import EnvSpec
    from shoal.sampling.tasks import describe

    for name in sorted(names):
        describe(EnvSpec(name).to_record())


def _without_paths(words: list[str]) -> list[str]:
    """Leave out paths, which mean nothing to readers of the page on other machines."""
    kept, skip = [], False
    for word in words:
        flag, equals, _ = word.partition("=")
        has_path = flag in ("--out", "--peers", "--results", "--svg")
        if flag == "--results":
            kept += [flag, "FILE"]  # shows that some results may come from earlier runs
        elif not skip and not has_path:
            kept.append(word)
        skip = not skip and has_path and not equals
    return kept


def _page(options: BenchOptions) -> Path | None:
    """Choose the page for the tables. Rough figures only go where --out says."""
    if options.out is not None:
        return Path(options.out)
    return PAGE if PAGE.is_file() and not options.quick else None
