"""The ray engine and its options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from shoal.base.host import available_cores
from shoal.engines.functions import main_script
from shoal.engines.ray.session import RuntimeEnv, Session, restore_sigterm_handler
from shoal.engines.ray.transport import RayTransport
from shoal.engines.remote import RemoteEngine
from shoal.engines.scheduler import Scheduler
from shoal.engines.user_code import refuse_while_imported
from shoal.engines.wire import WorkerSettings
from shoal.errors import UsageError

OPTIONS = ("placement", "num_cpus", "resources", "runtime_env")
"""Keys of `--engine-options`."""
PLACEMENTS = ("spread", "pack")

_PATIENCE = 300.0  # seconds that tasks wait for a first worker: a runtime environment may have to be installed


def problems(address: str | None, options: Mapping[str, object]) -> list[str]:
    """List everything that is wrong with an address and options."""
    found = []
    if address is not None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            found.append(f"the address of a Ray cluster is HOST:PORT, such as ray://10.0.0.1:6379, not {address!r}")
    found += [f"ray has no option {name!r}, only {', '.join(OPTIONS)}" for name in options if name not in OPTIONS]
    if options.get("placement", "spread") not in PLACEMENTS:
        found.append(f"placement is spread (over the nodes) or pack (fill one first), not {options['placement']!r}")
    amounts: dict[str, object] = {"num_cpus": options.get("num_cpus", 1)}
    resources, environment = options.get("resources", {}), options.get("runtime_env", {})
    if isinstance(resources, dict):
        amounts |= {f"resources: {name}": amount for name, amount in resources.items()}
    else:
        found.append(f'resources are names and amounts such as {{"gpu_node": 1}}, not {resources!r}')
    for name, amount in amounts.items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount > 0:
            found.append(f"{name} must be a number above 0, not {amount!r}")
    if not isinstance(environment, dict):
        found.append(f'runtime_env is a Ray runtime environment such as {{"working_dir": "."}}, not {environment!r}')
    return found


class RayEngine(RemoteEngine):
    """`workers` actors of a Ray cluster (default: as many as fit while nodes join and leave).

    Without an address it joins the cluster of RAY_ADDRESS; if that is not set, it starts Ray on this machine.
    `placement` is "spread" over the nodes or "pack" (fill one first). Each worker takes `num_cpus` and `resources` of
    its node. `runtime_env` is Ray's: `{"working_dir": "."}` ships the modules of this folder to the nodes.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        address: str | None = None,
        placement: str = "spread",
        num_cpus: float = 1.0,
        resources: Mapping[str, float] | None = None,
        runtime_env: RuntimeEnv | None = None,
        task_timeout: float | None = None,
        lease: float = 10.0,
        allow_mixed: bool = False,
    ) -> None:
        refuse_while_imported()  # before Ray is started in vain
        options = {"placement": placement, "num_cpus": num_cpus, "resources": resources or {}}
        wrong = problems(address, options | {"runtime_env": runtime_env or {}})
        if wrong:
            raise UsageError(wrong)
        demand = {"CPU": num_cpus} | dict(resources or {})
        shipped = dict(runtime_env or {})
        cpus = max(float(available_cores()), (workers or 0) * num_cpus)
        session = Session.join(address or os.environ.get("RAY_ADDRESS"), cpus, shipped)
        restore_sigterm_handler()
        try:
            self._ray = RayTransport(session, workers, demand, placement, shipped)
        except BaseException:
            session.leave()
            raise
        main = main_script()
        self._source = Path(main).read_bytes() if main and Path(main).is_file() else None
        scheduler = Scheduler(task_timeout=task_timeout, lease=lease, patience=_PATIENCE)
        super().__init__(self._ray, workers=self._ray.wanted, scheduler=scheduler, allow_mixed=allow_mixed)
        self._ray.resized = self._resize

    def _resize(self, workers: int) -> None:
        self.workers = workers

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are running on this machine, oldest first."""
        return self._ray.pids()

    def _settings(self) -> WorkerSettings:
        """Add the script's source, because other nodes need not have the file."""
        return {**super()._settings(), "source": self._source}
