"""Programs of ours that ARE a backend, started by `python -m flexlab.engines.NAME` alone.

Nobody imports them: each runs in a process of its own, with a session and a log file of its own,
and may take that process down. They import core and spec and nothing else of FlexLab.
"""
