"""Records, inside the processes of a stranger's script, what each optimizer step reads.

Loaded by ``on_path/sitecustomize.py`` under another name than ``runner``, which may be a name of
the stranger's: so its imports are relative. Never changes random state, numerics, autograd or the
order of collectives, and no error in it reaches the script.
"""
