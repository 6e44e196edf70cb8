"""`anyep selftest`: checks a machine, or all hosts of a job, and writes a report that can be sent to the
maintainers.

`command` parses options and shows the result; `job` finds out whether a launcher has started this process as
a rank. `plan` has what is tested, as data; `machine` examines hosts; `on_rank` goes through the plan on every
rank: `normal` and `low_latency` against `reference`, then `timing`; `killing` has ranks of its own. `report`
is what was found, `table` prints it.
"""
