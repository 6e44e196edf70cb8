"""The command `anyep`: plan, demo, bench, doctor and run.

Every command prints for people, or for programs with --json. A wrong argument gives one sentence on
stderr and exit code 2, never a traceback.
"""
