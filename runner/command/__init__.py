"""The subcommands other than training; those that work on one thing share a module.

A command parses its arguments, calls the code that does the work, prints, and returns an exit code.
No other room imports from here.
"""
