"""Measures what the runner costs, as paired ratios with their spread. See ``scripts/bench.sh``.

__main__     the command: which measurements, the table, the JSON
report       ratios of pairs and their spread; rows to a Markdown table    (plain numbers)
process      starts and ends ranks and other commands
provenance   what it ran on, and whether that was busy
task         the training task for both sides: model, weights, token batches, recipe
ours, bare   the runner's side; the loop that it is held against, as an expert would write it
turns        two loops take turns on the same ranks
pair         on the ranks: the runner and the other loop
steps        pairs as rows: step, guard, layers, checkpoint
loop         the guard in a user's loop against that loop; also what its ranks run
recovery     a killed rank to the next step, warm and cold, against torchrun
"""
