"""`anyep bench`: one harness for the CPU and for GPUs.

`command` has the options, `measure` starts the ranks, `clock` is how a device takes times. `normal` and
`low_latency` define the cases of a mode, once for all devices; `rival` is the alternative without AnyEP.
`sweep` measures some of them again, at several numbers of SMs or of tokens.
`records` turns times into what `table`, `plot` and `--json` show.
"""
