"""Which of the user's modules a run may make this process import.

To resume or evaluate a run imports the modules that its files name, and importing runs code. A run of the same user may
name any module, and the folder in which it was found is searched again. For runs of other users, and for policy files
without a run, each module has to be allowed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal import algos
from shoal.engines import user_code
from shoal.engines.functions import covers
from shoal.envs.names import full_name
from shoal.envs.wrappers import users_modules
from shoal.errors import UsageError
from shoal.runs.folder import CONFIG, RunDir, RunRecord, policy_file


def modules_of_run(algo: str, settings: Mapping[str, Any]) -> list[str]:
    """List the user's modules, by name or file, that a run consists of."""
    own = [] if algos.is_builtin(algo) or algo in algos.installed() else [algo]
    return list(dict.fromkeys([*own, *users_modules(settings["env"], settings.get("wrap", ()))]))


def trust_run(run: RunDir, record: RunRecord, allow: Collection[str]) -> None:
    """Make the modules of a run importable, or raise if it is another user's and they are not allowed."""
    modules = modules_of_run(record["algo"], record["settings"])
    if _is_own(run.path, run.config_file):
        _add_folders(record.get("folders", {}), modules)
    else:
        _refuse_others(modules, allow, f"the run {run.path} belongs to another user")


def trust_policy(name: str, root: Path, env: Mapping[str, Any], allow: Collection[str]) -> None:
    """Do the same for the environment of a policy, by the name of its run or the path of its file."""
    modules = users_modules(env["id"], env.get("wrap", ()))
    file = policy_file(name, root)
    run = next((RunDir(folder) for folder in list(file.parents)[:3] if (folder / CONFIG).is_file()), None)
    if run is None:
        _refuse_others(modules, allow, f"the policy file {file} is not in the folder of a run")
    elif _is_own(run.path, run.config_file, file):
        _add_folders(run.record().get("folders", {}), modules)
    else:
        _refuse_others(modules, allow, f"the policy file {file} belongs to another user")


def folders_of(modules: Iterable[str]) -> dict[str, str]:
    """Return the folder in which each module was found, for the record of a run. Files need none."""
    return {name: user_code.folder_of(user_code.load(name)) for name in modules if not user_code.is_file(name)}


def _is_own(*paths: Path) -> bool:
    return all(path.stat().st_uid == os.geteuid() for path in paths)


def _add_folders(folders: Mapping[str, str], modules: Iterable[str]) -> None:
    for name in modules:
        folder = folders.get(name, "")
        if folder and folder not in sys.path and not user_code.is_importable(name):
            sys.path.append(folder)


def _refuse_others(modules: Iterable[str], allow: Collection[str], reason: str) -> None:
    allowed = [full_name(name) for name in allow]
    asked = [name for name in modules if not covers(allowed, name)]
    if asked:
        flags = " ".join(f"--allow {name}" for name in asked)
        raise UsageError(f"{reason}, and names code to import. If you trust {' and '.join(asked)}, add {flags}")
