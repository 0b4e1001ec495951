"""The policy layer stays plain numbers: importing all of it never pulls in torch."""

from __future__ import annotations

from tests.programs import python

IMPORT_ALL = """
import importlib, pkgutil, sys
import runner.policy
names = [found.name for found in pkgutil.walk_packages(runner.policy.__path__, "runner.policy.")]
for name in names:
    importlib.import_module(name)
assert "torch" not in sys.modules, "runner.policy imports torch"
ours = {name for name in sys.modules if name.startswith("runner.")}
schema = {"runner.config", "runner.config.schema"}
assert all(name.startswith("runner.policy") for name in ours - schema), ours
print(*(name.rpartition(".")[2] for name in names))
"""


def test_no_policy_module_imports_torch_or_the_rest_of_the_runner() -> None:
    done = python("-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    assert {"skip_ledger", "judge", "ladder", "records"} <= set(done.stdout.split())
