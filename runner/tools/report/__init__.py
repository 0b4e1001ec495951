"""A run to look at: the page of a report, the live page, the table in a terminal.

Owns how a run's files are shown to a person: which steps are drawn, how incidents are described,
the page and its script. It only reads files that a run leaves, and knows nothing about how a run
works. It must not write into a run directory, except to a file that the caller names. It never
raises for a line that it cannot parse; it counts such lines.

``assets/`` holds the page's own style and script, and uPlot 1.6.32 (MIT, uPlot.LICENSE), which
draws the curves; :mod:`runner.tools.report.page` has the digests of its files.
"""
