"""What would be launched here, and whether it fits: planning and placement without a launch.

For front ends: the plan of one model, the outlook of all. Everything is read in the asker's own
process; a running daemon is asked for its occupancy only.
"""
