"""The table of noise: the same numbers everywhere, in one file for all processes of a machine."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shoal import engines
from shoal.base import seeding
from shoal.errors import DiskFault, UsageError
from shoal.sampling import noise_table

SIZE = noise_table.BLOCK + 1000


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of its own for each test, also for the processes that it starts."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    noise_table.open_table.cache_clear()
    yield tmp_path / f"shoal-{os.getuid()}"
    noise_table.open_table.cache_clear()


def mapped() -> str:
    """Task: which file the table of this process is mapped from (device and inode), and its last number."""
    last = noise_table.open_table(7, SIZE)[-1]
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "noise-" in line]
    return f"{lines[0].split()[3:5]} {last}"


def test_numbers_follow_from_the_seed() -> None:
    table = noise_table.open_table(7, SIZE)
    expected = [seeding.rng(7, "noise", block).standard_normal(noise_table.BLOCK, dtype=np.float32) for block in (0, 1)]
    np.testing.assert_array_equal(table, np.concatenate(expected)[:SIZE])
    assert not table.flags.writeable
    assert abs(table.mean()) < 0.02
    assert abs(table.std() - 1) < 0.02
    np.testing.assert_array_equal(
        noise_table.open_table(7, 100), table[:100], "a longer table begins with the shorter one"
    )
    assert (noise_table.open_table(8, 100) != table[:100]).all()


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_map_one_file() -> None:
    with engines.make("processes", 3) as engine:
        found = [engine.submit(mapped, key=str(number)).result() for number in range(3)]
        found += engine.map(_mapped_again, range(6))
    assert set(found) == {mapped()}


def _mapped_again(number: int) -> str:
    return mapped()


@pytest.mark.processes
def test_processes_that_begin_together_make_it_once(folder: Path) -> None:
    code = f"from shoal.sampling.noise_table import open_table as o; print(o(7, {SIZE}).sum(), flush=True); input()"
    many = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        sums = {process.stdout.readline() for process in many if process.stdout}
        assert len(sums) == 1
        assert [path.name[:6] for path in sorted(folder.iterdir())] == ["lock", "noise-"]
    finally:
        for process in many:
            process.communicate("\n", timeout=20)
    assert float(sums.pop()) == pytest.approx(float(noise_table.open_table(7, SIZE).sum()))


@pytest.mark.parametrize("damage", ["short", "first", "last"])
def test_a_damaged_file_is_made_anew(folder: Path, damage: str) -> None:
    right = noise_table.open_table(7, SIZE).copy()
    (path,) = folder.glob("noise-*")
    content = bytearray(path.read_bytes())
    if damage == "short":
        content = content[:-4]
    else:
        content[5 if damage == "first" else -5] ^= 1
    noise_table.open_table.cache_clear()
    path.write_bytes(content)
    np.testing.assert_array_equal(noise_table.open_table(7, SIZE), right)


def test_leftovers_and_tables_that_nobody_uses_are_removed(folder: Path) -> None:
    noise_table.open_table(1, 100)
    kept = noise_table.open_table(2, 100)  # mapped, so it stays
    (folder / ".tmp-noise-crashed").write_bytes(b"half")
    noise_table.open_table.cache_clear()
    noise_table.open_table(3, 100)
    assert len(list(folder.iterdir())) == 3, "the lock, the one in use and the new one"
    assert kept[0] == noise_table.open_table(2, 100)[0]


@pytest.mark.processes
def test_no_room(folder: Path) -> None:
    code = f"""
import resource
from shoal.sampling import noise_table
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    noise_table.open_table(7, {SIZE})
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("DiskFault the noise table of 0 MB could not be written to")
    assert "TMPDIR" in done.stdout
    assert [path.name for path in folder.iterdir()] == ["lock"], "nothing half-written is left"


def test_a_folder_of_somebody_else_is_not_trusted(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(UsageError, match=r"only you can write to.*TMPDIR"):
        noise_table.open_table(7, 10)
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(UsageError, match="only you can write to"):
        noise_table.open_table(7, 10)
    folder.unlink()
    folder.write_text("a file")
    with pytest.raises(DiskFault, match="cannot be created"):
        noise_table.open_table(7, 10)


@pytest.mark.parametrize("size", [1, 1000, noise_table._COLUMNS, noise_table._COLUMNS + 5, 3 * noise_table._COLUMNS])
def test_weighted_sum(size: int) -> None:
    table = noise_table.open_table(7, SIZE)
    rng = np.random.default_rng(0)
    for count in (1, noise_table._ROWS, 5 * noise_table._ROWS + 3):
        weights, places = rng.normal(size=count), rng.integers(0, SIZE - size, count, endpoint=True)
        expected = sum(w * table[p : p + size].astype(np.float64) for w, p in zip(weights, places, strict=True))
        np.testing.assert_allclose(
            noise_table.weighted_sum(table, weights, places, size), expected, rtol=2e-4, atol=2e-5
        )
