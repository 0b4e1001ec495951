"""A run to look at: the page of a report, the live page, the table in a terminal.

Owns what is made of a run's files for a person who looks: which steps are drawn, how incidents are
told, the page and its script. Only reads what a run leaves, and knows nothing of how it runs. Must
not write into a run directory but where a caller names a file, and never raises over a line that it
cannot make sense of: such lines are counted.

``assets/`` holds the page's own style and script, and uPlot 1.6.32 (MIT, uPlot.LICENSE), which
draws the curves; :mod:`runner.report.page` has the digests of its files.
"""
