"""Two network namespaces that act as two hosts."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.spmd.launching import mpirun

AGENT = """#!/bin/sh
# mpirun runs this instead of ssh: agent HOST COMMAND...
case "$1" in 10.77.7.1) name=shoal-a;; 10.77.7.2) name=shoal-b;; esac
shift
exec ip netns exec $name unshare --uts sh -c "hostname $name; $*"
"""


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[list[str]]:
    """The beginning of a command that runs ranks on two hosts."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        ip("netns", "add", "shoal-a")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces need root and iproute2")
    try:
        ip("netns", "add", "shoal-b")
        ip("link", "add", "va", "netns", "shoal-a", "type", "veth", "peer", "name", "vb", "netns", "shoal-b")
        for name, end, number in (("shoal-a", "va", 1), ("shoal-b", "vb", 2)):
            ip("-n", name, "addr", "add", f"10.77.7.{number}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")
        agent, hosts = tmp_path / "agent", tmp_path / "hosts"
        agent.write_text(AGENT)
        agent.chmod(0o755)
        hosts.write_text("10.77.7.1 slots=2\n10.77.7.2 slots=2\n")
        net = ["--prtemca", "prte_if_include", "10.77.7.0/24", "--mca", "btl_tcp_if_include", "10.77.7.0/24"]
        flags = ["--hostfile", str(hosts), "--prtemca", "plm_ssh_agent", str(agent), *net, "-x", "PYTHONPATH"]
        yield ["ip", "netns", "exec", "shoal-a", *mpirun(4), "--mca", "btl", "tcp,self", "--mca", "pml", "ob1", *flags]
    finally:
        for name in ("shoal-a", "shoal-b"):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
