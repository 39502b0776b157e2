"""The command line: one module per verb, presentation only.

stdout is the answer, stderr is the narration; `output` owns stderr, `main` owns exit codes.
"""
