"""``tensorferry completion``: what a shell reads to complete the command's arguments."""

from __future__ import annotations

from typing import Literal

from .. import exits


def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Prints the completion for a shell. Nothing is installed: the shell reads it.

    bash: source <(tensorferry completion bash) in ~/.bashrc. zsh: tensorferry completion zsh > a file called
    _tensorferry in a folder of $fpath. fish: tensorferry completion fish >
    ~/.config/fish/completions/tensorferry.fish.

    Args:
        shell: the shell
    """
    from ..app import application

    # Of many lines, and of nobody else's text.
    print(application().generate_completion(prog_name="tensorferry", shell=shell))
    return exits.OK
