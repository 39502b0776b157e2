"""How a plan becomes something that runs: process, external, and later docker and k3s.

`base.py` is the protocol; every runtime passes tests/runtimes/contract.py.
"""
