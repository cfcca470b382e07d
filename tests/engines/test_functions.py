import pytest

from shoal.engines import functions
from shoal.engines.functions import Functions, name_of
from shoal.engines.wire import Kind, Message, encode
from shoal.engines.worker import Server
from shoal.envs.make import EnvSpec, make_env
from shoal.envs.names import registered
from shoal.errors import NotNameable, UsageError
from tests.support import tasks


def test_name_and_back() -> None:
    name = name_of(tasks.echo)
    assert name == "tests.support.tasks:echo"
    assert Functions(allow=["tests"]).find(name) is tasks.echo


def test_only_allowed_modules() -> None:
    with pytest.raises(UsageError, match=r"may not run os:system.*--allow os"):
        Functions().find("os:system")
    with pytest.raises(UsageError, match="may not run"):
        Functions(allow=["test"]).find("tests.support.tasks:echo")
    assert Functions().find("shoal.sampling.tasks:describe")


@pytest.mark.parametrize(
    "name",
    ["shoal.commands.mpirun:_run", "shoal.cli:main", "shoal.base.disk:write_file", "shoal.commands.verify:_shoal"],
)
def test_not_all_of_shoal_is_a_task(name: str) -> None:
    with pytest.raises(UsageError, match="may not run"):
        Functions().find(name)


def test_what_a_module_imports_is_not_its_own() -> None:
    with pytest.raises(UsageError, match="only imports it"):
        Functions(allow=["tests"]).find("tests.support.tasks:Path")


def test_modules_of_environments_must_be_allowed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_trusted", frozenset({"tests.envs"}))
    with pytest.raises(UsageError, match=r"may not import tests\.support\.toys.*--allow tests\.support\.toys"):
        registered("tests.support.toys:Walk-v0")
    monkeypatch.setattr(functions, "_trusted", frozenset({"tests"}))
    assert registered("tests.support.toys:Walk-v0").id == "Walk-v0"


def test_a_program_to_play_against_must_be_allowed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_trusted", frozenset())
    with pytest.raises(UsageError, match=r"--allow shoal\.envs\.gtp"):
        make_env(EnvSpec("shoal/Go9x9-v0", {"opponent": "touch pwned"}))


def test_own_tasks_exist() -> None:
    for name in ("fragment", "episodes", "evaluate", "describe", "canary"):
        assert callable(Functions().find(f"{functions.OWN_TASKS}:{name}"))
    for name in ("_hidden", "Policy", "seeding"):
        with pytest.raises(UsageError, match=r"may not run|no function"):
            Functions().find(f"{functions.OWN_TASKS}:{name}")


def test_server_refuses_what_is_not_allowed() -> None:
    reply = Server().handle(Message(Kind.TASK, 1, encode(("os:system", ["echo pwned"]))))
    assert reply is not None
    assert reply.kind == Kind.FAILED


def test_what_is_not_a_function() -> None:
    with pytest.raises(UsageError, match="no function not_a_function"):
        Functions(allow=None).find("tests.support.tasks:not_a_function")


def test_shadowed_name_is_refused() -> None:
    def echo(x: int) -> int:
        return x

    echo.__qualname__ = "echo"
    echo.__module__ = tasks.__name__
    with pytest.raises(NotNameable, match="something else"):
        name_of(echo)
