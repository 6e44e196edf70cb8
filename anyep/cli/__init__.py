"""The command `anyep`: plan and doctor.

Every command prints for people, or for programs with --json. A wrong argument gives one sentence on
stderr and exit code 2, never a traceback.
"""
