"""Parse a command line into settings."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, cast

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from shoal.errors import UsageError
from shoal.runs.flags import flags_of, given_flag

if TYPE_CHECKING:
    from shoal.algos.base import AlgorithmConfig
    from shoal.runs.spec import RunSpec

T = TypeVar("T")

N_ENVS = "--n-envs"


class Alias(NamedTuple):
    """A flag under which other libraries know a setting."""

    setting: str
    """Algorithms without this setting do not have the alias."""
    meaning: str


ALIASES = {
    "--learning-rate": Alias("lr", "--learning-rate X is --lr X"),
    N_ENVS: Alias("width", f"{N_ENVS} N is --width W with lanes x W = N"),
}


# Any command -----------------------------------------------------------------------------------------------------


def parse(kind: type[T], words: list[str], command: str, description: str | None = None, default: T | None = None) -> T:
    """Parse the arguments of a command into a dataclass. On a mistake tyro prints what is wrong and exits with 2."""
    _refuse_repeated(kind, words)
    with _one_default_each():
        return tyro.cli(
            kind,
            args=words,
            prog=f"shoal {command}",
            description=description,
            default=tyro.MISSING_NONPROP if default is None else default,
            config=(tyro.conf.OmitArgPrefixes,),
        )


def _refuse_repeated(kind: type[Any], words: list[str]) -> None:
    """Refuse a setting that is given more than once: tyro would silently keep only the last value."""
    given = Counter(map(given_flag, words))
    single: list[str] = []
    several: list[str] = []
    for flag in flags_of(kind).values():
        used = [name for name in flag.names if given[name]]
        if not flag.repeats and sum(given[name] for name in used) > 1:
            (several if flag.several else single).append("/".join(used))
    problem = "given more than once, of which only the last would count"
    problems = [f"{problem}: {', '.join(single)}. Give each only once"] if single else []
    if several:
        problems.append(f"{problem}: {', '.join(several)}. All values follow one flag: {several[0]} A B")
    if problems:
        raise UsageError(problems)


def _refuse_unknown(kind: type[Any], words: list[str]) -> None:
    """Refuse flags that do not exist, with the nearest one that does, which tyro does not suggest."""
    known = {name for flag in flags_of(kind).values() for name in flag.names}
    unknown = [flag for word in words if (flag := given_flag(word)).startswith("--") and flag not in {*known, "--help"}]
    near = {flag: difflib.get_close_matches(flag, [*known, *ALIASES], n=1) for flag in unknown}
    if unknown:
        hints = [f"{flag} (did you mean {found[0]}?)" if found else flag for flag, found in near.items()]
        raise UsageError(f"Unrecognized options: {', '.join(hints)}")


def _one_default_each() -> ConstructorRegistry:
    """Make a registry that hides tyro's "(default: None)" where the help text itself names the default."""
    registry = ConstructorRegistry()
    asking = False

    def hide(field: StructFieldSpec) -> StructFieldSpec:
        text = field.helptext() if callable(field.helptext) else field.helptext
        if field.default or "default:" not in (text or "").lower():
            return field
        hidden: Any = Annotated[field.type, tyro.conf.arg(help_behavior_hint="")]
        return dataclasses.replace(field, type=hidden)

    @registry.struct_rule
    def rule(info: StructTypeInfo) -> StructConstructorSpec | None:
        nonlocal asking
        if asking or not dataclasses.is_dataclass(info.type):
            return None
        asking = True  # tyro's own rule is asked next, so this one must not apply again
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            asking = False
        if not isinstance(spec, StructConstructorSpec):
            return None
        return dataclasses.replace(spec, fields=tuple(map(hide, spec.fields)))

    return registry


# Commands that take an algorithm ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _NoArgs:
    """No arguments in addition to those of a run."""


def parse_spec(command: str, words: list[str]) -> RunSpec:
    """Parse an algorithm's name and the settings of a run, which start from a preset where there is one."""
    return parse_spec_and(_NoArgs, command, words)[0]


def parse_spec_and(extra: type[T], command: str, words: list[str], example: str = "--seed 1") -> tuple[RunSpec, T]:
    """Parse the settings of a run, as `parse_spec`, and further arguments of the command.

    `example` has flags that suit every algorithm, for the help text.
    """
    from shoal import algos
    from shoal.cli import preset_flag
    from shoal.runs.keywords import with_n_envs
    from shoal.runs.settings import Settings
    from shoal.runs.spec import RunSpec

    if not words or words[0] in ("-h", "--help"):
        print(f"usage: shoal {command} ALGORITHM ENVIRONMENT [--setting value ...]\n")
        print(f"Algorithms: {', '.join([*algos.ALGORITHMS, *algos.installed()])}")
        print(f"Your own:   its module or file, as in shoal {command} ./a2c.py CartPole-v1")
        print(f"Example:    shoal {command} trpo CartPole-v1 {example}")
        print(f"Settings:   shoal {command} trpo --help")
        print(
            f"Presets:    shoal presets lists them; to use one of your own: shoal {command} ppo --preset my.toml:fast"
        )
        sys.exit(0 if words else 2)
    name, *rest = words
    name = algos.full_name(name)
    module = algos.load(name)
    own = {field.name for field in dataclasses.fields(cast(Any, extra))}
    if both := own & {field.name for field in dataclasses.fields(module.Config)}:
        raise UsageError(
            f"{name} has settings with the names of options of shoal {command}, so their flags would mean two things: "
            f"{', '.join(sorted(both))}. Rename them in its Config"
        )
    fields: list[Any] = [("settings", Settings), ("config", module.Config), ("extra", extra), preset_flag.FIELD]
    kind: type[Any] = dataclasses.make_dataclass("RunArgs", fields, frozen=True)
    description = f"{(module.__doc__ or '').strip()}\n\nExample: shoal {command} {name} CartPole-v1 {example}"
    wanted, rest = preset_flag.take(rest)
    rest, n_envs = _replace_aliases(_env_first(rest), module.Config)
    _refuse_unknown(kind, rest)
    try:
        parse_run = functools.partial(parse, kind, rest, f"{command} {name}", description)
        preset = preset_flag.find(name, wanted, lambda: _env_of(rest, parse_run))
        default = None if preset is None else preset_flag.defaults(kind, preset, rest)
        parsed = parse_run(default)
    except SystemExit as end:
        if not end.code:  # after --help
            print(_alias_help(module.Config))
        raise
    settings, config = parsed.settings, parsed.config
    if preset is not None:
        env = None if wanted is True or settings.env == preset.env else settings.env
        settings = dataclasses.replace(settings, env=preset.on(env)["env"])
    if n_envs is not None:
        config = with_n_envs(config, n_envs, "--n-envs")
    return RunSpec(name, settings, config), parsed.extra


def _env_of(words: list[str], parse_run: Callable[[], Any]) -> str:
    """Return the environment or the name of a preset that the words give, first or anywhere."""
    return words[0] if words and not words[0].startswith("-") else parse_run().settings.env


def _env_first(words: list[str]) -> list[str]:
    """Accept `--env NAME` and `--env-id NAME`, as other libraries spell it, for the positional argument."""
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in ("--env", "--env-id"):
            after = words[at + 1 :]
            return [value, *words[:at], *after] if equals else [*after[:1], *words[:at], *after[1:]]
    return words


# Aliases ---------------------------------------------------------------------------------------------------------


def _known_aliases(config: type[AlgorithmConfig]) -> dict[str, Alias]:
    """Select the aliases whose setting an algorithm has."""
    settings = {field.name for field in dataclasses.fields(config)}
    return {flag: alias for flag, alias in ALIASES.items() if alias.setting in settings}


def _alias_help(config: type[AlgorithmConfig]) -> str:
    meanings = [alias.meaning for alias in _known_aliases(config).values()]
    return f"Aliases: {'; '.join(['--total-timesteps N is --steps N', *meanings])}."


def _replace_aliases(words: list[str], config: type[AlgorithmConfig]) -> tuple[list[str], int | None]:
    """Replace aliases by the flags that they stand for, and take out the number of `--n-envs`."""
    known = _known_aliases(config)
    plain: list[str] = []
    n_envs: int | None = None
    rest = iter(words)
    for word in rest:
        flag = given_flag(word)
        if flag not in known:
            plain.append(word)
            continue
        _, equals, value = word.partition("=")
        if flag == N_ENVS:
            if n_envs is not None:
                raise UsageError(f"{N_ENVS} is given more than once: give it only once")
            n_envs = _count(value if equals else next(rest, ""))
        else:
            plain.append(f"--{known[flag].setting}{equals}{value}")
    width = next((word for word in plain if given_flag(word) == "--width"), None)
    if n_envs is not None and width is not None:
        given = width if "=" in width else " ".join(plain[plain.index(width) :][:2])
        raise UsageError(f"{N_ENVS} {n_envs} and {given} both set the width (n_envs = lanes x width): give only one")
    return plain, n_envs


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{N_ENVS} must be a number, not {text!r}") from None
