"""Parse a command line into settings."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import typing
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from shoal.errors import UsageError
from shoal.runs import presets

if TYPE_CHECKING:
    from shoal.algos.base import AlgorithmConfig
    from shoal.runs.spec import RunSpec

T = TypeVar("T")

NO_PRESET = "--no-preset"
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
    """Refuse a repeated flag that takes several values: tyro would silently keep only the last values."""
    flags = Counter(_flag(word) for word in words)
    again = [flag for flag in _flags_of_several_values(kind) if flags[flag] > 1]
    if again:
        raise UsageError(
            f"given more than once, of which only the last would count: {', '.join(again)}. All values follow one "
            f"flag: {again[0]} A B"
        )


def _flags_of_several_values(kind: type[Any]) -> Iterator[str]:
    marked = typing.get_type_hints(kind, include_extras=True)
    for name, hint in typing.get_type_hints(kind).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _flags_of_several_values(hint)
        elif typing.get_origin(hint) is tuple and tyro.conf.UseAppendAction not in typing.get_args(marked[name]):
            yield f"--{name.replace('_', '-')}"


def _flag(word: str) -> str:
    """Return the flag that a word gives, with dashes as tyro spells it; empty for a value."""
    return word.partition("=")[0].replace("_", "-") if word.startswith("--") else ""


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
    from shoal.runs.keywords import with_n_envs
    from shoal.runs.settings import Settings
    from shoal.runs.spec import RunSpec

    if not words or words[0] in ("-h", "--help"):
        print(f"usage: shoal {command} ALGORITHM ENVIRONMENT [--setting value ...]\n")
        print(f"Algorithms: {', '.join([*algos.ALGORITHMS, *algos.installed()])}")
        print(f"Your own:   its module or file, as in shoal {command} ./a2c.py CartPole-v1")
        print(f"Example:    shoal {command} trpo CartPole-v1 {example}")
        print(f"Settings:   shoal {command} trpo --help")
        sys.exit(0 if words else 2)
    name, *rest = words
    name = algos.full_name(name)
    module = algos.load(name)
    own = {field.name for field in dataclasses.fields(typing.cast(Any, extra))}
    if both := own & {field.name for field in dataclasses.fields(module.Config)}:
        raise UsageError(
            f"{name} has settings with the names of options of shoal {command}, so their flags would mean two things: "
            f"{', '.join(sorted(both))}. Rename them in its Config"
        )
    fields: list[tuple[str, Any]] = [("settings", Settings), ("config", module.Config), ("extra", extra)]
    kind: type[Any] = dataclasses.make_dataclass("RunArgs", fields, frozen=True)
    description = f"{(module.__doc__ or '').strip()}\n\nExample: shoal {command} {name} CartPole-v1 {example}"
    rest, n_envs = _replace_aliases(_env_first(rest), module.Config)
    try:
        env, default = _from_preset(kind, name, rest, f"{command} {name}", description)
        parsed = parse(kind, rest, f"{command} {name}", description, default)
    except SystemExit as end:
        if not end.code:  # after --help
            print(_alias_help(module.Config))
        raise
    settings, config = parsed.settings, parsed.config
    if env is not None:
        settings = dataclasses.replace(settings, env=env)
    if n_envs is not None:
        config = with_n_envs(config, n_envs, "--n-envs")
    return RunSpec(name, settings, config), parsed.extra


def _from_preset(
    kind: type[T], algo: str, words: list[str], command: str, description: str
) -> tuple[str | None, T | None]:
    """Return the environment and the default settings of the preset that the words name, if there is one.

    Takes `--no-preset` out of the words.
    """
    if NO_PRESET in words:
        words.remove(NO_PRESET)
        return None, None
    if words and not words[0].startswith("-"):
        name = words[0]
    else:
        parsed: Any = parse(kind, words, command, description)
        name = parsed.settings.env
    preset = presets.find_preset(algo, name)
    if preset is None:
        _hint_at_preset(algo, name)
        return None, None
    print(f"Using the preset {name} of {algo} (to see it: shoal presets {algo} {name}; without it: {NO_PRESET})")
    parts = typing.get_type_hints(kind).values()
    return preset["env"], kind(*[part(**presets.own(part, preset)) for part in parts])


def _env_first(words: list[str]) -> list[str]:
    """Accept `--env NAME` and `--env-id NAME`, as other libraries spell it, for the positional argument."""
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in ("--env", "--env-id"):
            after = words[at + 1 :]
            return [value, *words[:at], *after] if equals else [*after[:1], *words[:at], *after[1:]]
    return words


def _hint_at_preset(algo: str, name: str) -> None:
    """Print which preset may be meant, if there is no environment of this name (which is refused later)."""
    from shoal import algos
    from shoal.envs.names import env_problems

    near = difflib.get_close_matches(name, presets.presets(algo), n=1, cutoff=0.7)
    others = [other for other in algos.ALGORITHMS if presets.find_preset(other, name)]
    if not (near or others) or not env_problems(name):
        return
    if near:
        hint = f"{algo} has a preset {near[0]!r}; did you mean that?"
    else:
        env = (presets.find_preset(others[0], name) or {})["env"]
        hint = f"{name!r} is a preset of {' and '.join(others)}, on {env}; {algo} has none of that name"
    print(hint, file=sys.stderr)


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
        flag = _flag(word)
        if flag not in known:
            plain.append(word)
            continue
        _, equals, value = word.partition("=")
        if flag == N_ENVS:
            n_envs = _count(value if equals else next(rest, ""))
        else:
            plain.append(f"--{known[flag].setting}{equals}{value}")
    width = next((word for word in plain if _flag(word) == "--width"), None)
    if n_envs is not None and width is not None:
        given = width if "=" in width else " ".join(plain[plain.index(width) :][:2])
        raise UsageError(f"{N_ENVS} {n_envs} and {given} both set the width (n_envs = lanes x width): give only one")
    return plain, n_envs


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{N_ENVS} must be a number, not {text!r}") from None
