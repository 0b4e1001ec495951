"""The subcommands other than training; those that work on one thing share a module.

A command parses its arguments, calls the code that does the work, prints, and returns an exit code.
No other room imports from here. A new one takes a row in :data:`COMMANDS`, its line in the usage of
:mod:`runner.command.help`, and a sentence in some page; tests ask for both.
"""

from __future__ import annotations

# Command, and the function that takes its arguments. Imported when asked for: most want no torch.
COMMANDS = {
    "ring": "runner.command.ring:ring_command",
    "export": "runner.command.export:export_command",
    "import": "runner.command.import_:import_command",
    "check-model": "runner.command.check_model:check_model_command",
    "backtest": "runner.command.backtest:backtest_command",
    "read": "runner.command.read:read_command",
    "replay": "runner.command.replay:replay_command",
    "preflight": "runner.command.preflight:preflight_command",
    "profile": "runner.command.profile:profile_command",
    "launch": "runner.command.supervise:launch_command",
    "supervise": "runner.command.supervise:supervise_command",
    "run": "runner.command.supervise:run_command",
    "bisect": "runner.command.bisect:bisect_command",
    "prove-resume": "runner.command.prove_resume:prove_resume_command",
    "slurm": "runner.command.cluster:slurm_command",
    "slurm-job": "runner.command.cluster:slurm_job_command",
    "slurm-node": "runner.command.supervise:slurm_node_command",
    "k8s": "runner.command.cluster:k8s_command",
    "nodes": "runner.command.cluster:nodes_command",
    "plan": "runner.command.plan:plan_command",
    "demo": "runner.command.demo:demo_command",
    "report": "runner.command.show:report_command",
    "top": "runner.command.show:top_command",
    "live": "runner.command.show:live_command",
    "watch": "runner.command.watch:watch_command",
    "docs": "runner.command.help:docs_command",
    "completion": "runner.command.help:completion_command",
}
