import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The contract of algorithms is also for users, who do not have Shoal's markers."""
    for item in items:
        if "any_number_of_workers" in item.name or "killed_worker" in item.name:
            item.add_marker(pytest.mark.processes)
