"""Start ranks on this machine, and end them together.

    from anyep.launch import launch

    exit_code = launch(8, [sys.executable, "-u", "train.py"])

`programs` starts any program as ranks, each in a new interpreter; `output` prints what they print. `forked`
forks ranks from a process that has loaded torch already, to call functions of this program. `processes` is
what both need to know about processes. Either way, no rank outlives the process that started it.
"""

from anyep.launch.programs import launch, rank_environment

__all__ = ["launch", "rank_environment"]
