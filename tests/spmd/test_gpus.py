"""The GPUs that ranks get, through the environment variables that frameworks read. No GPU is needed."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.errors import UsageError
from shoal.spmd import gpus, launch
from shoal.spmd.gpus import VisibleGpus, amd_gpus, initialised_by, installed_gpus, nvidia_gpus, visible_gpus
from shoal.spmd.launching import LocalPlace, divides_gpus, local_place, mpirun
from shoal.spmd.sharing import OwnGpus, memory_variables

ROOT = Path(__file__).parents[2]
CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
FRACTION, GROWTH = "XLA_PYTHON_CLIENT_MEM_FRACTION", "TF_FORCE_GPU_ALLOW_GROWTH"
FOUR = tuple(f"GPU-{letter * 8}" for letter in "abcd")


def by_mpirun(ranks: int) -> list[dict[str, str]]:
    return [
        {
            "OMPI_COMM_WORLD_RANK": str(r),
            "OMPI_COMM_WORLD_SIZE": str(ranks),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(r),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks),
        }
        for r in range(ranks)
    ]


def by_srun(ranks: int) -> list[dict[str, str]]:
    return [
        {
            "SLURM_PROCID": str(r),
            "SLURM_LOCALID": str(r),
            "SLURM_NODEID": "0",
            "SLURM_STEP_NUM_TASKS": str(ranks),
            "SLURM_STEP_TASKS_PER_NODE": str(ranks),
        }
        for r in range(ranks)
    ]


def by_unknown(ranks: int) -> list[dict[str, str]]:
    return [{"ALPS_APP_PE": str(r)} for r in range(ranks)]


class Rank(dict[str, str]):
    """Variables that a rank has got, and those that it had before MPI started."""

    before_mpi: dict[str, str]


def ranks_get(
    environments: Sequence[Mapping[str, str]],
    nvidia: Sequence[Sequence[str] | None] | None = None,
    amd: Sequence[str] | None = None,
    initialised: Mapping[int, str] | None = None,
    hosts: Sequence[str] | None = None,
) -> list[Rank]:
    """Run every rank in a thread; return the variables that each of them sets or changes."""
    offers = [""] * len(environments)
    all_here = threading.Barrier(len(environments), timeout=20)

    def rank(r: int) -> Rank:
        variables = dict(environments[r])
        visible = visible_gpus(variables, nvidia[r] if nvidia else None, amd)
        own = OwnGpus(variables, visible, (initialised or {}).get(r, ""), hosts[r] if hosts else "host")

        def changed() -> Rank:
            return Rank((name, value) for name, value in variables.items() if environments[r].get(name) != value)

        def exchange(text: bytes) -> list[str]:
            offers[r] = text.decode()
            all_here.wait()
            return list(offers)

        own.choose_before_mpi()
        before = changed()
        own.choose(r, exchange)
        result = changed()
        result.before_mpi = before
        return result

    with ThreadPoolExecutor(len(environments)) as pool:
        return list(pool.map(rank, range(len(environments))))


def with_variables(environments: Sequence[Mapping[str, str]], **more: str) -> list[dict[str, str]]:
    return [{**variables, **more} for variables in environments]


@pytest.mark.parametrize(
    ("ranks", "listed", "expected", "fraction"),
    [
        (1, "0,1", [None], None),  # alone: nothing changes
        (4, "0,1,2,3", ["0", "1", "2", "3"], None),
        (2, "0,1,2,3", ["0,1", "2,3"], None),
        (2, "0,1,2", ["0", "1"], None),
        (4, "0,1", ["0", "0", "1", "1"], "0.45"),
        (4, "5", [None] * 4, "0.22"),
        (5, "6,3", ["6", "6", "6", "3", "3"], ["0.30", "0.30", "0.30", "0.45", "0.45"]),
        (2, "GPU-x,GPU-y", ["GPU-x", "GPU-y"], None),
        (2, "MIG-x,MIG-GPU-y/1/0", ["MIG-x", "MIG-GPU-y/1/0"], None),
        (2, "", [None, None], None),
        (2, "-1", [None, None], None),
    ],
)
def test_ranks_divide_the_gpus_they_see(
    ranks: int, listed: str, expected: list[str | None], fraction: str | list[str] | None
) -> None:
    for start in (by_mpirun, by_srun, by_unknown):
        got = ranks_get(with_variables(start(ranks), **{CUDA: listed}))
        assert [one.get(CUDA) for one in got] == expected, start
        fractions = fraction if isinstance(fraction, list) else [fraction] * ranks
        assert [one.get(FRACTION) for one in got] == fractions
        assert [one.get(GROWTH) for one in got] == ["true" if f else None for f in fractions]
        assert [one.before_mpi.get(CUDA) for one in got] == ([None] * ranks if start is by_unknown else expected)


def test_unlisted_gpus_are_divided() -> None:
    got = ranks_get(by_mpirun(4), nvidia=[FOUR] * 4)
    assert got == [{CUDA: str(r)} for r in range(4)]
    assert ranks_get(by_mpirun(4)) == [{}] * 4  # no GPU


def test_each_host_is_divided_separately() -> None:
    got = ranks_get(with_variables(by_unknown(4), **{CUDA: "0,1"}), hosts=["left", "left", "left", "right"])
    assert [one.get(CUDA) for one in got] == ["0", "0", "1", None]
    assert [one.get(FRACTION) for one in got] == ["0.45", "0.45", None, None]


@pytest.mark.parametrize("start", [by_mpirun, by_srun, by_unknown])
def test_gpus_from_the_launcher_are_kept(start: Callable[[int], list[dict[str, str]]]) -> None:
    listed = [variables | {CUDA: str(r)} for r, variables in enumerate(start(4))]
    assert ranks_get(listed) == [{}] * 4
    # Under Slurm's cgroups each task sees its own GPU as number 0.
    hidden = with_variables(start(4), **{CUDA: "0"})
    assert ranks_get(hidden, nvidia=[(one,) for one in FOUR]) == [{}] * 4
    assert ranks_get(start(4), nvidia=[(one,) for one in FOUR]) == [{}] * 4
    # Two each: what was chosen before MPI started is corrected.
    two = [variables | {CUDA: "0,1" if r == 0 else "2,3"} for r, variables in enumerate(start(2))]
    assert ranks_get(two, nvidia=[FOUR] * 2) == [{}] * 2


def test_gpus_bound_by_srun_are_not_divided_before_mpi() -> None:
    for bound in (
        {"SLURM_GPUS_PER_TASK": "2"},
        {"SLURM_TRES_PER_TASK": "cpu:4,gres/gpu:2"},
        {"SLURM_GPU_BIND": "closest"},
    ):
        got = ranks_get(
            [variables | bound | {CUDA: "0,1" if r == 0 else "2,3"} for r, variables in enumerate(by_srun(2))]
        )
        assert [one.before_mpi for one in got] == [{}, {}]
        assert got == [{}, {}]


def test_gpus_that_overlap_are_shared() -> None:
    got = ranks_get([variables | {CUDA: "0,1" if r == 0 else "1"} for r, variables in enumerate(by_unknown(2))])
    assert got == [{FRACTION: "0.45", GROWTH: "true"}] * 2


@pytest.mark.parametrize(
    "users",
    [
        {FRACTION: "0.2"},
        {"XLA_CLIENT_MEM_FRACTION": "0.2"},
        {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
    ],
)
def test_memory_that_the_user_has_bounded_is_left(users: dict[str, str]) -> None:
    assert memory_variables(users, 2) == {GROWTH: "true"}
    assert memory_variables({GROWTH: "false"}, 3) == {FRACTION: "0.30"}
    assert memory_variables({}, 1) == {}
    assert memory_variables({}, 7)[FRACTION] == "0.12"
    assert memory_variables({}, 200)[FRACTION] == "0.01"


def test_ranks_that_are_too_late_are_left_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    got = ranks_get(with_variables(by_mpirun(3), **{CUDA: "0,1,2"}), initialised={1: "JAX", 2: "JAX"})
    assert got == [{CUDA: "0"}, {}, {}]
    warning = capsys.readouterr().err
    assert warning.count("warning:") == 1
    assert "JAX had already initialised them on rank 1 (and 1 more)" in warning
    assert "Call spmd.launch(n)" in warning
    assert "SHOAL_SPMD_GPUS=all" in warning
    ranks_get([variables | {CUDA: str(r)} for r, variables in enumerate(by_mpirun(2))], initialised={0: "JAX"})
    assert capsys.readouterr().err == ""  # there was nothing to change


@pytest.mark.parametrize(
    ("listed", "entries"),
    [
        (None, "0 1 2 3"),
        ("2,0", "2 0"),
        (" 2 , 1", "2 1"),
        ("0,2,-1,1", "0 2"),
        ("0,9,1", "0"),
        ("0,,1", "0"),
        ("0,none,1", "0"),
        ("1,0,1", ""),
        ("GPU-bb,GPU-aaaaaaaa", "GPU-bb GPU-aaaaaaaa"),
        ("GPU-bb,GPU-x,GPU-a", "GPU-bb"),  # no such GPU
        ("GPU-,0", ""),  # not unique
        ("MIG-x,MIG-y", "MIG-x MIG-y"),
        ("NoDevFiles", ""),
        ("", ""),
    ],
)
def test_lists_are_read_as_by_cuda(listed: str | None, entries: str) -> None:
    variables = {} if listed is None else {CUDA: listed}
    assert " ".join(visible_gpus(variables, FOUR, None).entries) == entries


def test_uuids_and_indices_name_the_same_gpu() -> None:
    assert visible_gpus({CUDA: "3,GPU-bb"}, FOUR, None).ids == (FOUR[3], FOUR[1])
    assert visible_gpus({CUDA: "GPU-x,1"}, ("0000:01:00.0", "0000:02:00.0"), None).ids == ("GPU-x", "0000:02:00.0")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, VisibleGpus(HIP, ("0", "1", "2", "3"), FOUR)),
        ({ROCR: "2,GPU-dd"}, VisibleGpus(HIP, ("0", "1"), FOUR[2:])),
        ({ROCR: "1,2,3", HIP: "2,0"}, VisibleGpus(HIP, ("2", "0"), (FOUR[3], FOUR[1]))),
        ({ROCR: "1,2", HIP: "2"}, VisibleGpus(HIP, (), ())),
        ({CUDA: "3"}, VisibleGpus(CUDA, ("3",), FOUR[3:])),
        ({CUDA: "3", HIP: "1"}, VisibleGpus(HIP, ("1",), FOUR[1:2])),
        ({ROCR: ""}, VisibleGpus(HIP, (), ())),
        ({ROCR: "", HIP: "0"}, VisibleGpus(HIP, (), ())),
    ],
)
def test_amd_lists_apply_one_after_the_other(variables: dict[str, str], expected: VisibleGpus) -> None:
    assert visible_gpus(variables, None, FOUR) == expected


def test_amd_gpus_are_divided() -> None:
    got = ranks_get(with_variables(by_srun(2), **{ROCR: "1,3"}), amd=FOUR)
    assert got == [{HIP: "0"}, {HIP: "1"}]
    assert ranks_get(with_variables(by_srun(2), **{ROCR: "1,3"})) == got  # without AMD's files


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (by_mpirun(4)[3], LocalPlace(3, 4)),
        ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_RANK": "5", "PMI_SIZE": "8"}, LocalPlace(1, 2)),
        ({"MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "2"}, LocalPlace(1, 2)),
        ({"PALS_RANKID": "7", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"}, LocalPlace(1, 2)),
        ({"PALS_RANKID": "7", "PALS_LOCAL_RANKID": "1"}, None),
        ({"PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}, LocalPlace(1, 2)),
        (by_srun(4)[2], LocalPlace(2, 4)),
        (by_srun(4)[2] | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, LocalPlace(2, 3)),
        (by_srun(4)[2] | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "3"}, None),
        (by_srun(4)[2] | {"SLURM_GPUS_PER_TASK": "1"}, LocalPlace(2, 4, gpus_bound=True)),
        (by_srun(4)[2] | {"SLURM_GPU_BIND": "none"}, LocalPlace(2, 4)),
        # mpirun inside a Slurm job: its ranks inherit the numbers of the daemon that srun has started
        (by_srun(2)[1] | by_mpirun(4)[3] | {"SLURM_GPUS_PER_TASK": "1"}, LocalPlace(3, 4)),
        (by_srun(2)[1] | {"PMI_RANK": "3", "PMI_SIZE": "4"}, None),
        ({"PMIX_RANK": "3"}, None),
        ({}, None),
    ],
)
def test_local_place(variables: dict[str, str], expected: LocalPlace | None) -> None:
    assert local_place(variables) == expected


def test_nvidia_gpus_are_those_that_may_be_opened(tmp_path: Path) -> None:
    """The driver lists what a container hides."""
    devices = tmp_path / "dev"
    devices.mkdir()
    for address, minor, uuid in (
        ("0000:41:00.0", 0, FOUR[1]),
        ("0000:01:00.0", 1, FOUR[0]),
        ("0000:c1:00.0", 2, FOUR[2]),
    ):
        folder = tmp_path / "proc" / address
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t NVIDIA A100\nGPU UUID: \t {uuid}\nBus Location: \t {address}\nDevice Minor: \t {minor}\n"
        )
    (devices / "nvidia0").touch()
    (devices / "nvidia1").touch()
    assert nvidia_gpus(tmp_path / "proc", devices) == (FOUR[0], FOUR[1])
    assert nvidia_gpus(tmp_path / "nothing", devices) == ()
    unused = tmp_path / "proc/0000:41:00.0/information"
    unused.write_text(unused.read_text().replace(FOUR[1], "GPU-????????-????"))
    assert nvidia_gpus(tmp_path / "proc", devices) == (FOUR[0], "0000:41:00.0")


@pytest.mark.processes
def test_nvidia_smi_is_asked_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(
        "#!/bin/sh\n"
        "echo 'GPU 0: NVIDIA A100 (UUID: GPU-aaaaaaaa)'\n"
        "echo '  MIG 1g.5gb     Device  0: (UUID: MIG-x)'\n"
        "echo 'GPU 1: NVIDIA A100 (UUID: GPU-bbbbbbbb)'\n"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(gpus, "nvidia_gpus", tuple)
    monkeypatch.setattr(gpus, "amd_gpus", tuple)
    assert installed_gpus({}) == (FOUR[:2], None)
    assert installed_gpus({CUDA: "0"}) == (None, None)


def test_amd_gpus_are_the_nodes_with_shaders(tmp_path: Path) -> None:
    for node, shaders, unique in ((0, 0, 0), (10, 304, 255), (2, 304, 0)):
        folder = tmp_path / str(node)
        folder.mkdir()
        (folder / "properties").write_text(f"cpu_cores_count 0\nsimd_count {shaders}\nunique_id {unique}\n")
    (tmp_path / "11" / "properties").mkdir(parents=True)  # cannot be read
    assert amd_gpus(tmp_path) == ("node 2", "GPU-00000000000000ff")


def test_initialised_frameworks_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "jax._src.xla_bridge", "tensorflow.python.eager.context"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert initialised_by(tmp_path) == ""
    started = False
    cuda = SimpleNamespace(is_initialized=lambda: started)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert initialised_by(tmp_path) == ""
    started = True
    assert initialised_by(tmp_path) == "PyTorch"
    started = False
    backends = {"cpu": object()}
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", SimpleNamespace(_backends=backends))
    assert initialised_by(tmp_path) == ""
    backends["cuda"] = object()
    assert initialised_by(tmp_path) == "JAX"
    backends.clear()
    context = SimpleNamespace(_context=None)
    monkeypatch.setitem(sys.modules, "tensorflow.python.eager.context", context)
    assert initialised_by(tmp_path) == ""
    context._context = SimpleNamespace(_initialized=True)
    assert initialised_by(tmp_path) == "TensorFlow"
    context._context = None
    (tmp_path / "3").symlink_to("/dev/nvidiactl")
    assert initialised_by(tmp_path) == ""
    (tmp_path / "4").symlink_to("/dev/nvidia-uvm")
    assert "torch.cuda.is_available" in initialised_by(tmp_path)


@pytest.mark.trains
def test_jax_still_has_the_table_of_backends_that_is_read() -> None:
    import jax

    jax.devices()
    assert "cpu" in sys.modules["jax._src.xla_bridge"]._backends


def test_opting_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUDA, "0,1")
    assert OwnGpus.of_this_process().seen.gpus != ()
    monkeypatch.setenv("SHOAL_SPMD_GPUS", "all")
    assert OwnGpus.of_this_process().seen.gpus == ()
    assert divides_gpus({"SHOAL_SPMD_GPUS": "share"})
    monkeypatch.setenv("SHOAL_SPMD_GPUS", "each")
    with pytest.raises(UsageError, match="SHOAL_SPMD_GPUS='each' is neither share"):
        launch(2)


@pytest.mark.mpi
@pytest.mark.skipif(len(nvidia_gpus()) == 1, reason="the variable in this test lists two GPUs")
@pytest.mark.parametrize("how", ["launch", "mpirun"])
def test_ranks_under_mpirun(tmp_path: Path, how: str) -> None:
    shown = (
        "map(os.environ.get, ['CUDA_VISIBLE_DEVICES', 'XLA_PYTHON_CLIENT_MEM_FRACTION', 'TF_FORCE_GPU_ALLOW_GROWTH'])"
    )
    script = tmp_path / "script.py"
    # `launch` alone must be enough; without it, the first call.
    begin = f"spmd.launch(4)\nshown = list({shown})\n" if how == "launch" else f"spmd.sum(1)\nshown = list({shown})\n"
    script.write_text(f"import os\nfrom shoal import spmd\n{begin}print(spmd.rank(), *shown)\n")
    command = [sys.executable, str(script)] if how == "launch" else [*mpirun(4), sys.executable, str(script)]
    environment = {name: value for name, value in os.environ.items() if name not in (FRACTION, GROWTH)}
    environment |= {"PYTHONPATH": str(ROOT), CUDA: "0,1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 0 0.45 true", "1 0 0.45 true", "2 1 0.45 true", "3 1 0.45 true"]
