"""The subcommands beside training, a module each.

A command reads arguments, calls what does the work, prints, and returns an exit code. Nothing
else imports from here.
"""
