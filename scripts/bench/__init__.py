"""Measures what the runner costs, as paired ratios with their spread. See ``scripts/bench.sh``.

__main__     the command: which measurements, the table, the JSON
plan         how much is measured
process      starts and ends ranks and other commands
ratio        ratios of pairs, and their spread            (plain numbers)
report       rows to a Markdown table                     (plain numbers)
machine      what it ran on, and whether that was busy
task         the training task for both sides: model, weights, token batches, recipe
turns        two loops take turns on the same ranks
syncs        calls that make the host wait for a GPU
ours         the runner's side
opponent/    the other sides, one file each, written as an expert would
pair, alone, snapshot_ranks       what runs on the ranks
compared     one pair as a row
steps        the runner and another loop, in turns: step, guard, layers, checkpoint, zero
loop, snapshot, recovery, start, memory
             the other measurements: measure(plan) -> rows
"""
