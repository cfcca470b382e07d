"""The parts of the redis engine that need no server: addresses, sealed messages, fair shares."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import engines
from shoal.engines.redis import address
from shoal.engines.redis.assignment import assign
from shoal.engines.redis.envelope import Header, Serials, seal, unseal
from shoal.engines.redis.records import HeadRecord, MachineRecord, WorkerRecord
from shoal.errors import UsageError, WireError

# Addresses and secrets -----------------------------------------------------------------------------------------


def secret(path: Path, content: str = "open-sesame-" * 4, mode: int = 0o600) -> Path:
    path.write_text(content)
    path.chmod(mode)
    return path


def test_addresses_of_every_kind() -> None:
    assert engines.split_address("redis://host:1") == ("redis", "host:1")
    assert engines.split_address("rediss://host:1") == ("redis", "rediss://host:1")
    assert engines.split_address("unix:///run/s") == ("redis", "unix:///run/s")
    assert engines.split_address("redis") == ("redis", None)
    found = address.find_server("rediss://me@host:7/3", {"XDG_STATE_HOME": "/nowhere"})
    assert (found.scheme, found.user, found.host, found.port, found.database) == ("rediss", "me", "host", 7, 3)
    assert found.url == "rediss://me@host:7/3"
    assert address.find_server("unix:///run/s", {"XDG_STATE_HOME": "/nowhere"}).url == "unix:///run/s"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("redis://", "no host"),
        ("redis://host:port", "not the address"),
        ("unix://", "no path"),
        ("redis://host/db", "not the number of a database"),
        ("redis://host?colour=red", "colour. Options: password_file"),
    ],
)
def test_addresses_that_are_none(bad: str, message: str) -> None:
    assert message in "\n".join(engines.engine_problems(bad, None))


def test_password_in_an_address_is_refused_and_not_repeated() -> None:
    (problem,) = engines.engine_problems("redis://me:hunter2@host:1", None)
    assert "process list" in problem
    assert "redis://me@host:1?password_file=FILE" in problem
    assert "hunter2" not in problem


def password(*where: Any, **files: Any) -> str:
    return address.find_server(*where, **files).password


def test_where_passwords_come_from(tmp_path: Path) -> None:
    nowhere = {"XDG_STATE_HOME": str(tmp_path)}
    file = secret(tmp_path / "pw", "from-file\n")
    assert password(f"redis://h?password_file={file}", nowhere) == "from-file"
    assert password("redis://h", nowhere | {"SHOAL_REDIS_PASSWORD_FILE": str(file)}) == "from-file"
    assert password("redis://h", nowhere | {"SHOAL_REDIS_PASSWORD": "from-env"}) == "from-env"
    assert password("redis://h", nowhere, files={"password_file": str(file)}) == "from-file"
    found = address.find_server(None, nowhere | {"SHOAL_REDIS_URL": "redis://u:from%2Durl@h:5"})
    assert [found.password, found.user, found.port] == ["from-url", "u", 5]
    for shown in (repr(found), found.url):
        assert "from-url" not in shown
    started = address.connection_file(nowhere)
    started.parent.mkdir(parents=True)
    started.write_text(json.dumps({"url": "redis://127.0.0.1:77", "password": "from-start"}))
    assert password(None, nowhere) == "from-start"
    assert password("redis://localhost:77", nowhere) == "from-start"
    assert password("redis://127.0.0.1:78", nowhere) == "", "not for another server"


def test_files_that_are_no_secret(tmp_path: Path) -> None:
    nowhere = {"XDG_STATE_HOME": str(tmp_path)}
    with pytest.raises(UsageError, match="chmod 600"):
        address.find_server("redis://h", nowhere, files={"password_file": str(secret(tmp_path / "a", mode=0o644))})
    with pytest.raises(UsageError, match="is empty"):
        address.find_server("redis://h", nowhere, files={"password_file": str(secret(tmp_path / "b", ""))})
    with pytest.raises(UsageError, match="cannot be read"):
        address.find_server("redis://h", nowhere, files={"password_file": str(tmp_path / "none")})
    with pytest.raises(UsageError, match="at least 16"):
        address.find_server("redis://h", nowhere, files={"key_file": str(secret(tmp_path / "c", "short"))})
    with pytest.raises(UsageError, match=r"CA certificates.*does not exist"):
        address.find_server("redis://h", nowhere, files={"ca_file": str(tmp_path / "none")})
    with pytest.raises(UsageError, match="shoal redis start"):
        address.find_server(None, nowhere)
    with pytest.raises(UsageError, match="SHOAL_REDIS_URL: not the address") as caught:
        address.find_server(None, nowhere | {"SHOAL_REDIS_URL": "redis://:hunter2/x@h:1"})
    assert "hunter2" not in str(caught.value)


# Messages ------------------------------------------------------------------------------------------------------

KEY = b"k" * 32
HEADER = Header("run", 1, "machine", 2, 3, 4, 5)


def test_a_sealed_message_opens_again() -> None:
    for key in (b"", KEY):
        header, frame = unseal(key, "name", seal(key, "name", HEADER, b"frame"), Header)
        assert header == HEADER
        assert bytes(frame) == b"frame"


def test_every_changed_byte_of_a_signed_message_is_noticed() -> None:
    sealed = seal(KEY, "name", HEADER, b"frame")
    for at in range(len(sealed)):
        changed = bytearray(sealed)
        changed[at] ^= 1
        with pytest.raises(WireError):
            unseal(KEY, "name", bytes(changed), Header)
    for cut in range(len(sealed)):
        with pytest.raises(WireError):
            unseal(KEY, "name", sealed[:cut], Header)
    for wrong in ((b"K" * 32, "name"), (KEY, "other")):
        with pytest.raises(WireError, match="signature"):
            unseal(*wrong, sealed, Header)
    with pytest.raises(WireError, match="signature"):
        unseal(KEY, "name", seal(b"", "name", HEADER, b"frame"), Header)
    with pytest.raises(WireError, match="SHOAL_KEY_FILE"):
        unseal(b"", "name", sealed, Header)


@given(st.binary(max_size=200), st.booleans())
def test_bytes_of_any_kind_are_refused(content: bytes, with_start: bool) -> None:
    start = seal(b"", "name", HEADER)[:40] if with_start else b""
    for kind in (Header, HeadRecord, MachineRecord, type(None)):
        try:
            unseal(b"", "name", start + content, kind)
        except WireError:
            pass
        else:
            assert with_start


def test_a_message_counts_once() -> None:
    seen = Serials(KEY)
    seen.check(HEADER)
    with pytest.raises(WireError, match="received twice"):
        seen.check(HEADER)
    seen.check(Header("run", 1, "machine", 2, 4, 4, 5))
    seen.check(Header("run", 2, "machine", 2, 0, 4, 5))


# Fair shares ---------------------------------------------------------------------------------------------------


def run(name: str, order: int, need: int = 1, started: bool = True) -> HeadRecord:
    return HeadRecord(name, 1, order, need, started, 0, 10.0, "host", 1, "0")


def machine(name: str, runs: dict[int, str], starting: int = 0, refused_by: tuple[str, ...] = ()) -> MachineRecord:
    workers = [WorkerRecord(number, 1, run, 0) for number, run in runs.items()]
    return MachineRecord(name, "host", 1, "0", workers, starting, 0.0, dict.fromkeys(refused_by, "why"), 0)


def counts(runs: list[HeadRecord], machines: list[MachineRecord]) -> dict[str, int]:
    found = list(assign(runs, machines).values())
    return {run.id: found.count(run.id) for run in runs}


def test_equal_shares_and_the_older_ones_the_larger() -> None:
    free = [machine("m", dict.fromkeys(range(5), ""))]
    assert counts([run("a", 1), run("b", 2)], free) == {"a": 3, "b": 2}
    assert counts([run("a", 2), run("b", 1)], free) == {"a": 2, "b": 3}
    assert counts([], free) == {}


def test_a_new_run_gets_its_share_and_no_other_worker_moves() -> None:
    machines = [machine("m", {0: "a", 1: "a"}), machine("n", {0: "a", 1: "a"})]
    found = assign([run("a", 1), run("b", 2, started=False)], machines)
    assert found == {("m", 0): "a", ("m", 1): "a", ("n", 0): "b", ("n", 1): "b"}


def test_a_death_moves_no_worker() -> None:
    machines = [machine("m", {0: "a"}, starting=1), machine("n", {0: "b", 1: "b"})]
    assert assign([run("a", 1), run("b", 2)], machines) == {("m", 0): "a", ("n", 0): "b", ("n", 1): "b"}


def test_runs_that_wait_for_many_do_not_starve_each_other() -> None:
    free = [machine("m", dict.fromkeys(range(4), ""))]
    both = [run("a", 1, need=4, started=False), run("b", 2, need=4, started=False)]
    assert counts(both, free) == {"a": 4, "b": 0}
    assert counts([run("a", 1), both[1]], free) == {"a": 4, "b": 0}, "it waits until the other run ends"
    assert counts([run("a", 1), run("b", 2, need=2, started=False)], free) == {"a": 2, "b": 2}


def test_machines_that_were_refused_work_for_others() -> None:
    machines = [machine("m", {0: "", 1: ""}, refused_by=("a",)), machine("n", {0: "", 1: ""})]
    assert counts([run("a", 1), run("b", 2)], machines) == {"a": 2, "b": 2}
    assert counts([run("a", 1), run("b", 2)], machines[:1]) == {"a": 0, "b": 2}


@given(st.data())
def test_shares_are_fair_steady_and_settle_at_once(data: st.DataObject) -> None:
    names = "abcd"[: data.draw(st.integers(0, 4))]
    runs = [run(name, order, started=data.draw(st.booleans())) for order, name in enumerate(names)]
    machines = [
        machine(name, {n: data.draw(st.sampled_from(["", "x", *names])) for n in range(data.draw(st.integers(0, 4)))})
        for name in "mno"[: data.draw(st.integers(0, 3))]
    ]
    found = assign(runs, machines)
    before = {(m.id, worker.number): worker.run for m in machines for worker in m.workers}
    assert set(found) <= set(before)
    sizes = [list(found.values()).count(name) for name in names]
    if names and len(before) >= len(names):
        assert len(found) == len(before), "no worker is idle"
        assert max(sizes) - min(sizes) <= 1
        kept = sum(found[worker] == name for worker, name in before.items())
        possible = sum(min(list(before.values()).count(name), size) for name, size in zip(names, sizes, strict=True))
        assert kept == possible, "as few as possible are moved"
    after = [machine(m.id, {s.number: found.get((m.id, s.number), "") for s in m.workers}) for m in machines]
    assert assign([run(r.id, r.order) for r in runs if r.id in found.values()], after) == found
