"""``holdfast completion SHELL``: completes commands, settings and presets at the Tab key.

bash: eval "$(holdfast completion bash)"    in ~/.bashrc
zsh:  eval "$(holdfast completion zsh)"     in ~/.zshrc, after compinit
fish: holdfast completion fish | source     in ~/.config/fish/config.fish
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from runner.command.arguments import Parser
from runner.command.table import COMMANDS
from runner.config.compose import fields, packaged_configs
from runner.config.schema import RunConfig
from runner.system.error import EXIT_DONE

# The words stand in the scripts: a Python process at each Tab would take half a second.
# In bash "=" separates words, so what stands before it is taken off the answers.
_BASH = """\
_holdfast() {
  local typed="${COMP_LINE:0:COMP_POINT}"
  typed="${typed##* }"
  COMPREPLY=($(compgen -W '%s' -- "$typed"))
  if [[ "$typed" == *=* ]]; then COMPREPLY=("${COMPREPLY[@]#"${typed%%=*}="}"); fi
  if [[ "${COMPREPLY[0]-}" == *= ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -o default -F _holdfast holdfast
"""
_ZSH = """\
_holdfast() {
  local -a words_of=(%s)
  compadd -S '' -- ${(M)words_of:#*=}
  compadd -- ${words_of:#*=}
  _files
}
compdef _holdfast holdfast
"""
_FISH = "complete -c holdfast -a '%s'\n"
_SHELLS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def completion_command(arguments: Sequence[str]) -> int:
    """Print the script that completes commands, settings and presets in a shell."""
    parser = Parser("completion", completion_command.__doc__)
    parser.add_argument("shell", choices=_SHELLS)
    sys.stdout.write(_SHELLS[parser.parse_args(arguments).shell] % " ".join(words()))
    return EXIT_DONE


def words() -> list[str]:
    """All that can stand in a command line: commands, presets, ``key=``."""
    presets = (f"{path.parent.name}={path.stem}" for path in packaged_configs().glob("*/*.yaml"))
    keys = (f"{name}=" for name, _, _ in fields(RunConfig()))
    return ["train", *COMMANDS, *sorted({*presets, *keys})]
