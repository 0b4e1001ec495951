"""What the runner costs: everything as paired ratios with their spread. See ``scripts/bench.sh``.

__main__     the command: which measurements, the table, the JSON
plan         how much is measured
process      starts ranks and other commands, and sees to their end
ratio        ratios of pairs, and their spread            (plain numbers)
report       rows to a Markdown table                     (plain numbers)
machine      what it ran on, and whether that was busy
task         one training task for everybody: model, weights, token batches, recipe
turns        two loops take turns on the same ranks
syncs        calls that make the host wait for a GPU
ours         the runner's side
opponent/    the other sides: a file each, as a competent person writes it
pair, alone, snapshot_ranks       what runs on the ranks
compared     one pair as a row
step, guard, layers, checkpoint, zero, snapshot, recovery, start, framework, memory, growth
             the measurements: measure(plan) -> rows
"""
