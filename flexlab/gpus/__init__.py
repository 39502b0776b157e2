"""What is here: own readers of /proc and /sys, each with the root folder as a parameter.

They never raise and never guess: a file that is missing, empty or garbage makes a value None.
"""
