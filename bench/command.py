"""What `shoal bench` does: run one part, or several one after the other."""

from __future__ import annotations

import difflib
import importlib
import shlex
import time
from pathlib import Path
from typing import Any

from bench import ALL, PARTS
from shoal.base import signals
from shoal.cli.parsing import console, parse, say
from shoal.errors import UsageError

PAGE = Path("docs/benchmarks.md")


def bench(words: list[str]) -> int:
    """Run one part, or several one after the other."""
    parts, rest, command = list(ALL), words, "bench"
    if words and not words[0].startswith("-"):
        part, *rest = words
        if part not in PARTS:
            near = difflib.get_close_matches(part, PARTS, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UsageError(f"there is no bench {part!r}, only {', '.join(PARTS)}.{hint}")
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
            typed = shlex.join(["shoal", "bench", part, *_without_places(rest)])
            rough = "QUICK, and therefore rough: for figures to rely on, leave --quick out. " if options.quick else ""
            say(out, f"{typed}: {PARTS[part][1]}. {rough}".rstrip())
            report = module.run(options, print_line)
            report = report.signed(typed, rough)
            say(out, f"\n{report.text}")
            page = _page(options)
            if page is not None:
                from bench.report import write

                write(page, report)
                say(out, f"Written to {page}")
            say(out, f"{part} took {time.monotonic() - begun:.0f} s\n")
    return 0


def _options(part: str, words: list[str], command: str, shared: bool) -> tuple[Any, Any]:
    """A part's module, and its options from the words: all of its own, or only those that every part has."""
    module = importlib.import_module(f"bench.{PARTS[part][0]}")
    kind = module.Options
    quick = "--quick" in words
    default = kind(**kind.QUICK) if quick else None
    if not shared:
        return module, parse(kind, words, command, default=default)
    from bench.options import PeerOptions

    names = "\n".join(f"  shoal bench {name:8} {what}" for name, (_, what) in PARTS.items())
    description = f"Measure {', '.join(ALL)}, one after the other. One alone, or another:\n\n{names}"
    wanted = parse(PeerOptions, words, command, description)
    values = {name: getattr(wanted, name) for name in ("out", "quick", "peers") if hasattr(kind, name)}
    return module, kind(**(kind.QUICK if quick else {}) | values)


def _try_environments(names: set[str]) -> None:
    """Make each environment once, so that a package that is missing is said now and not after an hour."""
    from shoal.envs.make import EnvSpec
    from shoal.sampling.tasks import describe

    for name in sorted(names):
        describe(EnvSpec(name).to_record())


def _without_places(words: list[str]) -> list[str]:
    """The words without paths, which mean nothing to whoever reads the page elsewhere."""
    kept, skip = [], False
    for word in words:
        flag, equals, _ = word.partition("=")
        place = flag in ("--out", "--peers", "--results", "--svg")
        if flag == "--results":
            kept += [flag, "FILE"]  # what was not run now came from there
        elif not skip and not place:
            kept.append(word)
        skip = not skip and place and not equals
    return kept


def _page(options: Any) -> Path | None:
    """Where the tables go. Rough ones replace nothing unless told to."""
    if options.out is not None:
        return Path(options.out)
    return PAGE if PAGE.is_file() and not options.quick else None
