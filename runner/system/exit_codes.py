"""The exit codes of every command. Scripts and schedulers rely on them; they never change."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_CRASH = 1  # as is any other number that is not listed here: start the job again
EXIT_CONFIG = 2  # a setting or an input file that the user can mend
EXIT_HALTED = 3  # the guard gave up; starting again would not help
EXIT_NO_CHECKPOINT = 4
EXIT_PREEMPTED = 75  # saved, start me again: EX_TEMPFAIL; Slurm's RequeueExit can name it
